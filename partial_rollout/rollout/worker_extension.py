"""Runs inside vLLM's worker process and loads new weights there; on a GPU verl's own extension does it unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from partial_rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import ModelConfig

NUM_NAMED_PARAMETERS = 8
"""Parameter names an error message spells out."""


class WorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension with a weight update that is right on vLLM's CPU backend."""

    model_runner: Any
    """Of vLLM's worker, which this class is mixed into."""

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive all weights over verl's bucketed channel and load them.

        vLLM packs CPU linears after loading and drops the plain weight, so loading in place fails there: the model is
        reloaded layer by layer instead. LoRA adapters are not packed and take verl's way.

        Raises:
            EngineError: weights failed to load or were missing; the model is undefined then and must not be used.
        """
        if not current_platform.is_cpu() or (peft_config and base_sync_done):
            # verl's annotation leaves out the None that is its default.
            super().update_weights_from_ipc(cast("Any", peft_config), base_sync_done, use_shm)
            return
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), torch.device("cpu"), use_shm)
        with set_current_vllm_config(self.model_runner.vllm_config):
            _reload(self.model_runner.model, self.model_runner.model_config, receiver)


def _reload(model: torch.nn.Module, model_config: ModelConfig, receiver: BucketedWeightReceiver) -> None:
    expected = {name for name, _ in model.named_parameters()}
    tied = _tied_head(model)
    initialize_layerwise_reload(model)
    loader = BucketLoader(cast("LoadableModel", model))
    receiver.receive_weights(on_bucket_received=loader.load)
    loader.raise_failure(expected)
    finalize_layerwise_reload(model, model_config)
    if tied is not None:
        # A tied head keeps its own packed copy of the embedding, which a reload does not refresh: without this line
        # every later token is silently sampled from old logits.
        tied.quant_method.process_weights_after_loading(tied)


class LoadableModel(Protocol):
    """What a vLLM model has beyond torch's Module."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], /) -> set[str]: ...


class BucketLoader:
    """Callback of the receiver: copies a bucket and loads it; keeps the first failure until the channel is closed.

    An error must not leave the callback: the receiver's frame would still hold views of the shared segment, closing it
    would raise BufferError in place of the cause, and the sender would wait for an answer for ever.
    """

    def __init__(self, model: LoadableModel) -> None:
        """Load into a model that was prepared for reloading."""
        self._model = model
        self._loaded: set[str] = set()
        self._failure: Exception | None = None

    def load(self, weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        """Load one bucket; `weights` are views of a buffer that the next bucket overwrites."""
        copies = [(name, tensor.clone()) for name, tensor in weights]
        weights.clear()
        if self._failure is not None:
            return
        try:
            self._loaded |= self._model.load_weights(copies)
        except Exception as error:  # noqa: BLE001 - raised again by raise_failure
            self._failure = error

    def raise_failure(self, expected: set[str]) -> None:
        """Raise EngineError if loading failed or parameters of `expected` were not sent."""
        if self._failure is not None:
            raise EngineError(f"weight update failed while loading: {self._failure!r}") from self._failure
        missing = sorted(expected - self._loaded)
        if missing:
            raise EngineError(
                f"weight update: {len(missing)} of {len(expected)} parameters were not sent, "
                f"first: {missing[:NUM_NAMED_PARAMETERS]}"
            )


def _tied_head(model: torch.nn.Module) -> Any:
    """Return the output head if it shares its weight with the input embedding."""
    head, body = getattr(model, "lm_head", None), getattr(model, "model", None)
    embedding = getattr(body, "embed_tokens", None)
    if head is None or embedding is None or not isinstance(getattr(head, "weight", None), torch.Tensor):
        return None
    return head if head.weight is embedding.weight or _same_storage(head.weight, embedding.weight) else None


def _same_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.numel() > 0 and first.data_ptr() == second.data_ptr()
