"""Log-probs of finished trajectories under the trained model, diffusers' Qwen-Image transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from partial_rollout.diffusion.sampling import NO_CFG
from partial_rollout.diffusion.sde import StepNoise, log_density, transition
from partial_rollout.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.diffusion.result import SampleResult


@dataclass(frozen=True, slots=True)
class StepBatch:
    """B SDE steps with one image size, taken from any number of trajectories."""

    latents: torch.Tensor
    """[B, T, C], latents before the step."""
    following: torch.Tensor
    """[B, T, C], latents after the step."""
    timesteps: torch.Tensor
    """[B], on the model's scale of 0 to 1000."""
    noises: tuple[StepNoise, ...]
    prompt_embeds: torch.Tensor
    """[B, L, D], padded."""
    prompt_mask: torch.Tensor
    """[B, L], True where an embedding is no padding."""
    negative_embeds: torch.Tensor | None
    negative_mask: torch.Tensor | None
    img_shape: tuple[int, int, int]
    """(1, latent rows, latent columns), in patches."""
    true_cfg_scale: float = NO_CFG

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.noises)

    def rows(self, begin: int, end: int) -> StepBatch:
        """Steps `begin` to `end`."""
        cut = slice(begin, end)
        return StepBatch(
            latents=self.latents[cut],
            following=self.following[cut],
            timesteps=self.timesteps[cut],
            noises=self.noises[cut],
            prompt_embeds=self.prompt_embeds[cut],
            prompt_mask=self.prompt_mask[cut],
            negative_embeds=None if self.negative_embeds is None else self.negative_embeds[cut],
            negative_mask=None if self.negative_mask is None else self.negative_mask[cut],
            img_shape=self.img_shape,
            true_cfg_scale=self.true_cfg_scale,
        )


def steps_of(
    results: Sequence[SampleResult], *, patch: int, noise_level: float, sde_type: str, true_cfg_scale: float = NO_CFG
) -> StepBatch:
    """All SDE steps of trajectories of one image size, trajectory by trajectory.

    Args:
        results: at least one, each with an SDE window that is not empty.
        patch: pixels along the side of a latent token: the VAE's factor times 2.
        noise_level: the rollout's.
        sde_type: the rollout's.
        true_cfg_scale: the rollout's.

    Raises:
        DataError: a trajectory has no SDE steps, or their image sizes differ.
    """
    if not results or any(result.latents is None for result in results) or len({r.image.shape for r in results}) != 1:
        raise DataError(
            f"{len(results)} trajectories cannot be trained together: each needs an SDE step, and all one image size"
        )
    repeats = torch.tensor([len(result.window) for result in results])
    embeds, mask = _repeated([result.prompt_embeds for result in results], repeats)
    negatives = [result.negative_prompt_embeds for result in results if result.negative_prompt_embeds is not None]
    negative, negative_mask = _repeated(negatives, repeats) if true_cfg_scale > NO_CFG else (None, None)
    height, width = results[0].image.shape[:2]
    return StepBatch(
        latents=torch.cat([_some(result.latents)[:-1] for result in results]),
        following=torch.cat([_some(result.latents)[1:] for result in results]),
        timesteps=torch.cat([_some(result.timesteps) for result in results]),
        noises=tuple(
            StepNoise.of_schedule(result.sigmas, step, noise_level, sde_type)
            for result in results
            for step in range(result.window.start, result.window.stop)
        ),
        prompt_embeds=embeds,
        prompt_mask=mask,
        negative_embeds=negative,
        negative_mask=negative_mask,
        img_shape=(1, height // patch, width // patch),
        true_cfg_scale=true_cfg_scale,
    )


def log_probs(transformer: torch.nn.Module, batch: StepBatch) -> torch.Tensor:
    """Log-prob [B] of each step under the transformer's weights; with a gradient where gradients are enabled."""
    device = next(transformer.parameters()).device
    velocity = _velocity(transformer, batch, device)
    found = []
    for row, noise in enumerate(batch.noises):
        one = slice(row, row + 1)
        mean, std = transition(batch.latents[one].to(device), velocity[one], noise)
        found.append(log_density(batch.following[one].to(device), mean, std))
    return torch.cat(found)


def _velocity(transformer: torch.nn.Module, batch: StepBatch, device: torch.device) -> torch.Tensor:
    """Predicted velocity [B, T, C]. Guidance is combined as in Qwen-Image: at the norm of the positive prediction."""
    dtype = next(transformer.parameters()).dtype
    shared: dict[str, Any] = {
        "hidden_states": batch.latents.to(device, dtype),
        "timestep": (batch.timesteps / 1000).to(device, dtype),
        "img_shapes": [[batch.img_shape]] * len(batch),
        "return_dict": False,
    }
    positive = _predict(transformer, shared, batch.prompt_embeds, batch.prompt_mask)
    if batch.negative_embeds is None or batch.negative_mask is None:
        return positive
    negative = _predict(transformer, shared, batch.negative_embeds, batch.negative_mask)
    guided = negative + batch.true_cfg_scale * (positive - negative)
    return guided * (positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))


def _predict(
    transformer: torch.nn.Module, shared: dict[str, Any], embeds: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    device = shared["hidden_states"].device
    return transformer(
        encoder_hidden_states=embeds.to(device, shared["hidden_states"].dtype),
        encoder_hidden_states_mask=None if mask.all() else mask.to(device),
        **shared,
    )[0]


def padded(embeds: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad embeddings [1, L, D] of B prompts to [B, longest L, D]; return also which positions are no padding."""
    lengths = torch.tensor([item.shape[1] for item in embeds], device=embeds[0].device)
    together = torch.nn.utils.rnn.pad_sequence([item[0] for item in embeds], batch_first=True)
    return together, torch.arange(together.shape[1], device=together.device)[None] < lengths[:, None]


def _repeated(embeds: Sequence[torch.Tensor], repeats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    together, mask = padded(embeds)
    return together.repeat_interleave(repeats, dim=0), mask.repeat_interleave(repeats, dim=0)


def _some(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise DataError("a trajectory without SDE steps has no log-probs to train on")
    return tensor
