"""Entry point of vLLM's general plugins: registers our weight transfer backend in every process of an engine."""

from __future__ import annotations

from functools import cache

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

BACKEND = "partial_rollout"
"""Name of the backend in vLLM's `weight_transfer_config`."""


@cache
def register_backend() -> None:
    """Register the backend once, as vLLM demands. The worker extension calls this too: VLLM_PLUGINS may skip it."""
    WeightTransferEngineFactory.register_engine(
        BACKEND, "partial_rollout.weights.transfer_engine", "ChannelTransferEngine"
    )
