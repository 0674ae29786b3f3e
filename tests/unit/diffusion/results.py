"""Finished images without an engine."""

from __future__ import annotations

import numpy as np
import torch

from partial_rollout.diffusion.result import SampleResult
from partial_rollout.diffusion.sde_window import SdeWindow


def make_result(
    request_id: str = "r", versions: tuple[int, ...] = (0, 0, 0), level: int = 0, **changes
) -> SampleResult:
    given = {
        "request_id": request_id,
        "image": np.full((16, 8, 3), level, dtype=np.uint8),
        "final": torch.zeros(1, 2, 4),
        "window": SdeWindow(0, 2),
        "latents": torch.arange(24.0).reshape(3, 2, 4),
        "log_probs": torch.zeros(2),
        "timesteps": torch.tensor([1000.0, 500.0]),
        "sigmas": torch.tensor([1.0, 0.6, 0.3, 0.0]),
        "versions": versions,
        "prompt_embeds": torch.ones(1, 3, 5),
        "negative_prompt_embeds": None,
    }
    return SampleResult(**(given | changes))
