"""The part of bench_weights that has a real engine: the same new weights by three ways, interleaved."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from vllm import LLM

from partial_rollout.rollout.server import WORKER_EXTENSION
from partial_rollout.weights.directory import ChannelDirectory
from partial_rollout.weights.sender import WeightSender

if TYPE_CHECKING:
    from collections.abc import Callable

MODES = ("channel", "verl", "checkpoint")
JOB_ID = "bench"
CHANNEL = f"ipc:///tmp/rl-colocate-zmq-{JOB_ID}-replica-0-rank-0.sock"
"""verl's name for the connection to the first worker of replica 0."""
HIDDEN, INTERMEDIATE, VOCAB = 1024, 3072, 32_000
LAYER_PARAMETERS = HIDDEN * (2 * 2048 + 2 * 1024) + 3 * HIDDEN * INTERMEDIATE
VERL_BUCKET_MB = 64
"""Holds the embedding, which verl's channel needs."""
TIMEOUT_S = 120.0


def save_model(folder: str, gigabytes: float) -> dict[str, torch.Tensor]:
    """Write a random tied bf16 Qwen3 of that size; return its weights."""
    num_layers = max(1, round((gigabytes * 1e9 / 2 - VOCAB * HIDDEN) / LAYER_PARAMETERS))
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


class Engine:
    """One engine worker and the three ways to update it."""

    def __init__(self, folder: str, weights: dict[str, torch.Tensor], bucket_mb: int) -> None:
        self.weights, self.slot_bytes, self.round = weights, bucket_mb << 20, 0
        self.channels = ChannelDirectory()
        self.channels.address.export()
        os.environ |= {"VERL_REPLICA_RANK": "0", "VERL_RAY_JOB_ID": JOB_ID}
        self.llm = LLM(
            folder,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=256,
            enforce_eager=True,
            worker_extension_cls=WORKER_EXTENSION,
        )

    def run(self, mode: str) -> float:
        """One update; seconds."""
        started = time.perf_counter()
        getattr(self, mode)()
        return time.perf_counter() - started

    def channel(self) -> None:
        """Ours."""
        self.round += 1
        options: dict[str, Any] = {"round": self.round, "slot_bytes": self.slot_bytes, "timeout_s": TIMEOUT_S}
        with WeightSender(self.channels.address, CHANNEL, check=lambda: None, **options) as sender:
            call = {"round": self.round, "timeout_s": TIMEOUT_S, "validate": False}
            self._beside("receive_weights", call, lambda: sender.send(self.weights.items()))

    def verl(self) -> None:
        """verl's, with our loading."""
        sender = BucketedWeightSender(CHANNEL, VERL_BUCKET_MB, use_shm=True)
        send = sender.async_send_weights(iter(self.weights.items()))
        self._beside("update_weights_from_ipc", {"use_shm": True}, lambda: asyncio.run(send))

    def checkpoint(self) -> None:
        """vLLM's own, from the page cache."""
        self.llm.collective_rpc("reload_weights")

    def _beside(self, method: str, options: dict[str, Any], send: Callable[[], object]) -> None:
        call = threading.Thread(target=lambda: self.llm.collective_rpc(method, kwargs=options))
        call.start()
        send()
        call.join()

    def close(self) -> None:
        """End the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()
        self.channels.remove()


def measure_engine(gigabytes: float, rounds: int, bucket_mb: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each mode, interleaved; and the bytes of the weights."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        weights = save_model(folder, gigabytes)
        engine = Engine(folder, weights, bucket_mb)
        for mode in MODES:
            engine.run(mode)  # page tables, code
        for _ in range(rounds):
            for mode in MODES:
                seconds[mode].append(engine.run(mode))
        engine.close()
    return seconds, sum(tensor.nbytes for tensor in weights.values())
