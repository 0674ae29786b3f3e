"""Attention for packed rows where the package flash-attn is not installed: no sequence sees another.

Importing this module adds it to transformers' registry as `varlen_sdpa`; `main_ppo` makes verl import it where the
configuration names it, through `model.external_lib`. A packed row then costs the sum of its sequences'
squares, while plain `sdpa` keeps sequences apart with a mask and computes the square of the whole row.

On a GPU, with heads in half precision, torch 2.11 and later computes all sequences of a row by one kernel. Elsewhere
each sequence takes a call of torch's SDPA, and hundreds of calls cost more than the arithmetic of short sequences.

A packed row is the padding-free form: the samples of the row one after the other, position ids that restart with each,
and the cumulative lengths that variable-length attention takes. Training packs by verl's own code; `pack` and `unpack`
make such rows for the tests and benchmarks that compare packed with padded rows (docs/design/0004).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from partial_rollout.errors import ConfigError, PackingError
from partial_rollout.settings.flag import PACKED_ATTENTION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

NAME = PACKED_ATTENTION
UNSUPPORTED = ("sliding_window", "softcap", "s_aux")
"""Arguments that would change the scores, by the names that transformers' models pass; None means not in use."""
HALF_PRECISION = (torch.bfloat16, torch.float16)
CAUSAL = (-1, 0)
"""The window of `varlen_attn`: all tokens before, none after."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of one packed row.

    Takes (1, heads, T, head_dim), returns (1, T, heads, head_dim). A sequence starts where `position_ids` (1, T) is 0.

    Raises:
        ConfigError: more than one row, a padding mask, positions (3, 1, T) of images or not from 0 on, or a model
            whose attention has one of UNSUPPORTED.
    """
    positions = _checked_positions(query, attention_mask, position_ids)
    wanted = [name for name in UNSUPPORTED if options.get(name, getattr(module, name, None)) is not None]
    if wanted:
        raise ConfigError(f"{NAME} has no {wanted[0]}, which the model asks for: use attn_implementation=sdpa or eager")
    lengths = sequence_lengths(positions)
    if dropout == 0.0 and one_kernel_for_all(query):
        return _attend_at_once(query, key, value, lengths, scaling), None
    return _attend_one_by_one(query, key, value, lengths, scaling, dropout=dropout), None


def one_kernel_for_all(query: Tensor) -> bool:
    """Whether torch's kernel for sequences of different lengths takes such heads: half precision, on a GPU."""
    return query.is_cuda and query.dtype in HALF_PRECISION and _varlen_kernel() is not None


def _attend_at_once(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float | None) -> Tensor:
    """`attend` by one call of the kernel; takes (1, heads, T, head_dim), returns (1, T, heads, head_dim)."""
    kernel = _varlen_kernel()
    if kernel is None:
        raise ConfigError(f"{NAME}: torch {torch.__version__} has no kernel for sequences of different lengths")
    ends = torch.tensor([0, *lengths]).cumsum(0).to(query.device, torch.int32, non_blocking=True)
    # The kernel takes as many heads of keys and values as of queries.
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, dim=1) if repeats > 1 else part for part in (key, value))
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    return kernel(q, k, v, ends, ends, max(lengths), max(lengths), scale=scaling, window_size=CAUSAL)[None]


def _attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float | None, *, dropout: float = 0.0
) -> Tensor:
    """`attend` by one call of torch's SDPA for each sequence; same shapes as `_attend_at_once`."""
    parts = [part.split(lengths, dim=2) for part in (query, key, value)]
    with _without_cudnn():
        outputs = [
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
            )
            for q, k, v in zip(*parts, strict=True)
        ]
    return torch.cat(outputs, dim=2).transpose(1, 2)


@cache
def _varlen_kernel() -> Callable[..., Tensor] | None:
    """torch's `varlen_attn`; None where it is missing, or has no scale and no window yet."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has_both = {"scale", "window_size"} <= signature(varlen_attn).parameters.keys()
    return cast("Callable[..., Tensor]", varlen_attn) if has_both else None  # more than a Tensor only if asked for it


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Without cuDNN's kernel: torch prefers it on Hopper, but it makes a plan for each new length, and most are new."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def _checked_positions(query: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
    if query.shape[0] != 1 or attention_mask is not None or position_ids is None:
        raise ConfigError(
            f"{NAME} takes one packed row with position ids and no mask: use model.use_remove_padding=True"
        )
    shape = tuple(position_ids.shape)
    if shape != (1, query.shape[2]) or position_ids[0, 0] != 0:
        raise ConfigError(
            f"{NAME} takes positions (1, {query.shape[2]}) that begin with 0, not {shape} from"
            f" {position_ids.flatten()[0]} on: use attn_implementation=sdpa or eager"
        )
    return position_ids


def sequence_lengths(position_ids: Tensor) -> list[int]:
    """Lengths of the sequences of one packed row, from where positions (1, T) restart."""
    starts = torch.nonzero(position_ids[0] == 0).flatten()
    return torch.diff(starts, append=starts.new_tensor([position_ids.shape[1]])).tolist()


def _no_mask(*_: Any, **__: Any) -> None:
    """Make no mask: `attend` reads the position ids instead."""


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
    _check_samples(samples)
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


def _check_samples(samples: Sequence[Sample]) -> None:
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


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)
