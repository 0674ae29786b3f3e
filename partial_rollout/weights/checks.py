"""Checks for what vLLM's loaders accept without a word, of a model's own weights and of LoRA adapters.

vLLM reports a fused parameter, or the parameter of all experts, as filled when any part of it was. A loader takes its
rank's part of a tensor and leaves the rest, so a tensor with too many rows is cut; and it copies any dtype into its
own. vLLM takes what an adapter lacks for zero, and drops what the model has no place for. Each check raises
WeightMismatch and names the first tensor that is wrong; the model is undefined then and must not be used.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)

from partial_rollout.errors import WeightMismatch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<tensor>.+)")
"""A tensor of one expert, as checkpoints that keep experts apart name it."""
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Floats that may be copied into one another: trainers keep weights in another precision than engines."""
STACKED_EXPERTS_SUFFIX = ".base_layer"
"""peft's name for the first of two adapters of a layer that has the experts in one tensor; the second has none."""
CHOOSES_LAYERS = ("layers_to_transform", "exclude_modules")
"""Keys of peft's configuration that choose among the layers."""


def parts_left_out(model: Any) -> frozenset[str]:
    """Parts of fused modules that some layers of the model do not have, by its configuration.

    Such layers take their keys as values, or use the keys and values of another layer (Gemma 3n and 4).
    """
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", config)
    if getattr(text, "num_kv_shared_layers", 0):
        return frozenset(("k_proj", "v_proj"))
    return frozenset(("v_proj",)) if getattr(text, "attention_k_eq_v", False) else frozenset()


def require_parts(
    packed: Mapping[str, Sequence[str]], received: Iterable[str], *, without: Collection[str] = ()
) -> None:
    """Check that every fused module (`qkv_proj`) came whole, or all its parts (`q_proj`, `k_proj`, `v_proj`) did.

    Parts in `without` may be missing, and so may a bias that came for no layer: some attention has none for keys.

    Raises:
        WeightMismatch: a part was not sent; the model is undefined and must not be used.
    """
    names = set(received)
    layers = {any_layer(name) for name in names}
    for fused, parts in packed.items():
        for name in names:
            for sibling in _siblings(name, [part for part in parts if part not in without]):
                needed = sibling.endswith(".weight") or any_layer(sibling) in layers
                if needed and sibling not in names:
                    raise WeightMismatch(f"weight update: {sibling} was not sent, a part of {fused} beside {name}")


def _siblings(name: str, parts: Sequence[str]) -> list[str]:
    words = name.split(".")
    if len(words) < 2 or words[-2] not in parts:
        return []
    return [".".join([*words[:-2], other, words[-1]]) for other in parts]


def require_experts(received: Iterable[str]) -> None:
    """Check that every expert of a layer came with the same tensors, and every layer with as many experts.

    Raises:
        WeightMismatch: a tensor of an expert was not sent; the model is undefined and must not be used.
    """
    found: defaultdict[str, set[tuple[int, str]]] = defaultdict(set)
    for match in filter(None, map(EXPERT.fullmatch, received)):
        found[match["layer"]].add((int(match["expert"]), match["tensor"]))
    number = 1 + max((expert for parts in found.values() for expert, _ in parts), default=-1)
    for layer, parts in found.items():
        tensors = sorted({tensor for _, tensor in parts})
        missing = sorted({*itertools.product(range(number), tensors)} - parts)
        if missing:
            expert, tensor = missing[0]
            raise WeightMismatch(f"weight update: {layer}.{expert}.{tensor} was not sent, one of {number} experts")


class ModelShapes:
    """Shapes and dtypes of a served model's unquantised layers, by checkpoint names; vLLM checks quantised layers.

    Shapes are those of all ranks together. Names are compared from their first number on, because models may rename
    what comes before. Several towers of a model can have the same names from there on: a tensor needs the shape of any.
    """

    def __init__(self, model: torch.nn.Module, packed: Mapping[str, Sequence[str]]) -> None:
        """Read the sizes of all ranks together; `packed` has the parts of each fused module, in order."""
        self._rows_columns: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
        self._plain: set[str] = set()
        for name, module in model.named_modules():
            if isinstance(module, LinearBase):
                if isinstance(module.quant_method, UnquantizedLinearMethod) and _loads_by_itself(module):
                    for part, rows in _parts(name, module, packed):
                        self._rows_columns[from_first_number(part)].add((rows, module.input_size))
            else:
                own = module.named_parameters(prefix=name, recurse=False)
                self._plain |= {from_first_number(each) for each, tensor in own if tensor.dtype in PLAIN_DTYPES}

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise WeightMismatch if `tensor` has another shape than its linear layer, or a dtype outside PLAIN_DTYPES."""
        key = from_first_number(name)
        module, _, kind = key.rpartition(".")
        wanted = self._rows_columns.get(module, set()) if kind in ("weight", "bias") else set()
        if (wanted or key in self._plain) and tensor.dtype not in PLAIN_DTYPES:
            raise WeightMismatch(f"tensor {name!r} is {tensor.dtype}, the model takes one of {PLAIN_DTYPES}")
        # A convolution that vLLM runs as a linear layer has more dimensions in checkpoints.
        if wanted and tensor.dim() == (2 if kind == "weight" else 1):
            self._check_shape(name, tuple(tensor.shape), wanted, kind)

    def _check_shape(self, name: str, shape: tuple[int, ...], wanted: set[tuple[int, int]], kind: str) -> None:
        # GPT-2's matrices are transposed in checkpoints, and its loader knows.
        allowed = wanted | {each[::-1] for each in wanted} if kind == "weight" else {each[:1] for each in wanted}
        if shape not in allowed:
            plain = sorted(wanted if kind == "weight" else allowed)
            raise WeightMismatch(f"tensor {name!r} has shape {shape}, the model's is {' or '.join(map(str, plain))}")


def _loads_by_itself(module: Any) -> bool:
    """Whether the weight's loader is a method of the layer; models give layers with unusual rows another loader."""
    loader = getattr(getattr(module, "weight", None), "weight_loader", None)
    return loader is None or getattr(loader, "__self__", None) is module


def _parts(name: str, module: Any, packed: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, int]]:
    """Checkpoint names of a layer, itself and its parts, with the rows of each."""
    parent, _, own = name.rpartition(".")
    rows = _rows_of_parts(module)
    yield name, sum(rows) or module.output_size
    parts = packed.get(own, ())
    if len(parts) == len(rows):
        yield from ((f"{parent}.{part}" if parent else part, count) for part, count in zip(parts, rows, strict=True))


def _rows_of_parts(module: Any) -> list[int]:
    if isinstance(module, QKVParallelLinear):
        # `output_sizes` counts a key-value head once for each rank that has a copy.
        heads = module.total_num_kv_heads
        v_head_size = getattr(module, "v_head_size", module.head_size)
        return [module.total_num_heads * module.head_size, heads * module.head_size, heads * v_head_size]
    return list(module.output_sizes) if isinstance(module, MergedColumnParallelLinear) else []


def require_whole_adapter(model: Any, names: Iterable[str], peft_config: Mapping[str, Any]) -> None:
    """Check that an adapter has both matrices of every module, and a module of every layer if it has it of one layer.

    Where peft's configuration chooses among the layers, modules of the other layers are not looked for.

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

    Raises:
        WeightMismatch: names the first tensor that does not; or the engine was started without LoRA.
    """
    manager, mapper = getattr(model, "lora_manager", None), _module_mapper(model)
    if manager is None:
        raise WeightMismatch("a LoRA adapter came to an engine without LoRA: set actor_rollout_ref.model.lora_rank")
    known = _known_modules(manager)
    for name in names:
        if not is_base_embedding_weights(name) and _module_of(name, mapper) not in known:
            raise WeightMismatch(
                f"LoRA adapter: tensor {name!r} belongs to no module that vLLM gives adapters to: leave it out with "
                " actor_rollout_ref.model.target_modules or exclude_modules"
            )


def _known_modules(manager: Any) -> set[str]:
    """Modules that vLLM gives adapters to, and the parts of fused ones among them."""
    return set(manager.modules).union(*manager.packed_modules.values())


def _module_mapper(model: Any) -> Any:
    """vLLM's table of module names in transformers and in vLLM, without the fusing of modules: parts have adapters."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    # From vLLM 0.25 on some mappers also fuse modules, as verl.utils.vllm.utils says.
    unstacked = getattr(mapper, "get_unstacked_mapper", None)
    return mapper if unstacked is None else unstacked()


def _module_of(name: str, mapper: Any) -> str | None:
    try:
        module = parse_fine_tuned_lora_name(name, mapper)[0]
    except ValueError:  # not a name of an adapter's tensor, or one that the model leaves out
        return None
    return module.removesuffix(STACKED_EXPERTS_SUFFIX)


def from_first_number(name: str) -> str:
    """The dotted name from its first number on, since models may rename what comes before; all of it if it has none."""
    words = name.split(".")
    first = next((index for index, word in enumerate(words) if word.isdigit()), 0)
    return ".".join(words[first:])


def any_layer(name: str) -> str:
    """The dotted name with a star for each number, so that it is the same in every layer."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))
