"""Plans for rows that are padded: where attention cannot keep the sequences of a packed row apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from partial_rollout.core.packing.planners import MicroBatch, Planner, check_at_least_one
from partial_rollout.errors import PackingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.core.packing.plan import Plan


@dataclass(frozen=True, kw_only=True)
class PaddedPlanner(Planner):
    """Samples of similar length together, so that padding a row to its longest sample adds little.

    `token_budget` bounds a row with its padding: number of samples x longest sample. The samples of a mini-batch are
    taken by falling length, as many as fit, and dealt out to the ranks: every rank gets the same number, and the rows
    of a micro-batch have nearly the same shape.
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
        micro_batches: list[MicroBatch] = []
        start = 0
        while start < len(order):
            per_rank = max(1, self.token_budget // lengths[order[start]])
            dealt = order[start : start + per_rank * num_ranks]
            micro_batches.append([dealt[rank::num_ranks] for rank in range(num_ranks)])
            start += len(dealt)
        return micro_batches

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
