"""vLLM's general plugin: makes our weight transfer backend known in every process of an engine."""

from __future__ import annotations

from functools import cache

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

BACKEND = "partial_rollout"
"""For vLLM's `weight_transfer_config`."""


@cache
def register_backend() -> None:
    """Register once, as vLLM demands; the worker extension asks as well, in case VLLM_PLUGINS leaves the plugin out."""
    WeightTransferEngineFactory.register_engine(
        BACKEND, "partial_rollout.weights.transfer_engine", "ChannelTransferEngine"
    )
