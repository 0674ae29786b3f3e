"""A finished plan: which sample is trained on which rank, in which micro-batch; and how even that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from partial_rollout.packing.cost import CostModel

Row = tuple[int, ...]
"""Sample indices."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sample indices by micro-batch and data-parallel rank; every row holds at least one."""

    micro_batches: tuple[tuple[Row, ...], ...]
    """`micro_batches[m][r]`: what rank r trains in micro-batch m."""
    micro_batches_per_mini_batch: tuple[int, ...]
    """How many consecutive micro-batches make up each mini-batch (one optimizer step)."""
    rows_over_budget: int = 0
    """Rows of one sample that is longer than the token budget."""

    @property
    def num_micro_batches(self) -> int:
        """The same for every rank."""
        return len(self.micro_batches)

    @property
    def num_ranks(self) -> int:
        """Data-parallel size."""
        return len(self.micro_batches[0])

    def for_rank(self, rank: int) -> tuple[Row, ...]:
        """The rows of one rank, one per micro-batch."""
        return tuple(rows[rank] for rows in self.micro_batches)

    def mini_batches(self) -> tuple[tuple[tuple[Row, ...], ...], ...]:
        """The micro-batches of each mini-batch."""
        ends = [sum(self.micro_batches_per_mini_batch[: k + 1]) for k in range(len(self.micro_batches_per_mini_batch))]
        return tuple(
            self.micro_batches[end - num : end]
            for end, num in zip(ends, self.micro_batches_per_mini_batch, strict=True)
        )


@dataclass(frozen=True, slots=True)
class PlanStatistics:
    """How even a plan is. An imbalance is (max - min) / mean over ranks; 0 is even."""

    square_imbalance: float
    """Of the rows' sums of L**2, mean over micro-batches: what ranks feel that meet in every micro-batch (FSDP)."""
    token_imbalance: float
    """Of the rows' tokens, mean over micro-batches."""
    rank_square_imbalance: float
    """Of the ranks' sums of L**2 over the whole plan: what ranks feel that meet only at its end."""
    rank_token_imbalance: float
    padding_share: float
    """Positions that are padding when the rows of a micro-batch are padded to its longest, of all positions."""
    rows_over_budget: int
    num_micro_batches: int


def plan_statistics(plan: Plan, lengths: Sequence[int]) -> PlanStatistics:
    """Measure a plan over samples of `lengths` tokens."""
    tokens = _row_sums(plan, lambda index: lengths[index])
    squares = _row_sums(plan, lambda index: lengths[index] ** 2)
    positions = sum(len(row) * max(row) for row in tokens)
    return PlanStatistics(
        square_imbalance=_mean([imbalance(row) for row in squares]),
        token_imbalance=_mean([imbalance(row) for row in tokens]),
        rank_square_imbalance=imbalance([sum(rank) for rank in zip(*squares, strict=True)]),
        rank_token_imbalance=imbalance([sum(rank) for rank in zip(*tokens, strict=True)]),
        padding_share=1 - sum(map(sum, tokens)) / positions,
        rows_over_budget=plan.rows_over_budget,
        num_micro_batches=plan.num_micro_batches,
    )


def step_cost(plan: Plan, lengths: Sequence[int], cost: CostModel, per_micro_batch: float = 0.0) -> float:
    """Time of a step in which ranks wait for each other in every micro-batch: the sum of the slowest rows."""
    rows = _row_sums(plan, lambda index: cost.of(lengths[index]))
    return sum(max(row) + per_micro_batch for row in rows)


def imbalance(values: Sequence[float]) -> float:
    """(max - min) / mean."""
    return (max(values) - min(values)) * len(values) / sum(values)


def _row_sums(plan: Plan, value: Callable[[int], float]) -> list[list[float]]:
    return [[sum(map(value, row)) for row in rows] for rows in plan.micro_batches]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
