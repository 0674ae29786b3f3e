"""What vLLM is told to keep the KV of interrupted requests in host memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from partial_rollout.settings.memory import is_plain

if TYPE_CHECKING:
    from collections.abc import Mapping

COPY_TOKENS = 64
"""Tokens of a copy. The engine's steps wait while vLLM begins copies: with 16 tokens a step of 256 requests took 1.44
of its time without copies, with 64 it took 1.20 (8B on an H100, docs/results/gpu.md)."""
BLOCK_TOKENS = 16
"""Tokens of a block of KV on a GPU, where nobody sets another number."""


def copied_tokens(model: Mapping[str, Any], engine: Mapping[str, Any]) -> int | None:
    """Tokens of a copy for a model, by its `config.json`, in an engine with these arguments; None: vLLM's one block.

    vLLM refuses a number that is no multiple of its blocks, and models that have blocks of several sizes.

    >>> copied_tokens({}, {}) is None
    True
    """
    parallel = (engine.get(f"{phase}_context_parallel_size") or 1 for phase in ("decode", "prefill"))
    block_tokens = math.prod((engine.get("block_size") or BLOCK_TOKENS, *parallel))
    return COPY_TOKENS if is_plain(model) and COPY_TOKENS % block_tokens == 0 else None


def host_memory(num_bytes: int, engine_id: str, copy_tokens: int | None = None) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`: all KV is copied to so much host memory as it is computed.

    >>> host_memory(1 << 30, "engine", 64)["kv_connector_extra_config"]["block_size"]
    64
    """
    # vLLM's default offloads prompts only: the KV of an interrupted response would be lost.
    extra: dict[str, Any] = {"cpu_bytes_to_use": num_bytes, "offload_prompt_only": False}
    if copy_tokens is not None:
        extra["block_size"] = copy_tokens
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": extra,
    }
