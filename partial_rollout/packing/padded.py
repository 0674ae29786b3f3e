"""Plans for rows that are padded: where attention cannot keep the sequences of a packed row apart."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from partial_rollout.errors import PackingError
from partial_rollout.packing.planners import MicroBatch, Planner, check_at_least_one

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.packing.plan import Plan


MIN_SAVED_TOKENS = 1024
"""A micro-batch more costs a launch of every layer and its collectives: about what so many tokens do, or less."""


@dataclass(frozen=True, kw_only=True)
class PaddedPlanner(Planner):
    """Samples of similar length together, so that padding a row to its longest sample adds little.

    `token_budget` bounds a row with its padding: number of samples x longest sample. The samples of a mini-batch are
    taken by falling length, as many as fit, and dealt out to the ranks: every rank gets the same number, and the rows
    of a micro-batch have nearly the same shape. A micro-batch also ends before samples of less than half its longest,
    when that saves each rank MIN_SAVED_TOKENS of padding.
    """

    token_budget: int

    def __post_init__(self) -> None:
        """Raises ConfigError for a size below 1."""
        super().__post_init__()
        check_at_least_one("token_budget", self.token_budget)

    def _plan_one(self, lengths: Sequence[int], num_ranks: int) -> list[MicroBatch]:
        if len(lengths) % num_ranks:
            raise PackingError(f"packing: {len(lengths)} samples cannot be dealt evenly to {num_ranks} ranks")
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        falling = [lengths[i] for i in order]
        micro_batches: list[MicroBatch] = []
        start = 0
        while start < len(order):
            end = self._end(falling, start, num_ranks)
            micro_batches.append([order[start + rank : end : num_ranks] for rank in range(num_ranks)])
            start = end
        return micro_batches

    def _end(self, falling: Sequence[int], start: int, num_ranks: int) -> int:
        """Where the micro-batch that begins with sample `start` ends: at the budget, or where much padding begins."""
        longest = falling[start]
        full = min(len(falling), start + max(1, self.token_budget // longest) * num_ranks)
        half = bisect_left(falling, -longest / 2, start, full, key=lambda length: -length)
        half = start + max(1, ceil((half - start) / num_ranks)) * num_ranks
        if half < full and (full - half) // num_ranks * (longest - falling[half]) >= MIN_SAVED_TOKENS:
            return half
        return full

    def _count_over_budget(self, micro_batches: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int]) -> int:
        rows = (row for micro_batch in micro_batches for row in micro_batch)
        return sum(padded_tokens(row, lengths) > self.token_budget for row in rows)


def padded_tokens(row: Sequence[int], lengths: Sequence[int]) -> int:
    """Positions of a row whose samples are padded to its longest."""
    return len(row) * max(lengths[i] for i in row)


def sample_padding_share(plan: Plan, lengths: Sequence[int]) -> float:
    """Positions that are padding when every row is padded to its longest sample, of all positions."""
    positions = sum(padded_tokens(row, lengths) for rows in plan.micro_batches for row in rows)
    return 1 - sum(lengths) / positions
