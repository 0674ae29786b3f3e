"""A planner turns the lengths of samples into a Plan. Pure and deterministic: nothing is drawn or timed.

Each planner plans one mini-batch (one optimizer step) at a time: `mini_batch_size` consecutive samples, fewer in the
last mini-batch; without `mini_batch_size` the whole batch is one mini-batch. No sample moves to another mini-batch, so
what a step averages over, and the advantages of a prompt group, stay as they are.

What always holds: every sample is in exactly one row, every row has a sample, and every rank has the same number of
micro-batches. A row exceeds the token budget only where it holds a single sample that is longer; such rows are counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from partial_rollout.errors import ConfigError, PackingError
from partial_rollout.packing.balance import Rows, fill_by_count, fill_by_tokens, fill_tightly
from partial_rollout.packing.plan import CostModel, Plan, padded_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MicroBatch = list[list[int]]
"""A row of sample indices for each rank."""
MAX_TIGHT_MICRO_BATCHES = 32
"""Filling rows to the brim saves a micro-batch, and makes the slowest row 1 to 5 % dearer (seen). With more
micro-batches than this, one less is worth less than that."""
SLACK_DIVISOR = 64
"""From this many micro-batches on, one more in 64 is tried at once: each try fills all rows anew."""
MIN_SAVED_TOKENS = 1024
"""One more micro-batch costs a launch of every layer and its collectives: about as much as so many tokens, or less."""


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
        # At least one part: without samples `check_lengths` says so.
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
class GlobalPlanner(Planner):
    """Rows of at most `token_budget` tokens, in as few micro-batches as it finds, with rows of even cost.

    Rows differ in the number of samples. Every rank has the same number of samples in a mini-batch (within one, if it
    does not divide), which verl's dispatch needs.

    Four samples for two ranks, at most 900 tokens a row, fit one micro-batch; one longer sample, and it takes two.

    >>> planner = GlobalPlanner(900)
    >>> plan = planner.plan([800, 100, 500, 400], num_ranks=2)
    >>> plan.for_rank(0), plan.for_rank(1)
    (((0, 1),), ((2, 3),))
    >>> planner.plan([800, 200, 500, 400], num_ranks=2).num_micro_batches
    2
    """

    token_budget: int
    cost: CostModel = field(default_factory=CostModel.verl)
    """Costs of the model that is trained."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a budget below 1."""
        super().__post_init__()
        check_at_least_one("token_budget", self.token_budget)

    def _plan_one(self, lengths: Sequence[int], num_ranks: int) -> list[MicroBatch]:
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        falling = [lengths[i] for i in order]
        # verl's dispatch cuts a batch into parts of equally many samples (docs/design/0004).
        packer = BudgetPacker([self.cost.of(length) for length in falling], falling, num_ranks, self.token_budget)
        return [[[order[i] for i in row] for row in rows] for rows in packer.micro_batches()]

    def _count_over_budget(self, micro_batches: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int]) -> int:
        rows = (row for micro_batch in micro_batches for row in micro_batch)
        return sum(sum(lengths[i] for i in row) > self.token_budget for row in rows)


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
        # Rows of a micro-batch have equal numbers of samples here, so the mini-batch must divide.
        if len(lengths) % num_ranks:
            raise PackingError(f"packing: {len(lengths)} samples cannot be dealt evenly to {num_ranks} ranks")
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        falling = [lengths[i] for i in order]
        micro_batches: list[MicroBatch] = []
        start = 0
        while start < len(order):
            end = self._end(falling, start, num_ranks)
            # Dealt out in turn, so that the longest sample of each row, which decides its padding, is nearly the same.
            micro_batches.append([order[start + rank : end : num_ranks] for rank in range(num_ranks)])
            start = end
        return micro_batches

    def _end(self, falling: Sequence[int], start: int, num_ranks: int) -> int:
        """Where the micro-batch that begins with sample `start` ends: at the budget, or where much padding begins."""
        longest = falling[start]
        full = min(len(falling), start + max(1, self.token_budget // longest) * num_ranks)
        half = bisect_left(falling, -longest / 2, start, full, key=lambda length: -length)
        # Rounded up to whole turns of the dealing, so that the ranks' rows have equally many samples.
        half = start + max(1, ceil((half - start) / num_ranks)) * num_ranks
        if half < full and (full - half) // num_ranks * (longest - falling[half]) >= MIN_SAVED_TOKENS:
            return half
        return full

    def _count_over_budget(self, micro_batches: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int]) -> int:
        rows = (row for micro_batch in micro_batches for row in micro_batch)
        return sum(padded_tokens(row, lengths) > self.token_budget for row in rows)


@dataclass(frozen=True, slots=True)
class BudgetPacker:
    """Packs one mini-batch under a token budget.

    Samples are numbered by falling length, as in `balance`: `costs[i]` and `lengths[i]` (tokens) do not rise with i.
    """

    costs: Sequence[float]
    lengths: Sequence[int]
    num_ranks: int
    token_budget: int

    def micro_batches(self) -> list[MicroBatch]:
        """Every rank gets equally many samples, within one; then its rows are filled. Raises PackingError."""
        ranks = fill_by_count(self.costs, self.num_ranks)
        micro_batches = [list(rows) for rows in zip(*self._fill(ranks), strict=True)]
        for micro_batch in micro_batches:
            Rows(micro_batch, self.costs, self.lengths).even_out(self.token_budget)
        return micro_batches

    def _fill(self, ranks: list[list[int]]) -> list[list[list[int]]]:
        """The rows of each rank, dearest first; as few as found, and as many for every rank."""
        fewest, most = max(map(self._least_rows, ranks)), min(map(len, ranks))
        for num_rows in _candidates(fewest, most):
            # The last number may be tight in any case: after it there is only the error.
            may_be_tight = num_rows <= MAX_TIGHT_MICRO_BATCHES or num_rows == most
            filled: list[list[list[int]]] = []
            for samples in ranks:
                filled.append(self._fill_rank(samples, num_rows, may_be_tight))
                if not filled[-1]:
                    break
            else:
                return filled
        raise PackingError(
            f"packing: no way found to put {len(self.lengths)} samples of {self.lengths[-1]} to {self.lengths[0]}"
            f" tokens into rows of at most {self.token_budget}, the rows a multiple of {self.num_ranks} and none empty:"
            " make the number of samples a multiple of the number of ranks, or raise the token budget"
        )

    def _least_rows(self, samples: list[int]) -> int:
        """A number of rows below which no packing exists."""
        tokens = sum(min(self.lengths[i], self.token_budget) for i in samples)
        # No two samples of more than half the budget fit one row. A sample over the budget fills a row of its own.
        num_halves = sum(2 * self.lengths[i] > self.token_budget for i in samples)
        return max(1, num_halves, ceil(tokens / self.token_budget))

    def _fill_rank(self, samples: list[int], num_rows: int, may_be_tight: bool) -> list[list[int]]:
        """Even rows if they can be had, else tight ones; empty if the samples do not fit."""
        costs, lengths = [self.costs[i] for i in samples], [self.lengths[i] for i in samples]
        rows = fill_by_tokens(costs, lengths, num_rows, self.token_budget)
        if rows is None and may_be_tight:
            rows = fill_tightly(lengths, self.token_budget)
        if rows is None or len(rows) > num_rows:
            return []
        # Tight rows may be fewer than asked for; all ranks need the same number, so rows are cut in two.
        while len(rows) < num_rows:
            longest = max(rows, key=len)
            rows.append(longest[1::2])
            longest[1:] = longest[2::2]
        # Rows of similar cost meet in a micro-batch, whose slowest row every rank waits for.
        rows.sort(key=lambda row: (-sum(map(costs.__getitem__, row)), row))
        return [[samples[i] for i in row] for row in rows]


def _candidates(fewest: int, most: int) -> Iterator[int]:
    """Numbers of micro-batches to try, the largest possible at the end."""
    number = fewest + fewest // SLACK_DIVISOR
    while number < most:
        yield number
        number += 1 + number // SLACK_DIVISOR
    if fewest <= most:
        yield most


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
