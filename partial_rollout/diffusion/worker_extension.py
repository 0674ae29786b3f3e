"""Runs inside vllm-omni's workers: snapshots of the requests there, and new weights.

No method raises: an exception in a call to the workers ends the thread that all calls go through. What went wrong is
returned instead, as a `Report`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from partial_rollout.diffusion.contract import channel_name
from partial_rollout.diffusion.qwen_image import sample_of
from partial_rollout.diffusion.snapshot import pack
from partial_rollout.errors import WeightMismatch
from partial_rollout.rollout.ends_with_server import end_with_parent
from partial_rollout.weights.directory import ChannelAddress
from partial_rollout.weights.receiver import WeightReceiver
from partial_rollout.weights.transport import Transports

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator


PREFIX = "transformer."
"""Begins the names of the trained parameters in the pipeline; the trainer sends names without it."""
NUM_NAMED_PARAMETERS = 8
BY_HOST = Transports(cuda=None)
"""The job trains on a GPU of its own, and the channel's buffers on a GPU need both ends on it: host memory for all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """A worker's answer to a call."""

    value: Any = None
    error: str | None = None
    """Class and message of the exception; None if there was none."""


class DiffusionWorkerExtension(CustomPipelineWorkerExtension):
    """Mixed into vllm-omni's DiffusionWorker."""

    model_runner: Any
    rank: int

    def re_init_pipeline(self, custom_pipeline_args: dict[str, Any]) -> None:
        """Load our pipeline; where a worker is a process of its own (vllm-omni 0.24), it ends with its server."""
        end_with_parent()
        super().re_init_pipeline(custom_pipeline_args)

    def denoising_boundary(self) -> int:
        """Denoise steps that were computed here, each request's counted; answered while none is running."""
        return self.model_runner.pipeline.num_denoise_steps

    def pack_samples(self) -> Report:
        """Snapshots by request name of all that have begun; their state stays here until `forget_samples`."""
        return _reported(self._pack_samples)

    def forget_samples(self, *, names: Collection[str]) -> Report:
        """Drop the state of these requests; those that are not here have been dropped before."""
        return _reported(lambda: self._forget_samples(names))

    def receive_weights(self, *, version: int, timeout_s: float, is_part: bool) -> Report:
        """One update of the transformer by our channel; the steps after it carry `version`.

        `is_part`: the others stay as they are.
        """
        return _reported(lambda: self._receive(version, timeout_s, is_part=is_part))

    def _begun(self) -> dict[str, Any]:
        """The runner's key of each request that has begun, by its name."""
        states = self.model_runner.state_cache.items()
        return {sample_of(state).options.name: key for key, state in states if state.latents is not None}

    def _pack_samples(self) -> dict[str, bytes]:
        runner = self.model_runner
        return {name: pack(runner.pipeline.state_of(runner.state_cache[key])) for name, key in self._begun().items()}

    def _forget_samples(self, names: Collection[str]) -> None:
        for name, key in self._begun().items():
            if name in names:
                del self.model_runner.state_cache[key]

    def _receive(self, version: int, timeout_s: float, *, is_part: bool) -> int:
        pipeline, address = self.model_runner.pipeline, ChannelAddress.inherited()
        channel = channel_name(self.rank)
        receiver = WeightReceiver(
            address, channel, update_number=version, timeout_s=timeout_s, device=pipeline.device, transports=BY_HOST
        )
        sent: set[str] = set()
        with receiver, torch.no_grad():
            loaded = pipeline.load_weights(_under_prefix(receiver, sent))
        expected = {name for name, _ in pipeline.named_parameters() if name.startswith(PREFIX)}
        if not sent:
            raise WeightMismatch("the update has no weights")
        # vllm-omni tells of each name that it has taken, and of the parameter that it is a part of.
        wanted, what = (sent, "are not the model's") if is_part else (expected, "were not sent")
        missing = sorted(wanted - loaded)
        if missing:
            named = ", ".join(missing[:NUM_NAMED_PARAMETERS])
            raise WeightMismatch(f"{len(missing)} of {len(wanted)} parameters {what}: {named}")
        pipeline.weight_version = version
        return version


def _under_prefix(receiver: WeightReceiver, sent: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as they come; their names are added to `sent`."""
    for name, tensor in receiver.tensors():
        sent.add(PREFIX + name)
        yield PREFIX + name, tensor


def _reported(call: Callable[[], Any]) -> Report:
    try:
        return Report(value=call())
    except Exception as error:  # noqa: BLE001 - raised again by whoever asked, see the head of this file
        return Report(error=f"{type(error).__name__}: {error}")
