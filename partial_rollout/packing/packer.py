"""Turns samples into a packed row, and outputs back into samples: for tests and benchmarks, training uses verl's.

A packed row is the padding-free form: the samples of the row one after the other, position ids restarting with each,
and the cumulative lengths that variable-length attention takes. Attention must not look across samples; which
implementations keep that, and how it is tested, is in docs/design/0004.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from partial_rollout.errors import PackingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence: `tokens` (L,) int64, and per-token tensors (R,) of its last R tokens, the response."""

    tokens: Tensor
    response: Mapping[str, Tensor]
    """Response mask, advantages, log-probs: the value of a token stands at that token, not at the one before it."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The samples of one row without padding between them."""

    input_ids: Tensor
    """(1, T) int64."""
    position_ids: Tensor
    """(1, T) int64, from 0 for each sample."""
    cu_seqlens: Tensor
    """(n + 1,) int32: sample i is `[cu_seqlens[i], cu_seqlens[i + 1])`."""
    fields: Mapping[str, Tensor]
    """(1, T) each; 0 at prompts, so a mask among them masks these."""


def pack(samples: Sequence[Sample]) -> PackedRow:
    """Concatenate the samples of one row.

    Raises:
        PackingError: no samples, a sample without tokens, a response longer than its sample, or different fields.
    """
    _check(samples)
    lengths = [len(sample.tokens) for sample in samples]
    return PackedRow(
        input_ids=torch.cat([sample.tokens for sample in samples])[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        fields={name: torch.cat([_aligned(s, name) for s in samples])[None] for name in samples[0].response},
    )


def unpack(row: PackedRow, values: Tensor) -> list[Tensor]:
    """Values per token (1, T) or (1, T, ...) as one tensor (L, ...) for each sample: undoes `pack`."""
    return list(values[0].split(row.cu_seqlens.diff().tolist()))


def _check(samples: Sequence[Sample]) -> None:
    if not samples:
        raise PackingError("packing: a row needs at least one sample")
    for number, sample in enumerate(samples):
        lengths = {name: len(value) for name, value in sample.response.items()}
        longest = max(lengths.values(), default=0)
        if len(sample.tokens) == 0 or len(set(lengths.values())) > 1 or longest > len(sample.tokens):
            raise PackingError(f"packing: sample {number} has {len(sample.tokens)} tokens and fields of {lengths}")
        if lengths.keys() != samples[0].response.keys():
            raise PackingError(f"packing: sample {number} has fields {list(lengths)}, not {list(samples[0].response)}")


def _aligned(sample: Sample, name: str) -> Tensor:
    value = sample.response[name]
    return torch.nn.functional.pad(value, (len(sample.tokens) - len(value), 0))
