"""Tokens past `partial_rollout.tail.max_staleness` stay in the context and are left out of the loss."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import transfer_queue as tq
from tensordict import TensorDict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.types import TrajectorySummary, VersionSpan

logger = logging.getLogger(__name__)

MASKS = ("response_mask", "loss_mask")
"""verl stores the same mask under both names."""


@dataclass(frozen=True, slots=True)
class StaleTokens:
    """Tokens of a batch that are past the bound."""

    num_masked: int = 0
    num_trained: int = 0
    """Those of trajectories that are trained as they are, lest a mini-batch has no token."""


def mask_stale_tokens(
    trajectories: Sequence[TrajectorySummary], *, oldest_version: int, partition_id: str, mini_batch: int
) -> StaleTokens:
    """Zero the loss masks of tokens that weights before `oldest_version` sampled; returns how many there were.

    A trajectory of several outputs is masked as a whole if one of its tokens is too old: its spans do not say which
    output a token is in. The loss of a mini-batch without a token is 0 / 0, and who will be in one is decided later: so
    fewer than `mini_batch` trajectories are masked as a whole, and none of a batch that would have nothing left.
    """
    outputs = Counter(_session(trajectory) for trajectory in trajectories)
    stale = [trajectory for trajectory in trajectories if trajectory.min_version < oldest_version]
    if not stale:
        return StaleTokens()
    keys = [trajectory.key for trajectory in stale]
    rows = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["response_mask"])["response_mask"]
    before = list(rows.unbind())
    after = [
        masked(row, trajectory.version_spans if outputs[_session(trajectory)] == 1 else (), oldest_version)
        for row, trajectory in zip(before, stale, strict=True)
    ]
    spared = _spared(stale, after, len(trajectories), mini_batch)
    num_trained = sum(int(before[at].sum()) for at in spared)
    for at in spared:
        after[at] = before[at]
    num_masked = sum(int(row.sum()) for row in before) - sum(int(row.sum()) for row in after)
    if not num_masked:
        return StaleTokens(num_trained=num_trained)
    mask = torch.nested.as_nested_tensor(after, layout=torch.jagged)
    tq.kv_batch_put(
        keys=keys,
        partition_id=partition_id,
        fields=TensorDict(dict.fromkeys(MASKS, mask), batch_size=[len(keys)]),
    )
    return StaleTokens(num_masked, num_trained)


def masked(row: torch.Tensor, spans: Sequence[VersionSpan], oldest_version: int) -> torch.Tensor:
    """A copy of the mask `row`, shape (response_len,), zero where an old version sampled; all zero without spans.

    The n-th one of the mask is the n-th sampled token; what lies between them are prompts and tool answers.
    """
    if not spans:
        return torch.zeros_like(row)
    stale = torch.tensor([span.version < oldest_version for span in spans for _ in range(span.num_tokens)])
    sampled = row.nonzero().squeeze(1)[: len(stale)]
    copy = row.clone()
    copy[sampled[stale[: len(sampled)]]] = 0
    return copy


def _spared(
    stale: Sequence[TrajectorySummary], after: Sequence[torch.Tensor], num_trajectories: int, mini_batch: int
) -> list[int]:
    """Which of the stale trajectories are not masked, least stale first: all or as many as mini-batches need."""
    empty = [at for at, row in enumerate(after) if not bool(row.any())]
    num_spared = len(empty) if len(empty) == num_trajectories else len(empty) - mini_batch + 1
    if num_spared <= 0:
        return []
    what = "%d of %d trajectories have no token within max_staleness: %d are trained as they are"
    logger.warning(what, len(empty), num_trajectories, num_spared)
    return sorted(empty, key=lambda at: -stale[at].max_version)[:num_spared]


def _session(trajectory: TrajectorySummary) -> str:
    return trajectory.key.rsplit("_", 1)[0]
