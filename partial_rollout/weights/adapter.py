"""The training worker that sends weights by our channel.

On every training rank, inside verl's `CheckpointEngineManager.update_weights` (backend "naive"):

    rank with the server handle    PartialRolloutServer.receive_weights ──→ one call in every engine worker
    every rank                     WeightSender ══ its own channel ══→ the engine worker of the same rank

Both run at the same time; the rank with the handle also waits for the server, which has then set the weight version.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import ray
import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.vllm_rollout import ServerAdapter

from partial_rollout.config import PartialRolloutConfig
from partial_rollout.errors import WaitTimeout, WeightProtocolError
from partial_rollout.mode import channel_lacks, read_settings
from partial_rollout.weights.sender import WeightSender

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    from omegaconf import DictConfig

    from partial_rollout.weights.directory import ChannelAddress

WIRE_FORMAT = "named_tensors"


def uses_channel(config: DictConfig) -> bool:
    """Whether this run sends weights by our channel; on a GPU only when asked to."""
    backend = read_settings(config).weights.backend
    return backend == "channel" or (backend == "auto" and get_device_name() == "cpu" and not channel_lacks(config))


class ChannelAdapter(ServerAdapter):
    """verl's adapter with another `update_weights`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what ServerAdapter takes."""
        super().__init__(*args, **kwargs)
        settings = PartialRolloutConfig.from_rollout(self.config.custom)
        self._settings, self._timeouts = settings.weights, settings.timeouts
        self._round = 0
        self._server: Any = None
        self._address: ChannelAddress | None = None

    async def update_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = WIRE_FORMAT,
        peft_config: Any = None,
        **options: Any,
    ) -> None:
        """Send all weights; returns when the engine generates with them as version `global_steps`.

        Blocks the actor's loop while it sends, as verl's does: gathering a tensor is a collective of this thread.

        Raises:
            WeightProtocolError: LoRA adapters or sparse updates, which the channel does not carry.
            WeightUpdateError: the update failed; the engine must not be used.
            WaitTimeout: the server did not answer.
        """
        if wire_format != WIRE_FORMAT or peft_config is not None:
            raise WeightProtocolError(
                f"the weight channel carries whole tensors of the base model, not wire_format={wire_format!r} or LoRA "
                "adapters: set partial_rollout.weights.backend=verl"
            )
        address = await self._connect()
        self._round += 1
        update: Future[Any] | None = None

        def raise_failed_update() -> None:
            if update is not None and update.done():
                update.result()

        with torch.no_grad(), self._sender(address, raise_failed_update) as sender:
            if self._has_server:
                update = self._server.receive_weights.remote(round=self._round, version=global_steps).future()
            sender.send(weights)
        if update is not None:
            await self._bounded(asyncio.wrap_future(update), self._timeouts.resume_s, "load new weights")

    def _sender(self, address: ChannelAddress, check: Any) -> WeightSender:
        return WeightSender(
            address,
            self.zmq_handle,
            round=self._round,
            slot_bytes=self._settings.slot_bytes,
            device=torch.device(get_device_name()),
            timeout_s=self._settings.timeout_s,
            check=check,
        )

    async def _connect(self) -> ChannelAddress:
        """The server of this rank's node is there only after the training workers."""
        if self._address is None:
            name = f"{self._get_server_name_prefix()}server_{self.replica_rank}_{self.node_rank}"
            self._server = ray.get_actor(name)
            answer = asyncio.wrap_future(self._server.weight_channel.remote().future())
            self._address = await self._bounded(answer, self._timeouts.call_s, "tell its weight channel")
        return cast("ChannelAddress", self._address)

    async def _bounded(self, answer: asyncio.Future[Any], timeout_s: float, what: str) -> Any:
        done, _ = await asyncio.wait([answer], timeout=timeout_s)
        if not done:
            raise WaitTimeout(f"training worker waited {timeout_s:g} s for replica {self.replica_rank} to {what}")
        return answer.result()


class ChannelActorWorker(ActorRolloutRefWorker):
    """verl's training worker with our adapter."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue] - added at run time
    def init_model(self) -> None:
        """Build as verl does, then replace the adapter.

        Missing hook: verl looks the adapter's class up in a table nobody can add to.
        """
        super().init_model()
        rollout = getattr(self, "rollout", None)
        if rollout is not None:
            self.rollout = ChannelAdapter(
                config=rollout.config, model_config=rollout.model_config, device_mesh=rollout.device_mesh
            )
