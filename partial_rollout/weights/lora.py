"""LoRA adapters for a model that vLLM serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name

from partial_rollout.errors import WeightMismatch
from partial_rollout.weights.loading import parts_left_out
from partial_rollout.weights.names import any_layer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

STACKED_EXPERTS_SUFFIX = ".base_layer"
"""peft's name for the first of two adapters of a layer that has the experts in one tensor; the second has none."""

CHOOSES_LAYERS = ("layers_to_transform", "exclude_modules")
"""Of peft's configuration."""


def require_whole_adapter(model: Any, names: Iterable[str], peft_config: Mapping[str, Any]) -> None:
    """Check that an adapter has both matrices of every module, and every layer's modules if it has one layer's.

    vLLM takes what is not there for zero. Layers that peft's configuration chooses among are not looked for.

    Raises:
        WeightMismatch: names the first module with a tensor missing.
    """
    mapper, matrices = _module_mapper(model), {True: set[str](), False: set[str]()}
    for name in names:
        if not is_base_embedding_weights(name):
            module, is_first = parse_fine_tuned_lora_name(name, mapper)
            matrices[is_first].add(module)
    for module in sorted(matrices[True] ^ matrices[False]):
        absent = "lora_B" if module in matrices[True] else "lora_A"
        raise WeightMismatch(f"LoRA adapter: {absent} of module {module!r} was not sent")
    if any(peft_config.get(key) for key in CHOOSES_LAYERS) or isinstance(peft_config.get("target_modules"), str):
        return
    left_out = parts_left_out(model)
    patterns = {any_layer(module) for module in matrices[True] if module.rpartition(".")[2] not in left_out}
    for module in sorted(_known_modules(model.lora_manager) - matrices[True]):
        if any_layer(module) in patterns:
            raise WeightMismatch(f"LoRA adapter: module {module!r} was not sent, and other layers' were")


def require_known_modules(model: Any, names: Iterable[str]) -> None:
    """Check that every tensor of an adapter, by peft's names, belongs to a module that vLLM gives adapters to.

    vLLM leaves out what it does not know when an adapter comes as tensors.

    Raises:
        WeightMismatch: names the first tensor that does not, or the engine was started without LoRA.
    """
    manager, mapper = getattr(model, "lora_manager", None), _module_mapper(model)
    if manager is None:
        raise WeightMismatch("a LoRA adapter came to an engine without LoRA: set actor_rollout_ref.model.lora_rank")
    known = _known_modules(manager)
    for name in names:
        if not is_base_embedding_weights(name) and _module_of(name, mapper) not in known:
            raise WeightMismatch(
                f"LoRA adapter: tensor {name!r} belongs to no module of the model that vLLM gives one to: leave it out "
                "with actor_rollout_ref.model.target_modules or exclude_modules"
            )


def _known_modules(manager: Any) -> set[str]:
    """Modules that vLLM gives adapters to, the parts of packed ones among them."""
    return set(manager.modules).union(*manager.packed_modules.values())


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
