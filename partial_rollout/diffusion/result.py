"""What a rollout gives to training: a finished image with its trajectory, and the group of images to one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from partial_rollout.diffusion.sde_window import SdeWindow
from partial_rollout.errors import DataError, EngineError
from partial_rollout.integrations.omni_compat import trajectory_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_omni.outputs import OmniRequestOutput


MIN_STD = 1e-4
"""Added to the standard deviation: a group with equal rewards teaches nothing, so rounding must not make it count."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """A server's answer, with tensors on the CPU. K is the number of SDE steps, N the number of all denoise steps."""

    request_id: str
    image: np.ndarray[Any, Any]
    """[H, W, 3], uint8."""
    final: torch.Tensor
    """[1, T, C], fp32: the latents that the image was decoded from."""
    window: SdeWindow
    latents: torch.Tensor | None
    """[K + 1, T, C], fp32: before the window and after each of its steps; None for an empty window.
    `log_probs` and `timesteps` are None then too."""
    log_probs: torch.Tensor | None
    """[K], fp32, under the weights of the rollout."""
    timesteps: torch.Tensor | None
    """[K], fp32."""
    sigmas: torch.Tensor
    """[N + 1], fp32."""
    versions: tuple[int, ...]
    """Weight version that predicted each of the N steps."""
    prompt_embeds: torch.Tensor
    """[1, L, D], without padding."""
    negative_prompt_embeds: torch.Tensor | None
    """[1, L', D]; None without guidance."""


def to_result(request_id: str, output: OmniRequestOutput) -> SampleResult:
    """Read vllm-omni's output.

    Raises:
        EngineError: the output holds no image; the message has the engine's error.
    """
    trajectory = trajectory_of(output)
    if not output.images or trajectory is None:
        raise EngineError(f"request {request_id!r} came back without an image: {getattr(output, 'error', None)}")
    return SampleResult(
        request_id=request_id,
        image=np.asarray(output.images[0]),
        final=trajectory["final"],
        window=SdeWindow(*trajectory["window"]),
        latents=trajectory["latents"],
        log_probs=trajectory["log_probs"],
        timesteps=trajectory["timesteps"],
        sigmas=trajectory["sigmas"],
        versions=tuple(trajectory["versions"]),
        prompt_embeds=trajectory["prompt_embeds"],
        negative_prompt_embeds=trajectory.get("negative_prompt_embeds"),
    )


@dataclass(frozen=True, slots=True)
class Group:
    """Images to one prompt, with their rewards."""

    prompt: str
    results: tuple[SampleResult, ...]
    rewards: tuple[float, ...]


def checked_rewards(found: Iterable[Any], number: int, whose: str) -> tuple[float, ...]:
    """What a reward function returned, as finite numbers; `whose` names the function and the prompt.

    >>> checked_rewards(np.array([0.5, 1.0]), 2, "trainer.reward=my.function of prompt row 3")
    (0.5, 1.0)

    Raises:
        DataError: it is not one finite number for each of the `number` images.
    """
    try:
        rewards = tuple(float(reward) for reward in found)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{whose} returned {type(found).__name__} ({error}): must be one number for each of {number} images"
        ) from error
    if len(rewards) != number:
        raise DataError(f"{whose} returned {len(rewards)} numbers: must be one for each of {number} images")
    wrong = next((index for index, reward in enumerate(rewards) if not np.isfinite(reward)), None)
    if wrong is not None:
        raise DataError(f"{whose} returned {rewards[wrong]} for image {wrong} of {number}: must be a finite number")
    return rewards


def advantages(rewards: Sequence[Sequence[float]], limit: float) -> torch.Tensor:
    """Rewards of groups, normalised within each: [sum of group sizes], between -limit and limit (GRPO)."""
    normal = [(np.asarray(group) - np.mean(group)) / (np.std(group) + MIN_STD) for group in rewards]
    return torch.tensor(np.concatenate(normal), dtype=torch.float32).clamp(-limit, limit)
