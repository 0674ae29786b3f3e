"""Images to one prompt, and how much better than the others each of them is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.diffusion.result import SampleResult

MIN_STD = 1e-4
"""A group whose rewards are all equal teaches nothing; its advantages must stay 0 through rounding."""


@dataclass(frozen=True, slots=True)
class Group:
    """Images to one prompt, with their rewards."""

    prompt: str
    results: tuple[SampleResult, ...]
    rewards: tuple[float, ...]


def advantages(rewards: Sequence[Sequence[float]], limit: float) -> torch.Tensor:
    """Rewards of groups, normalised within each: [sum of group sizes], between -limit and limit (GRPO)."""
    normal = [(np.asarray(group) - np.mean(group)) / (np.std(group) + MIN_STD) for group in rewards]
    return torch.tensor(np.concatenate(normal), dtype=torch.float32).clamp(-limit, limit)
