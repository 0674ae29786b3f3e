"""Prompt rows as agent loops want them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tensordict import TensorDict

TOOLLESS_AGENT = "single_turn_agent"
"""verl's agent loop that is given the tools and renders none."""


def prompt_row(batch: TensorDict) -> dict[str, Any]:
    """The single row of `batch` as a plain dict: tensors lose the batch dimension, other values are unwrapped."""
    names = cast("Iterable[str]", batch.keys())  # only nested keys, which are left out, are tuples
    return {name: _unwrap(batch.get(name)) for name in names}


def _unwrap(column: Any) -> Any:
    first = column[0]
    return first if isinstance(first, torch.Tensor) else getattr(first, "data", first)


def rollout_sampling_params(rollout: Any) -> dict[str, Any]:
    """Sampling parameters of a training rollout, a fresh dict per trajectory because agent loops may change it."""
    return {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "repetition_penalty": 1.0,
        "logprobs": rollout.calculate_log_probs,
    }


def active_tool_schemas(row: dict[str, Any], tools: Iterable[Any]) -> list[dict[str, Any]] | None:
    """Schemas verl renders into this prompt, by the rules of its agent loops; None when there are none."""
    if row["agent_name"] == TOOLLESS_AGENT:
        return None
    by_name = {tool.name: tool for tool in tools}
    selection = (row.get("extra_info") or {}).get("tool_selection")
    chosen = [by_name[name] for name in selection if name in by_name] if selection else by_name.values()
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in chosen] or None
