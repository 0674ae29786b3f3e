"""The SDEs against what defines them: the ODE's limit, the marginals, the Gaussian density."""

from __future__ import annotations

import math

import pytest
import torch

from partial_rollout.diffusion.sde import SDE_TYPES, StepNoise, log_density, transition
from partial_rollout.errors import ConfigError

SIGMAS = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0])
SHAPE = (2, 64, 4)


def draw(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sde_type", SDE_TYPES)
@pytest.mark.parametrize("step", range(4))
def test_without_noise_it_is_eulers_step(sde_type, step):
    latents, velocity = draw(0), draw(1)
    mean, std = transition(latents, velocity, StepNoise.of_schedule(SIGMAS, step, 0.0, sde_type))
    assert std == 0.0
    assert torch.equal(mean, latents + (float(SIGMAS[step + 1]) - float(SIGMAS[step])) * velocity)


def test_cps_keeps_the_marginal_of_the_next_noise_level():
    """With the true velocity of one data point, data and noise keep the coefficients 1 - sigma and sigma."""
    data, noise = draw(0), draw(1)
    step = StepNoise.of_schedule(SIGMAS, 1, 0.6, "cps")
    mean, std = transition((1 - step.sigma) * data + step.sigma * noise, noise - data, step)
    left = mean - (1 - step.sigma_next) * data
    assert torch.allclose(left, math.sqrt(step.sigma_next**2 - std**2) * noise, atol=1e-6)
    assert std == pytest.approx(step.sigma_next * math.sin(0.3 * math.pi))


def test_sde_keeps_the_marginal_to_first_order():
    """The variance after a step tends to sigma_next^2 with the square of the step's size."""
    errors = []
    for size in (0.02, 0.01):
        step = StepNoise(0.5, 0.5 - size, 0.9, 0.7, "sde")
        # E[noise^2 coefficient]: the mean is linear in data and noise, so unit vectors show its coefficients.
        one, zero = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
        of_noise = float(transition(step.sigma * one, one, step)[0])
        std = transition(zero, zero, step)[1]
        errors.append(abs(of_noise**2 + std**2 - step.sigma_next**2))
    assert errors[1] < 0.3 * errors[0]
    assert errors[0] < 1e-3


def test_the_first_step_of_sde_is_finite():
    mean, std = transition(draw(0), draw(1), StepNoise.of_schedule(SIGMAS, 0, 0.7, "sde"))
    assert torch.isfinite(mean).all()
    assert 0 < std < 10


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_the_density_is_torchs_normal(sde_type):
    mean, std = transition(draw(0), draw(1), StepNoise.of_schedule(SIGMAS, 1, 0.7, sde_type))
    drawn = mean + std * draw(2)
    expected = torch.distributions.Normal(mean, std).log_prob(drawn).mean(dim=(1, 2))
    assert torch.allclose(log_density(drawn, mean, std), expected, atol=1e-5)


def test_bf16_predictions_are_stepped_in_fp32():
    mean, _ = transition(draw(0), draw(1).bfloat16(), StepNoise.of_schedule(SIGMAS, 1, 0.7, "sde"))
    assert mean.dtype == torch.float32


def test_the_last_step_of_cps_has_nothing_to_train():
    mean, std = transition(draw(0), draw(1), StepNoise.of_schedule(SIGMAS, 3, 0.7, "cps"))
    assert std == 0.0
    assert torch.equal(log_density(mean, mean, std), torch.zeros(2))


@pytest.mark.parametrize(("level", "sde_type", "reason"), [(-1, "sde", "at least 0"), (1, "ode", "sde or cps")])
def test_unknown_noise_is_refused(level, sde_type, reason):
    with pytest.raises(ConfigError, match=reason):
        StepNoise(0.5, 0.4, 0.9, level, sde_type)
