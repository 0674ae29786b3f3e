"""Whole shapes of a served model's linear layers, and dtypes, for what its loaders do not look at.

A loader takes its rank's part of a tensor and leaves the rest, so one with too many rows is cut without a word; and it
copies any dtype into its own.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)

from partial_rollout.errors import WeightMismatch
from partial_rollout.weights.names import from_first_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Copied into one another on purpose: trainers keep weights in another precision than engines."""


class ModelShapes:
    """What a model's plain layers must be sent, by checkpoint names; quantised layers are left to vLLM.

    Names are compared from their first number on, because models may rename what comes before. Towers of one model can
    have the same names from there on: a tensor then needs the shape of any of them.
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
        """Raise WeightMismatch if `tensor` has another shape than its linear layer, or is of no plain floats."""
        key = from_first_number(name)
        module, _, kind = key.rpartition(".")
        wanted = self._rows_columns.get(module, set()) if kind in ("weight", "bias") else set()
        if (wanted or key in self._plain) and tensor.dtype not in PLAIN_DTYPES:
            raise WeightMismatch(f"tensor {name!r} is {tensor.dtype}, the model takes one of {PLAIN_DTYPES}")
        # A convolution in the guise of a linear layer has more dimensions in checkpoints.
        if wanted and tensor.dim() == (2 if kind == "weight" else 1):
            self._check_shape(name, tuple(tensor.shape), wanted, kind)

    def _check_shape(self, name: str, shape: tuple[int, ...], wanted: set[tuple[int, int]], kind: str) -> None:
        # GPT-2's matrices are transposed in checkpoints, and its loader knows.
        allowed = wanted | {each[::-1] for each in wanted} if kind == "weight" else {each[:1] for each in wanted}
        if shape not in allowed:
            plain = sorted(wanted if kind == "weight" else allowed)
            raise WeightMismatch(f"tensor {name!r} has shape {shape}, the model's is {' or '.join(map(str, plain))}")


def _loads_by_itself(module: Any) -> bool:
    """Whether the weight's loader is the layer's own: models give some layers another one, for rows of their own."""
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
