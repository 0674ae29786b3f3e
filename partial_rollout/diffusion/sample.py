"""One image on its way from noise: what an interruption must not lose, and the step that full and step-wise share."""

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
    """Takes what aborts the request, at any time and from any thread."""

OPTIONS_KEY = "partial_rollout"
"""Where a request's `extra_args` hold our options."""


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """What a request asks of our adapters beyond vllm-omni's own parameters."""

    window: SdeWindow = NO_WINDOW
    noise_level: float = 0.0
    sde_type: str = "sde"
    snapshot: bytes | None = None
    """Go on from here; see `snapshot.py`."""
    name: str = ""
    """The request's id as its sender knows it; vllm-omni adds a suffix to it."""
    on_arrival: OnArrival | None = None
    """Called once, in a thread of the engine, when the engine has the request; no worker gets to see it."""

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> SampleOptions:
        """Those of a request; of the engine's warm-up, which knows nothing of them, the defaults."""
        return (extra_args or {}).get(OPTIONS_KEY) or cls()


@dataclass(slots=True)
class Sample:
    """The trajectory so far.

    `latents` has the latents before the window and after each of its steps, `log_probs` and `timesteps` one entry for
    each of its steps, `versions` one for every step that was taken, inside and outside.
    """

    options: SampleOptions
    generator: torch.Generator
    latents: list[torch.Tensor] = field(default_factory=list)
    """Each [1, T, C], fp32."""
    log_probs: list[torch.Tensor] = field(default_factory=list)
    """Each [1], fp32."""
    timesteps: list[torch.Tensor] = field(default_factory=list)
    """Each [1], fp32, of the model's 0 to 1000."""
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
    """Take one step of one sample and log it; return the next latents [1, T, C] in fp32.

    Full-forward and step-wise execution both call this, so they differ only in how the batch of the model was made.
    Noise comes from the sample's own generator, which nothing but its own SDE steps advances.
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
