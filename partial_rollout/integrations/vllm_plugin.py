"""Entry point of vLLM's general plugins, for every process of an engine: our weight backend, an end with its server."""

from __future__ import annotations

from functools import cache

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from partial_rollout.rollout.ends_with_server import end_with_parent

BACKEND = "partial_rollout"
"""Name of the backend in vLLM's `weight_transfer_config`."""


@cache
def register_backend() -> None:
    """Register the backend once, as vLLM demands. The worker extension calls this too: VLLM_PLUGINS may skip it.

    A process of one of our engines ends with the process that started it from here on.
    """
    WeightTransferEngineFactory.register_engine(
        BACKEND, "partial_rollout.weights.transfer_engine", "ChannelTransferEngine"
    )
    end_with_parent()
