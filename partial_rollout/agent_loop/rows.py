"""Prompt rows as agent loops want them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tensordict import TensorDict


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
