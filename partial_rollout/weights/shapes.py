"""Whole shapes of a served model's linear layers, for what its loaders do not look at.

A loader takes its rank's part of a tensor and leaves the rest, so one with too many rows is cut without a word; and it
copies any dtype into its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)

from partial_rollout.errors import WeightMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Copied into one another on purpose: trainers keep weights in another precision than engines."""


class LinearShapes:
    """What the linear layers of a model must be sent, by checkpoint names; quantised layers are left to vLLM.

    Names are compared from their first number on, because models may rename what comes before.
    """

    def __init__(self, model: torch.nn.Module, packed: Mapping[str, Sequence[str]]) -> None:
        """Read the sizes of all ranks together; `packed` has the parts of each fused module, in order."""
        self._rows_columns: dict[str, tuple[int, int]] = {}
        for name, module in model.named_modules():
            if isinstance(module, LinearBase) and isinstance(module.quant_method, UnquantizedLinearMethod):
                for part, rows in _parts(name, module, packed):
                    self._rows_columns[from_first_number(part)] = rows, module.input_size

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise WeightMismatch if `tensor` is a linear layer's and has not its shape, or is not a plain float."""
        module, _, kind = from_first_number(name).rpartition(".")
        if module not in self._rows_columns or kind not in ("weight", "bias"):
            return
        rows, columns = self._rows_columns[module]
        wanted = (rows, columns) if kind == "weight" else (rows,)
        # GPT-2's are transposed in checkpoints, and its loader knows.
        if tuple(tensor.shape) not in (wanted, wanted[::-1]):
            raise WeightMismatch(f"tensor {name!r} has shape {tuple(tensor.shape)}, the model's is {wanted}")
        if tensor.dtype not in PLAIN_DTYPES:
            raise WeightMismatch(f"tensor {name!r} is {tensor.dtype}, the model takes one of {PLAIN_DTYPES}")


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


def from_first_number(name: str) -> str:
    """The part of a dotted name that starts with a number; all of it if none does."""
    words = name.split(".")
    first = next((index for index, word in enumerate(words) if word.isdigit()), 0)
    return ".".join(words[first:])
