"""Tokens older than `partial_rollout.tail.max_staleness` stay in the context and are left out of the loss."""

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
    """Counts of a batch's tokens that are older than the staleness bound allows."""

    num_masked: int = 0
    """Left out of the loss."""
    num_trained: int = 0
    """Trained all the same: without them a mini-batch might have no token."""


def mask_stale_tokens(
    trajectories: Sequence[TrajectorySummary], *, oldest_version: int, partition_id: str, mini_batch: int
) -> StaleTokens:
    """Zero the loss masks of tokens that weights before `oldest_version` sampled; returns how many tokens that are.

    The outputs of a multi-turn trajectory are masked as a whole if one token is too old, because version spans do not
    say which output a token is in. A mini-batch without a token would have a loss of 0 / 0, and who is in which
    mini-batch is decided later. Therefore fewer than `mini_batch` trajectories are masked as a whole, and none if the
    batch would have no token left.
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
    # Decided over the whole batch: which samples share a mini-batch is planned only after this.
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
    """A copy of the mask `row`, shape (response_len,), with 0 where an old version sampled; all 0 without spans.

    The n-th 1 in the mask is the n-th sampled token. The zeros between are tokens that nobody sampled: later prompts,
    answers of tools.

    Example, three tokens of version 4 and two of version 5, with a tool's answer between them:

    >>> import torch
    >>> from partial_rollout.types import VersionSpan
    >>> row = torch.tensor([1, 1, 1, 0, 0, 1, 1])
    >>> masked(row, [VersionSpan(4, 3), VersionSpan(5, 2)], oldest_version=5).tolist()
    [0, 0, 0, 0, 0, 1, 1]
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
    """Positions in `stale` that are trained unmasked, the least stale first: as many as the mini-batches need."""
    empty = [at for at, row in enumerate(after) if not bool(row.any())]
    num_spared = len(empty) if len(empty) == num_trajectories else len(empty) - mini_batch + 1
    if num_spared <= 0:
        return []
    what = (
        "%d of %d trajectories have no token within partial_rollout.tail.max_staleness; %d are trained unmasked, "
        "because a mini-batch needs a token"
    )
    logger.warning(what, len(empty), num_trajectories, num_spared)
    return sorted(empty, key=lambda at: -stale[at].max_version)[:num_spared]


def _session(trajectory: TrajectorySummary) -> str:
    return trajectory.key.rsplit("_", 1)[0]
