"""Runs inside vLLM's worker process and loads new weights there, from our channel or from verl's."""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from partial_rollout.errors import WeightMismatch, WeightProtocolError
from partial_rollout.weights.directory import ChannelAddress
from partial_rollout.weights.loading import load_from_channel, reload_model, require_own_memory
from partial_rollout.weights.receiver import WeightReceiver


class WorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension with weight updates by our channel, and by verl's also on vLLM's CPU backend."""

    model_runner: Any  # of the vLLM worker class this one is mixed into
    device: torch.device | None
    last_round: int = 0
    """Of the last weight update by our channel, whether it succeeded or not."""

    def receive_weights(self, *, round: int, timeout_s: float, validate: bool) -> int:
        """One whole update by our channel: prepare, receive, load, finalise; returns the round.

        Raises:
            WeightUpdateError: of a class that says why; the model is undefined then and must not be used.
        """
        if round <= self.last_round:
            raise WeightProtocolError(f"round {round} of weight updates was asked for after round {self.last_round}")
        self.last_round = round
        receiver = WeightReceiver(
            ChannelAddress.inherited(),
            self._get_zmq_handle(),
            round=round,
            timeout_s=timeout_s,
            validate=validate,
            device=self.device,
        )
        model = self.model_runner.model
        with set_current_vllm_config(self.model_runner.vllm_config), receiver:
            reload_model(model, self.model_runner.model_config, lambda: load_from_channel(model, receiver))
            require_own_memory(model, receiver)
        return round

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
        loader = BucketLoader(self.model_runner.model, receiver)
        with set_current_vllm_config(self.model_runner.vllm_config):
            reload_model(self.model_runner.model, self.model_runner.model_config, loader.load_all)


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
