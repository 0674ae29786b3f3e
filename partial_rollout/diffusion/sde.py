"""Stochastic denoise steps of a flow-matching model and their densities.

A flow-matching model predicts the velocity `v = noise - data` at noise level `sigma`. Two SDEs have the same marginals
as the model's ODE:

    sde   Flow-GRPO, arXiv 2505.05470, equation 9: Euler-Maruyama with std eta * sqrt(sigma / (1 - sigma)) * sqrt(dt)
    cps   Flow-CPS, arXiv 2509.05952: keeps the coefficients of data and noise, std sigma_next * sin(eta * pi / 2)

Both take steps with Gaussian noise. The log-density of a step is averaged over the latent's elements, so the difference
of two log-probs is the log of a probability ratio per element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from partial_rollout.errors import ConfigError

SDE_TYPES = ("sde", "cps")
LOG_SQRT_2PI = math.log(math.sqrt(2 * math.pi))


@dataclass(frozen=True, slots=True)
class StepNoise:
    """The noise levels of one denoise step, and how much noise the step adds."""

    sigma: float
    sigma_next: float
    sigma_max: float
    """Second level of the schedule. It replaces `sigma` in 1 - sigma at the first step, where sigma is 1."""
    noise_level: float
    """eta; 0 is the ODE."""
    sde_type: str = "sde"

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown SDE or a negative noise level."""
        if self.sde_type not in SDE_TYPES:
            raise ConfigError(f"algorithm.sde_type={self.sde_type!r} is not allowed: must be {' or '.join(SDE_TYPES)}")
        if self.noise_level < 0:
            raise ConfigError(f"algorithm.noise_level={self.noise_level} is not allowed: must be at least 0")

    @classmethod
    def of_schedule(cls, sigmas: torch.Tensor, step: int, noise_level: float, sde_type: str) -> StepNoise:
        """Step `step` of the noise levels `sigmas` [num_steps + 1], the last of which is 0."""
        return cls(float(sigmas[step]), float(sigmas[step + 1]), float(sigmas[1]), noise_level, sde_type)


def transition(latents: torch.Tensor, velocity: torch.Tensor, noise: StepNoise) -> tuple[torch.Tensor, float]:
    """Mean [B, T, C] and standard deviation of the next latents, in fp32.

    Args:
        latents: [B, T, C], at `noise.sigma`.
        velocity: [B, T, C], the model's prediction for them.
        noise: the step.
    """
    latents, velocity = latents.float(), velocity.float()
    sigma, dt = noise.sigma, noise.sigma_next - noise.sigma
    if noise.noise_level == 0:
        return latents + dt * velocity, 0.0
    if noise.sde_type == "cps":
        std = noise.sigma_next * math.sin(noise.noise_level * math.pi / 2)
        data, pure_noise = latents - sigma * velocity, latents + (1 - sigma) * velocity
        return data * (1 - noise.sigma_next) + pure_noise * math.sqrt(max(noise.sigma_next**2 - std**2, 0.0)), std
    diffusion = math.sqrt(sigma / (1 - (noise.sigma_max if sigma >= 1 else sigma))) * noise.noise_level
    drift = diffusion**2 / (2 * sigma)
    mean = latents * (1 + drift * dt) + velocity * (1 + drift * (1 - sigma)) * dt
    return mean, diffusion * math.sqrt(-dt)


def log_density(latents: torch.Tensor, mean: torch.Tensor, std: float) -> torch.Tensor:
    """Log-density [B] of `latents` [B, T, C] under the Gaussian, averaged over elements; 0 where nothing is random."""
    if std == 0:
        return torch.zeros(latents.shape[0], device=latents.device)
    density = -((latents.float() - mean) ** 2) / (2 * std**2) - math.log(std) - LOG_SQRT_2PI
    return density.mean(dim=tuple(range(1, density.ndim)))
