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
class FixedCountPlanner(Planner):
    """`per_rank_batch_size` samples a row; a micro-batch has consecutive samples, and its rows are even in cost.

    No setting chooses this planner. `GlobalPlanner` is compared with it, in benchmarks.bench_packing_wall and in
    tests: rows as even as rows of one size can be.

    The rows of a last, partial micro-batch differ by at most one sample. If that micro-batch has fewer samples than
    there are ranks, its samples and those of the micro-batch before are shared evenly between the two, or merged into
    one where a rank has only one sample in each micro-batch.
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
            # Every rank needs a sample in every micro-batch, or the others would wait for it in a collective.
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
    """Rows of at most `token_budget` tokens, in as few micro-batches as it finds, with rows of even cost.

    The base of `GlobalPlanner`, which a run uses; with the cost model of squares, tests and benchmarks use it alone.

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
        # verl's dispatch cuts a batch into parts of equally many samples (docs/design/0004).
        micro_batches = packer.equal_counts() if self.equal_counts else packer.free_counts()
        return [[[order[i] for i in row] for row in rows] for rows in micro_batches]

    def _count_over_budget(self, micro_batches: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int]) -> int:
        rows = (row for micro_batch in micro_batches for row in micro_batch)
        return sum(sum(lengths[i] for i in row) > self.token_budget for row in rows)


@dataclass(frozen=True)
class GlobalPlanner(TokenBudgetPlanner):
    """The token-budget planner with the costs of the model that is trained; by default with verl's cost model.

    Four samples for two ranks, at most 900 tokens a row, fit one micro-batch; one longer sample, and it takes two.

    >>> planner = GlobalPlanner(900, equal_counts=True)
    >>> plan = planner.plan([800, 100, 500, 400], num_ranks=2)
    >>> plan.for_rank(0), plan.for_rank(1)
    (((0, 1),), ((2, 3),))
    >>> planner.plan([800, 200, 500, 400], num_ranks=2).num_micro_batches
    2
    """

    cost: CostModel = field(default_factory=CostModel.verl)


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

    def free_counts(self) -> list[MicroBatch]:
        """Rows of similar cost share a micro-batch, the dearest first. Raises PackingError if no plan was found."""
        (rows,) = self._fill([list(range(len(self.costs)))])
        micro_batches = [rows[at : at + self.num_ranks] for at in range(0, len(rows), self.num_ranks)]
        for micro_batch in micro_batches:
            Rows(micro_batch, self.costs, self.lengths).even_out(self.token_budget)
        return self._even_ranks(micro_batches)

    def equal_counts(self) -> list[MicroBatch]:
        """As many samples for every rank (within one): first the ranks, then each rank's rows. Raises PackingError."""
        ranks = fill_by_count(self.costs, self.num_ranks)
        micro_batches = [list(rows) for rows in zip(*self._fill(ranks), strict=True)]
        for micro_batch in micro_batches:
            Rows(micro_batch, self.costs, self.lengths).even_out(self.token_budget)
        return micro_batches

    def _fill(self, groups: list[list[int]]) -> list[MicroBatch]:
        """The rows of each group, dearest first; as few as found, as many for every group, a multiple of its ranks."""
        ranks = self.num_ranks // len(groups)
        fewest = max(ceil(self._least_rows(group) / ranks) for group in groups)
        most = min(len(group) for group in groups) // ranks
        for num_micro_batches in _candidates(fewest, most):
            # The last number may be tight in any case: after it there is only the error.
            may_be_tight = num_micro_batches <= MAX_TIGHT_MICRO_BATCHES or num_micro_batches == most
            filled: list[MicroBatch] = []
            for group in groups:
                filled.append(self._fill_group(group, num_micro_batches * ranks, may_be_tight))
                if not filled[-1]:
                    break
            else:
                return filled
        raise PackingError(
            f"packing: no way found to put {len(self.lengths)} samples of {self.lengths[-1]} to {self.lengths[0]}"
            f" tokens into rows of at most {self.token_budget}, the rows a multiple of {self.num_ranks} and none empty:"
            " make the number of samples a multiple of the number of ranks, or raise the token budget"
        )

    def _least_rows(self, group: list[int]) -> int:
        """A number of rows below which no packing exists."""
        tokens = sum(min(self.lengths[i], self.token_budget) for i in group)
        # No two samples of more than half the budget fit one row. A sample over the budget fills a row of its own.
        num_halves = sum(2 * self.lengths[i] > self.token_budget for i in group)
        return max(1, num_halves, ceil(tokens / self.token_budget))

    def _fill_group(self, group: list[int], num_rows: int, may_be_tight: bool) -> list[list[int]]:
        """Even rows if they can be had, else tight ones; empty if the samples do not fit."""
        costs, lengths = [self.costs[i] for i in group], [self.lengths[i] for i in group]
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
        return [[group[i] for i in row] for row in rows]

    def _even_ranks(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Hand the rows of each micro-batch to the ranks so that the ranks' totals even out."""
        totals = [0.0] * self.num_ranks
        placed: list[MicroBatch] = []
        for rows in micro_batches:
            by_cost = sorted(((sum(map(self.costs.__getitem__, row)), row) for row in rows), reverse=True)
            # The dearest row goes to the rank that has had the least so far.
            by_total = sorted(range(self.num_ranks), key=totals.__getitem__)
            here: list[list[int]] = [[] for _ in rows]
            for rank, (cost, row) in zip(by_total, by_cost, strict=True):
                totals[rank] += cost
                here[rank] = row
            placed.append(here)
        return placed


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
