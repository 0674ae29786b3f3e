"""Low-rank adapters of a frozen model: where they sit, and the weights that base and adapters make together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peft import LoraConfig
from peft.tuners.lora import LoraLayer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
ADAPTER_FILE = "pytorch_lora_weights.safetensors"
PARTS = frozenset({"lora_A", "lora_B"})


def add_adapters(transformer: Any, rank: int, alpha: int) -> None:
    """Freeze a transformer of diffusers and give its attention trainable adapters (LoRA, arXiv 2106.09685)."""
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(TARGETS)))


def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight by its name without adapters, `base + scale * B @ A` where there are some.

    The sum is made in fp32, one layer at a time and beside the model, which stays as it is: any number of threads may
    read at the same time, and a bf16 base is rounded in what is sent only.
    """
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, tensor in model.state_dict().items():
        layer, _, parameter = name.rpartition(".base_layer.")
        if layer in adapted:
            yield f"{layer}.{parameter}", _merged(adapted[layer], tensor) if parameter == "weight" else tensor.detach()
        elif not _is_adapter(name):
            yield name, tensor.detach()


def _merged(layer: LoraLayer, base: torch.Tensor) -> torch.Tensor:
    total = base.detach().float()
    sides: tuple[Any, ...] = (layer.lora_A, layer.lora_B)
    for adapter in layer.active_adapters:
        down, up = (side[adapter].weight.detach().float() for side in sides)
        total = total + layer.scaling[adapter] * (up @ down)
    return total.to(base.dtype)


def _is_adapter(name: str) -> bool:
    return not PARTS.isdisjoint(name.split("."))
