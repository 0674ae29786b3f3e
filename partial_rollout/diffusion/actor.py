"""The model in training: the clipped loss over SDE steps, low-rank adapters (LoRA), and the weights that are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from partial_rollout.diffusion.policy import StepBatch, log_probs, steps_of
from partial_rollout.diffusion.result import advantages
from partial_rollout.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from partial_rollout.diffusion.config import DiffusionConfig
    from partial_rollout.diffusion.result import Group, SampleResult


TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
ADAPTER_FILE = "pytorch_lora_weights.safetensors"
WEIGHTS, STATE = "weights.safetensors", "state.pt"
"""Files of a checkpoint."""


class FlowGrpoActor:
    """diffusers' transformer with its optimizer (Flow-GRPO, arXiv 2505.05470)."""

    def __init__(self, config: DiffusionConfig, patch: int, device: torch.device) -> None:
        """Load the transformer to `device`; `patch` is the number of pixels along a latent token's side."""
        self._config, self._patch = config, patch
        model, actor = config.model, config.actor
        self.device = device
        dtype = getattr(torch, model.dtype)
        self.transformer: Any = QwenImageTransformer2DModel.from_pretrained(
            model.path, subfolder="transformer", torch_dtype=dtype
        )
        self.transformer.to(self.device)
        if actor.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        if model.lora_rank:
            add_adapters(self.transformer, model.lora_rank, model.lora_alpha)
        trained = [parameter for _, parameter in self._trained()]
        self._optimizer = torch.optim.AdamW(trained, lr=actor.lr, weight_decay=actor.weight_decay)

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Train one step on whole groups; return its metrics."""
        algorithm, rollout = self._config.algorithm, self._config.rollout
        results = [result for group in groups for result in group.results]
        batch = steps_of(
            results,
            patch=self._patch,
            noise_level=algorithm.noise_level,
            sde_type=algorithm.sde_type,
            true_cfg_scale=rollout.true_cfg_scale,
        )
        per_sample = advantages([group.rewards for group in groups], algorithm.max_advantage)
        gains = per_sample.repeat_interleave(torch.tensor([len(result.window) for result in results]))
        sampled = torch.cat([_known(result) for result in results])
        with torch.no_grad():
            old = torch.cat([log_probs(self.transformer, part).cpu() for part, _ in self._parts(batch, 0, len(batch))])
        # Importance weights: the weights trained now against those that sampled, which are older for resumed samples.
        weights = torch.exp(old - sampled).clamp(max=algorithm.rollout_is_threshold)
        losses = [
            self._optimize(batch, begin, end, gains=gains * weights, old=old)
            for begin, end in self._mini_batches(batch)
        ]
        return {
            "actor/loss": float(np.mean([loss for loss, _ in losses])),
            "actor/grad_norm": float(np.mean([norm for _, norm in losses])),
            "actor/rollout_ratio_deviation": float((torch.exp(old - sampled) - 1).abs().max()),
        }

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights by their names in the checkpoint: all, or those of adapted layers, with adapters merged into copies.

        Several threads may iterate.
        """
        return merged_weights(self.transformer)

    def save(self, folder: Path) -> None:
        """Write what was trained, as safetensors: all weights by `save_pretrained`, or the adapters without their base.

        The transformer's `load_lora_adapter(folder, prefix=None, weight_name=ADAPTER_FILE)` reads adapters.
        """
        if self._config.model.lora_rank:
            self.transformer.save_lora_adapter(str(folder), weight_name=ADAPTER_FILE)
        else:
            self.transformer.save_pretrained(str(folder))

    def save_state(self, folder: Path) -> None:
        """Write all that `load_state` needs to go on from here; the model must stand still meanwhile."""
        save_file({name: each.detach().cpu().contiguous() for name, each in self._trained()}, folder / WEIGHTS)
        random_states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random_states["cuda"] = torch.cuda.get_rng_state(self.device)
        torch.save({"optimizer": self._optimizer.state_dict(), "random": random_states}, folder / STATE)

    def check_state(self, folder: Path) -> None:
        """Read back what `save_state` has written, without its tensors' values.

        Raises:
            DataError: the files cannot be read, or hold other weights than this model trains.
        """
        try:
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            torch.load(folder / STATE, weights_only=True, mmap=True, map_location="cpu")
        except (OSError, SafetensorError, RuntimeError) as error:
            raise DataError(f"the checkpoint in {folder} cannot be read: {error}") from error
        expected = {name: tuple(each.shape) for name, each in self._trained()}
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        if wrong:
            raise DataError(
                f"the checkpoint in {folder} is of another model: {wrong[0]} has shape {found.get(wrong[0])}, here "
                f"{expected.get(wrong[0])} (set model.path and model.lora_rank as they were)"
            )

    def load_state(self, folder: Path) -> None:
        """Go on from a checkpoint: weights, optimizer and random state; learning rate and decay are the settings'.

        Raises:
            DataError: as `check_state`.
        """
        self.check_state(folder)
        saved = load_file(folder / WEIGHTS)
        with torch.no_grad():
            for name, parameter in self._trained():
                parameter.copy_(saved[name])
        state = torch.load(folder / STATE, weights_only=True, map_location="cpu")
        self._optimizer.load_state_dict(state["optimizer"])
        actor = self._config.actor
        for group in self._optimizer.param_groups:
            group.update(lr=actor.lr, weight_decay=actor.weight_decay)
        torch.set_rng_state(state["random"]["cpu"])
        if "cuda" in state["random"] and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, each) for name, each in self.transformer.named_parameters() if each.requires_grad)

    def _optimize(
        self, batch: StepBatch, begin: int, end: int, *, gains: torch.Tensor, old: torch.Tensor
    ) -> tuple[float, float]:
        """Take one optimizer step on denoise steps `begin` to `end`; return its loss and the norm of its gradient."""
        clip, total = self._config.algorithm.clip_ratio, 0.0
        self._optimizer.zero_grad(set_to_none=True)
        for part, rows in self._parts(batch, begin, end):
            gain = gains[rows].to(self.device)
            ratio = torch.exp(log_probs(self.transformer, part) - old[rows].to(self.device))
            loss = -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).sum() / (end - begin)
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.transformer.parameters(), self._config.actor.max_grad_norm)
        self._optimizer.step()
        return total, float(norm)

    def _mini_batches(self, batch: StepBatch) -> list[tuple[int, int]]:
        bounds = np.linspace(0, len(batch), self._config.actor.num_mini_batches + 1).astype(int)
        return [(int(begin), int(end)) for begin, end in zip(bounds[:-1], bounds[1:], strict=True) if end > begin]

    def _parts(self, batch: StepBatch, begin: int, end: int) -> Iterator[tuple[StepBatch, slice]]:
        """The micro-batches of denoise steps `begin` to `end`, each with its rows in `batch`."""
        for first in range(begin, end, self._config.actor.micro_batch_size):
            last = min(first + self._config.actor.micro_batch_size, end)
            yield batch.rows(first, last), slice(first, last)


def _known(result: SampleResult) -> torch.Tensor:
    return torch.zeros(0) if result.log_probs is None else result.log_probs


def add_adapters(transformer: Any, rank: int, alpha: int) -> None:
    """Freeze a transformer of diffusers and give its attention trainable adapters (LoRA, arXiv 2106.09685)."""
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(TARGETS)))


def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by the names they have without adapters: all, or those of the layers that have adapters.

    An adapted weight is `base + scale * B @ A`.

    The sum is made in fp32, one layer at a time, in a copy. The model does not change: several threads may read it at
    the same time, and a bf16 base is rounded only in what is sent.
    """
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, tensor in model.state_dict().items():
        layer, _, parameter = name.rpartition(".base_layer.")
        if layer in adapted:
            yield f"{layer}.{parameter}", _merged(adapted[layer], tensor) if parameter == "weight" else tensor.detach()
        elif not adapted:
            yield name, tensor.detach()


def _merged(layer: LoraLayer, base: torch.Tensor) -> torch.Tensor:
    total = base.detach().float()
    sides: tuple[Any, ...] = (layer.lora_A, layer.lora_B)
    for adapter in layer.active_adapters:
        down, up = (side[adapter].weight.detach().float() for side in sides)
        total = total + layer.scaling[adapter] * (up @ down)
    return total.to(base.dtype)
