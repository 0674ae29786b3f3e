"""Prompt rows as agent loops want them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tensordict import TensorDict


def prompt_row(batch: TensorDict) -> dict[str, Any]:
    """The single row of `batch` as a plain dict: tensors lose the batch dimension, other values are unwrapped."""
    return {key: _unwrap(batch.get(key)) for key in batch.keys()}  # noqa: SIM118 (a TensorDict iterates over rows)


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
