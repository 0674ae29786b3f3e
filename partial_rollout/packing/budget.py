"""Micro-batches under a token budget. Samples are numbered by falling length here, as in `balance`."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from partial_rollout.errors import PackingError
from partial_rollout.packing.balance import Rows, fill_by_count, fill_by_tokens, fill_tightly

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MicroBatches = list[list[list[int]]]

MAX_TIGHT_MICRO_BATCHES = 32
# Rows filled to the brim make the slowest row 1 to 5 % dearer (seen), which only so few micro-batches less outweigh.
SLACK_DIVISOR = 64
# From this many micro-batches on, one more in 64 is tried at once: each try fills all rows anew.


@dataclass(frozen=True, slots=True)
class BudgetPacker:
    """Packs one mini-batch; `costs[i]` and `lengths[i]` (tokens) of sample i do not rise with i."""

    costs: Sequence[float]
    lengths: Sequence[int]
    num_ranks: int
    token_budget: int

    def free_counts(self) -> MicroBatches:
        """Rows of similar cost share a micro-batch, the dearest first. Raises PackingError if no plan was found."""
        (rows,) = self._fill([list(range(len(self.costs)))])
        micro_batches = [rows[at : at + self.num_ranks] for at in range(0, len(rows), self.num_ranks)]
        for micro_batch in micro_batches:
            Rows(micro_batch, self.costs, self.lengths).even_out(self.token_budget)
        return self._even_ranks(micro_batches)

    def equal_counts(self) -> MicroBatches:
        """As many samples for every rank (within one): first the ranks, then each rank's rows. Raises PackingError."""
        ranks = fill_by_count(self.costs, self.num_ranks)
        micro_batches = [list(rows) for rows in zip(*self._fill(ranks), strict=True)]
        for micro_batch in micro_batches:
            Rows(micro_batch, self.costs, self.lengths).even_out(self.token_budget)
        return micro_batches

    def _fill(self, groups: list[list[int]]) -> MicroBatches:
        """The rows of each group, dearest first; as few as found, as many for every group, a multiple of its ranks."""
        ranks = self.num_ranks // len(groups)
        fewest = max(ceil(self._least_rows(group) / ranks) for group in groups)
        most = min(len(group) for group in groups) // ranks
        for num_micro_batches in _candidates(fewest, most):
            may_be_tight = num_micro_batches <= MAX_TIGHT_MICRO_BATCHES or num_micro_batches == most
            filled: MicroBatches = []
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
        """No packing needs fewer rows."""
        tokens = sum(min(self.lengths[i], self.token_budget) for i in group)
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
        while len(rows) < num_rows:
            longest = max(rows, key=len)
            rows.append(longest[1::2])
            longest[1:] = longest[2::2]
        rows.sort(key=lambda row: (-sum(map(costs.__getitem__, row)), row))
        return [[group[i] for i in row] for row in rows]

    def _even_ranks(self, micro_batches: MicroBatches) -> MicroBatches:
        """Hand the rows of each micro-batch to the ranks so that the ranks' totals even out."""
        totals = [0.0] * self.num_ranks
        placed: MicroBatches = []
        for rows in micro_batches:
            by_cost = sorted(((sum(map(self.costs.__getitem__, row)), row) for row in rows), reverse=True)
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
