"""The trajectory of one image, which an interruption must not lose, and the denoise step that all pipelines share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from partial_rollout.diffusion.sde import StepNoise, log_density, transition
from partial_rollout.diffusion.sde_window import NO_WINDOW, SdeWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    OnArrival = Callable[[Callable[[], None]], None]
    """Called with a function that aborts the request, which may be called at any time and from any thread."""

OPTIONS_KEY = "partial_rollout"
"""Key of our options in the `extra_args` of a request, and of our `Sample` in the `extra` of its state."""


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """What a request asks of our pipelines beyond vllm-omni's own sampling parameters."""

    window: SdeWindow = NO_WINDOW
    noise_level: float = 0.0
    sde_type: str = "sde"
    snapshot: bytes | None = None
    """Sample from which to go on (`snapshot.py`); None starts from noise."""
    name: str = ""
    """The request's id as its server knows it; vllm-omni's own id has a suffix."""
    on_arrival: OnArrival | None = None
    """Called once, in a thread of the engine, when the request has reached the engine; not sent on to workers."""

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> SampleOptions:
        """Options in a request's `extra_args`; the defaults for the engine's warm-up, which has none."""
        return (extra_args or {}).get(OPTIONS_KEY) or cls()


@dataclass(slots=True)
class Sample:
    """The trajectory so far.

    `latents` has the latents before the SDE window and after each step in it; `log_probs` and `timesteps` have an entry
    for each step in the window; `versions` has an entry for each step, inside and outside of the window.
    """

    options: SampleOptions
    generator: torch.Generator
    latents: list[torch.Tensor] = field(default_factory=list)
    """One tensor a step, each [1, T, C], fp32."""
    log_probs: list[torch.Tensor] = field(default_factory=list)
    """One tensor a step, each [1], fp32."""
    timesteps: list[torch.Tensor] = field(default_factory=list)
    """One tensor a step, each [1], fp32, from 0 to 1000 as the model counts."""
    versions: list[int] = field(default_factory=list)
    """Weight version that predicted each step."""


def advance(
    sample: Sample,
    *,
    step: int,
    sigmas: torch.Tensor,
    timestep: torch.Tensor,
    latents: torch.Tensor,
    velocity: torch.Tensor,
    weight_version: int,
) -> torch.Tensor:
    """Take one denoise step of one sample and record it; return the next latents [1, T, C] in fp32.

    Whole requests and step-wise execution both call this, so they differ only in how the model's batch was made. Noise
    comes from the sample's own generator, and only the sample's SDE steps advance that generator.
    """
    stochastic = step in sample.options.window
    noise_level = sample.options.noise_level if stochastic else 0.0
    noise = StepNoise.of_schedule(sigmas, step, noise_level, sample.options.sde_type)
    mean, std = transition(latents, velocity, noise)
    sample.versions.append(weight_version)
    if not stochastic:
        return mean
    if not sample.latents:
        sample.latents.append(latents.float().clone())
    following = mean + std * _noise_like(mean, sample.generator)
    sample.latents.append(following.clone())
    sample.log_probs.append(log_density(following, mean, std))
    sample.timesteps.append(timestep.reshape(1).float().clone())
    return following


def _noise_like(mean: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(mean.shape, generator=generator, device=generator.device, dtype=torch.float32)
    return drawn.to(mean.device)
