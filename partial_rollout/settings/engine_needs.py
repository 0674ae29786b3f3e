"""What the engine must be set to, or must not, for an interrupted request to leave something in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partial_rollout.core.interrupt import InterruptMode

Needs = dict[str, tuple[Any, ...]]
"""Keys below actor_rollout_ref, and the values that are allowed; the last is what to set."""

ADAPTER_RANKS = ("model.lora_rank", "model.lora.rank")
AT_THE_END = ("rollout.enable_rollout_routing_replay", "rollout.mtp.enable_rollout")
"""With these a request's tokens come with its end."""
HANDS_OVER: Needs = {
    **dict.fromkeys(AT_THE_END, (None, False)),
    **dict.fromkeys(ADAPTER_RANKS, (None, 0)),
    "rollout.data_parallel_size": (None, 1),
    "rollout.engine_kwargs.vllm.stream_interval": (None, 1),
}
"""For a request that stays, and hands over its tokens."""
FINDS_AGAIN: Needs = {
    "rollout.enable_prefix_caching": (None, True),
    "rollout.engine_kwargs.vllm.enable_prefix_caching": (None, True),
    "rollout.data_parallel_size": (None, 1),
}
"""For one that leaves, and finds its KV when it comes back; each of several data-parallel engines has its own."""
IN_HOST_MEMORY: Needs = {
    **FINDS_AGAIN,
    "rollout.enable_rollout_routing_replay": (None, False),  # vLLM refuses it with any connector
    "rollout.engine_kwargs.vllm.kv_transfer_config": (None,),
    "rollout.engine_kwargs.vllm.kv_offloading_size": (None,),
}
"""The same, by a connector that we configure."""


def engine_needs(mode: InterruptMode) -> Needs:
    """Of any mode but `abort`, which needs nothing."""
    return {
        "rollout.free_cache_engine": (mode.releases_memory,),
        "rollout.disaggregation.enabled": (None, False),
        **(HANDS_OVER if mode.stays else IN_HOST_MEMORY if mode.releases_memory else FINDS_AGAIN),
    }
