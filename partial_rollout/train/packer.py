"""Turns the rows of a finished plan into tensors, and outputs back into samples; decides nothing.

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
    """(n + 1,) int32: sample i is `[cu_seqlens[i], cu_seqlens[i + 1])`. Padding, if any, comes after the last."""
    max_seqlen: int
    response_lengths: tuple[int, ...]
    fields: Mapping[str, Tensor]
    """(1, T) each; 0 at prompts and padding, so a mask among them masks both."""

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int(self.cu_seqlens[-1])


def pack(samples: Sequence[Sample]) -> PackedRow:
    """Concatenate the samples of one row.

    Raises:
        PackingError: no samples, a sample without tokens, a response longer than its sample, or different fields.
    """
    _check(samples)
    lengths = [len(sample.tokens) for sample in samples]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedRow(
        input_ids=torch.cat([sample.tokens for sample in samples])[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None].to(samples[0].tokens.device),
        cu_seqlens=ends.to(samples[0].tokens.device),
        max_seqlen=max(lengths),
        response_lengths=tuple(_response_length(sample) for sample in samples),
        fields={name: torch.cat([_aligned(s, name) for s in samples])[None] for name in samples[0].response},
    )


def unpack(row: PackedRow, values: Tensor) -> list[Tensor]:
    """Values per token (1, T) or (1, T, ...), padded or not, as one tensor (L, ...) for each sample: undoes `pack`."""
    return list(values[0, : row.num_tokens].split(row.cu_seqlens.diff().tolist()))


def unpack_response(row: PackedRow, values: Tensor) -> list[Tensor]:
    """As `unpack`, only the response (R, ...) of each sample."""
    parts = unpack(row, values)
    return [part[len(part) - length :] for part, length in zip(parts, row.response_lengths, strict=True)]


def pad(row: PackedRow, num_tokens: int, pad_token_id: int = 0) -> PackedRow:
    """Append padding up to `num_tokens`, as one more sequence that nothing else sees and no field counts.

    Raises:
        PackingError: the row is longer.
    """
    extra = num_tokens - row.input_ids.shape[1]
    if extra < 0:
        raise PackingError(f"packing: a row of {row.input_ids.shape[1]} tokens does not fit into {num_tokens}")
    positions = torch.arange(extra, device=row.position_ids.device)[None]
    return PackedRow(
        input_ids=torch.nn.functional.pad(row.input_ids, (0, extra), value=pad_token_id),
        position_ids=torch.cat([row.position_ids, positions], dim=1),
        cu_seqlens=row.cu_seqlens,
        max_seqlen=max(row.max_seqlen, extra),
        response_lengths=row.response_lengths,
        fields={name: torch.nn.functional.pad(value, (0, extra)) for name, value in row.fields.items()},
    )


def rectangle(rows: Sequence[PackedRow], pad_token_id: int = 0) -> dict[str, Tensor]:
    """The rows of a micro-batch as (num_rows, longest row) tensors: ids, positions and every field."""
    longest = max(row.input_ids.shape[1] for row in rows)
    padded = [pad(row, longest, pad_token_id) for row in rows]
    return {
        "input_ids": torch.cat([row.input_ids for row in padded]),
        "position_ids": torch.cat([row.position_ids for row in padded]),
        **{name: torch.cat([row.fields[name] for row in padded]) for name in padded[0].fields},
    }


def _check(samples: Sequence[Sample]) -> None:
    if not samples:
        raise PackingError("packing: a row needs at least one sample")
    for number, sample in enumerate(samples):
        lengths = {name: len(value) for name, value in sample.response.items()}
        if len(sample.tokens) == 0 or len(set(lengths.values())) > 1 or _response_length(sample) > len(sample.tokens):
            raise PackingError(f"packing: sample {number} has {len(sample.tokens)} tokens and fields of {lengths}")
        if lengths.keys() != samples[0].response.keys():
            raise PackingError(f"packing: sample {number} has fields {list(lengths)}, not {list(samples[0].response)}")


def _response_length(sample: Sample) -> int:
    return max((len(value) for value in sample.response.values()), default=0)


def _aligned(sample: Sample, name: str) -> Tensor:
    value = sample.response[name]
    return torch.nn.functional.pad(value, (len(sample.tokens) - len(value), 0))
