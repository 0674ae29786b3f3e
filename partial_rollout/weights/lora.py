"""LoRA adapters for a model that vLLM serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name

from partial_rollout.errors import WeightMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable

STACKED_EXPERTS_SUFFIX = ".base_layer"
"""peft's name for the first of two adapters of a layer that has the experts in one tensor; the second has none."""


def require_known_modules(model: Any, names: Iterable[str]) -> None:
    """Check that every tensor of an adapter, by peft's names, belongs to a module that vLLM gives adapters to.

    vLLM leaves out what it does not know when an adapter comes as tensors.

    Raises:
        WeightMismatch: names the first tensor that does not, or the engine was started without LoRA.
    """
    manager, mapper = getattr(model, "lora_manager", None), _module_mapper(model)
    if manager is None:
        raise WeightMismatch("a LoRA adapter came to an engine without LoRA: set actor_rollout_ref.model.lora_rank")
    known = set(manager.modules).union(*manager.packed_modules.values())
    for name in names:
        if not is_base_embedding_weights(name) and _module_of(name, mapper) not in known:
            raise WeightMismatch(f"LoRA adapter: tensor {name!r} belongs to no module of the model that takes one")


def _module_mapper(model: Any) -> Any:
    """What renames modules between transformers and vLLM, without what packs them: the parts have adapters."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    # There are mappers that pack from vLLM 0.25 on, as verl.utils.vllm.utils says.
    unstacked = getattr(mapper, "get_unstacked_mapper", None)
    return mapper if unstacked is None else unstacked()


def _module_of(name: str, mapper: Any) -> str | None:
    try:
        module = parse_fine_tuned_lora_name(name, mapper)[0]
    except ValueError:  # not a name of an adapter's tensor, or one that the model leaves out
        return None
    return module.removesuffix(STACKED_EXPERTS_SUFFIX)
