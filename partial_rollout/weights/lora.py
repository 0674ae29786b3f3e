"""LoRA adapters for a model that vLLM serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partial_rollout.errors import WeightMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable

PEFT_PREFIX = "base_model.model."
PEFT_SUFFIX = ".lora_"


def require_known_modules(model: Any, names: Iterable[str]) -> None:
    """Check that every tensor of an adapter, by peft's names, belongs to a module of the model.

    vLLM leaves out what it does not know when an adapter comes as tensors. Models whose modules vLLM renames are not
    checked.

    Raises:
        WeightMismatch: names the first tensor that does not.
    """
    if getattr(model, "hf_to_vllm_mapper", None) is not None:
        return
    mapping = getattr(model, "packed_modules_mapping", {})
    packed = {part: whole for whole, parts in mapping.items() for part in parts}
    modules = {name for name, _ in model.named_modules()}
    for name in names:
        parent, _, leaf = name.removeprefix(PEFT_PREFIX).partition(PEFT_SUFFIX)[0].rpartition(".")
        if f"{parent}.{packed.get(leaf, leaf)}" not in modules:
            raise WeightMismatch(f"LoRA adapter: tensor {name!r} belongs to no module of the model")
