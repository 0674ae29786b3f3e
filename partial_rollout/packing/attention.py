"""Attention for packed rows where there is no flash-attention: each sequence on its own, through torch's SDPA.

Importing this module adds it to transformers' registry as `varlen_sdpa`; `main_ppo` makes verl import it where the
configuration names it, through `model.external_lib`. A packed row then costs the sum of its sequences'
squares, while plain `sdpa` keeps sequences apart with a mask and computes the square of the whole row.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from partial_rollout.errors import ConfigError
from partial_rollout.settings.mode import PACKED_ATTENTION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

NAME = PACKED_ATTENTION
UNSUPPORTED = ("sliding_window", "softcap", "s_aux")
"""What transformers' models pass to their attention that would change the scores; None means without."""


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
    parts = [part.split(sequence_lengths(positions), dim=2) for part in (query, key, value)]
    with _without_cudnn():
        outputs = [
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
            )
            for q, k, v in zip(*parts, strict=True)
        ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """cuDNN's kernel, which torch prefers on Hopper, makes a plan for every new length, and here most are new."""
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
    """`attend` reads the position ids instead."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)
