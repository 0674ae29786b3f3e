"""The extension of vLLM's worker process, which loads new weights there: from our channel, or from verl's."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from verl.utils.vllm import TensorLoRARequest
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import (
    VLLM_LORA_INT_ID,
    VLLM_LORA_NAME,
    VLLM_LORA_PATH,
    vLLMColocateWorkerExtension,
)
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from partial_rollout.errors import WeightMismatch, WeightProtocolError
from partial_rollout.integrations.vllm_plugin import register_backend
from partial_rollout.weights.checks import require_known_modules, require_whole_adapter
from partial_rollout.weights.loading import Reload, require_complete
from partial_rollout.weights.transfer_engine import ChannelUpdate, make_receiver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

register_backend()


class WorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension with weight updates by our channel, and by verl's also on vLLM's CPU backend."""

    model_runner: Any  # of the vLLM worker class into which this class is mixed, as the next six
    rank: int
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    remove_lora: Callable[[int], bool]
    add_lora: Callable[[Any], bool]
    last_update_number: int = 0
    """Number of the last weight update by our channel, whether it succeeded or not."""

    def receive_weights(
        self,
        *,
        update_number: int,
        timeout_s: float,
        validate: bool,
        peft_config: dict[str, Any] | None = None,
        endpoints: Sequence[str] | None = None,
    ) -> int:
        """Receive one whole update by our channel: vLLM's three calls in one, so that no engine step comes in between.

        With `peft_config` a LoRA adapter is received, and replaces the adapter before. `endpoints` are where a sender
        listens for each worker of the engine, by rank; None: where this worker's own training rank is, on this node.

        Raises:
            WeightUpdateError: of a class that says why; the model is undefined then and must not be used.
        """
        if update_number <= self.last_update_number:
            raise WeightProtocolError(
                f"weight update {update_number} was asked for after update {self.last_update_number}"
            )
        # Noted before anything can fail: the sender counts a failed update too, and never uses its number again.
        self.last_update_number = update_number
        channel, endpoint = self._get_zmq_handle(), endpoints[self.rank] if endpoints else None
        update = ChannelUpdate(channel, update_number, timeout_s, validate, endpoint)
        # vLLM 0.24 leaves the context to the caller.
        with set_current_vllm_config(self.model_runner.vllm_config):
            if peft_config is not None:
                self._receive_adapter(update, peft_config)
                return update_number
            self.start_weight_update()
            self.update_weights(dataclasses.asdict(update))
            self.finish_weight_update()
        return update_number

    def _receive_adapter(self, update: ChannelUpdate, peft_config: dict[str, Any]) -> None:
        with make_receiver(update, torch.device("cpu")) as receiver:
            # vLLM keeps an adapter's tensors, but must not keep tensors that the channel lends.
            tensors = {name: tensor.clone() for name, tensor in receiver.tensors()}
        require_known_modules(self.model_runner.model, tensors)
        require_whole_adapter(self.model_runner.model, tensors, peft_config)
        self.remove_lora(VLLM_LORA_INT_ID)
        request = TensorLoRARequest(
            lora_name=VLLM_LORA_NAME,
            lora_int_id=VLLM_LORA_INT_ID,
            lora_path=VLLM_LORA_PATH,
            peft_config=peft_config,
            lora_tensors=tensors,
        )
        if not self.add_lora(request):
            raise WeightMismatch(f"vLLM did not take the LoRA adapter with {len(tensors)} tensors")

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive all weights over verl's bucketed channel and load them; on a CPU as our own channel does.

        LoRA adapters are not packed and take verl's way everywhere.

        Raises:
            WeightMismatch: weights failed to load or were missing; the model is undefined then and must not be used.
        """
        if not current_platform.is_cpu() or (peft_config and base_sync_done):
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
            return
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), torch.device("cpu"), use_shm)
        model, reload = self.model_runner.model, Reload(self.model_runner.model)
        with set_current_vllm_config(self.model_runner.vllm_config):
            reload.start()
            require_complete(reload.expected(), BucketLoader(model, receiver).load_all())
            reload.finish(self.model_runner.model_config)


class BucketLoader:
    """Loads from verl's channel: copies a bucket and loads it; keeps the first failure until the channel is closed.

    An error must not leave the callback: the receiver's frame would still hold views of the shared segment, closing it
    would raise BufferError in place of the cause, and the sender would wait for an answer for ever.
    """

    def __init__(self, model: Any, receiver: BucketedWeightReceiver) -> None:
        """Load what `receiver` gets into a model that was prepared for reloading."""
        self._model = model
        self._receiver = receiver
        self._loaded: set[str] = set()
        self._failure: Exception | None = None

    def load_all(self) -> set[str]:
        """Receive to the end; return the names of the parameters that were filled."""
        self._receiver.receive_weights(on_bucket_received=self._load)
        if self._failure is not None:
            raise WeightMismatch(f"weight update failed while loading: {self._failure!r}") from self._failure
        return self._loaded

    def _load(self, weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        """Load one bucket; `weights` are views of a buffer that the next bucket overwrites."""
        copies = [(name, tensor.clone()) for name, tensor in weights]
        weights.clear()
        if self._failure is not None:
            return
        try:
            self._loaded |= self._model.load_weights(copies)
        except Exception as error:  # noqa: BLE001 - raised again by load_all
            self._failure = error
