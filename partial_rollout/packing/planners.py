"""Who trains what: a planner turns sample lengths into a Plan. Pure and deterministic; nothing is drawn or timed.

Each planner plans one mini-batch (one optimizer step) at a time: `mini_batch_size` consecutive samples, the last may
be smaller; without it the whole batch is one. No sample moves across that boundary, so what a step averages over, and
the advantages of a prompt group, stay as they are.

What always holds: every sample is in exactly one row, every row has a sample, every rank has the same number of
micro-batches, and no row is over the token budget but one that holds a single longer sample, which is counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from partial_rollout.errors import ConfigError, PackingError
from partial_rollout.packing.balance import Rows, fill_by_count
from partial_rollout.packing.budget import BudgetPacker
from partial_rollout.packing.cost import CostModel
from partial_rollout.packing.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

MicroBatch = list[list[int]]


@dataclass(frozen=True)
class Planner(ABC):
    """Base of the planners; a subclass plans one mini-batch."""

    mini_batch_size: int | None = field(default=None, kw_only=True)
    """Samples per optimizer step over all ranks; None is the whole batch."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a size below 1."""
        if self.mini_batch_size is not None:
            check_at_least_one("mini_batch_size", self.mini_batch_size)

    def plan(self, lengths: Sequence[int], num_ranks: int) -> Plan:
        """Plan samples of `lengths` tokens for `num_ranks` data-parallel ranks.

        Raises ConfigError for `num_ranks` below 1 and PackingError for samples that no plan exists for.
        """
        check_at_least_one("num_ranks", num_ranks)
        size = self.mini_batch_size or max(1, len(lengths))
        parts: list[list[MicroBatch]] = []
        for start in range(0, max(1, len(lengths)), size):
            part = lengths[start : start + size]
            check_lengths(part, num_ranks, first=start)
            parts.append([[[start + i for i in row] for row in rows] for rows in self._plan_one(part, num_ranks)])
        micro_batches = tuple(tuple(tuple(sorted(row)) for row in rows) for part in parts for rows in part)
        return Plan(micro_batches, tuple(map(len, parts)), self._count_over_budget(micro_batches, lengths))

    @abstractmethod
    def _plan_one(self, lengths: Sequence[int], num_ranks: int) -> list[MicroBatch]:
        """Micro-batches of one mini-batch, with indices from its start."""

    def _count_over_budget(self, micro_batches: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int]) -> int:
        return 0


@dataclass(frozen=True)
class FixedCountPlanner(Planner):
    """`per_rank_batch_size` samples a row, of consecutive samples in each micro-batch, rows even in cost.

    A last partial micro-batch has rows that differ by at most one sample. With fewer samples than ranks it shares with
    the one before, evenly; where a rank has only one sample a micro-batch, it is merged into the one before.
    """

    per_rank_batch_size: int
    cost: CostModel = field(default_factory=CostModel.squares)

    def __post_init__(self) -> None:
        """Raises ConfigError for a size below 1."""
        super().__post_init__()
        check_at_least_one("per_rank_batch_size", self.per_rank_batch_size)

    def _plan_one(self, lengths: Sequence[int], num_ranks: int) -> list[MicroBatch]:
        micro_batches: list[MicroBatch] = []
        start = 0
        for size in self._sizes(len(lengths), num_ranks):
            micro_batches.append(self._rows(lengths, range(start, start + size), num_ranks))
            start += size
        return micro_batches

    def _sizes(self, num_samples: int, num_ranks: int) -> list[int]:
        full = self.per_rank_batch_size * num_ranks
        num_full, rest = divmod(num_samples, full)
        sizes = [full] * num_full + [rest] * (rest > 0)
        if 0 < rest < num_ranks:
            both = full + rest
            sizes[-2:] = [both] if both < 2 * num_ranks else [both - both // 2, both // 2]
        return sizes

    def _rows(self, lengths: Sequence[int], samples: range, num_ranks: int) -> MicroBatch:
        order = sorted(samples, key=lambda i: -lengths[i])
        costs = [self.cost.of(lengths[i]) for i in order]
        rows = fill_by_count(costs, num_ranks)
        Rows(rows, costs, [lengths[i] for i in order]).even_out()
        return [[order[i] for i in row] for row in rows]


@dataclass(frozen=True)
class TokenBudgetPlanner(Planner):
    """Rows of at most `token_budget` tokens, as few micro-batches as found, rows of a micro-batch even in cost.

    Rows differ in the number of samples. `equal_counts` makes every rank's number of samples in a mini-batch the same
    (within one, if it does not divide), which verl's dispatch needs.
    """

    token_budget: int
    cost: CostModel = field(default_factory=CostModel.squares)
    equal_counts: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for a budget below 1."""
        super().__post_init__()
        check_at_least_one("token_budget", self.token_budget)

    def _plan_one(self, lengths: Sequence[int], num_ranks: int) -> list[MicroBatch]:
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        sorted_lengths = [lengths[i] for i in order]
        costs = [self.cost.of(length) for length in sorted_lengths]
        packer = BudgetPacker(costs, sorted_lengths, num_ranks, self.token_budget)
        micro_batches = packer.equal_counts() if self.equal_counts else packer.free_counts()
        return [[[order[i] for i in row] for row in rows] for rows in micro_batches]

    def _count_over_budget(self, micro_batches: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int]) -> int:
        rows = (row for micro_batch in micro_batches for row in micro_batch)
        return sum(sum(lengths[i] for i in row) > self.token_budget for row in rows)


@dataclass(frozen=True)
class GlobalPlanner(TokenBudgetPlanner):
    """The token-budget planner told what the model really costs; by default as verl counts."""

    cost: CostModel = field(default_factory=CostModel.verl)


def check_at_least_one(name: str, value: int) -> None:
    """Raises ConfigError."""
    if value < 1:
        raise ConfigError(f"packing: {name}={value}, must be 1 or more")


def check_lengths(lengths: Sequence[int], num_ranks: int, first: int = 0) -> None:
    """Raises PackingError for fewer samples than ranks and for a length below 1.

    `first` is the index of the first sample, for the message.
    """
    if not lengths:
        raise PackingError("packing: there are no samples to plan")
    if len(lengths) < num_ranks:
        raise PackingError(
            f"packing: {len(lengths)} samples from index {first} on for {num_ranks} data-parallel ranks; every rank"
            " needs one in each mini-batch: make the mini-batch larger or use fewer ranks"
        )
    shortest = min(lengths)
    if shortest < 1:
        raise PackingError(f"packing: sample {first + lengths.index(shortest)} has {shortest} tokens, needs 1 or more")
