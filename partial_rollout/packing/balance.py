"""Put samples into rows of even cost: greedy, longest first; then exchanges between the dearest and the cheapest row.

Samples are numbered by falling length here (`costs` and `lengths` fall), so every row lists its longest sample first.
The greedy part is Graham's "longest processing time first" (1969), which leaves out rows that are full. An exchange
swaps one sample for one, so the counts stay and no row becomes empty. Moving a sample without taking one back was tried
and gained nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush, heapreplace
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLERANCE = 1e-3
"""Rows this even (max - min over mean) are left alone: a step would gain less than the noise of its timer."""
MAX_EXCHANGES_PER_ROW = 8
"""Rarely more than 3 are made; the bound limits the time that a plan takes."""
MAX_PARTNERS = 8
"""Rows tried at each end before the dearest and the cheapest row count as even."""


def fill_by_count(costs: Sequence[float], num_rows: int) -> list[list[int]]:
    """Rows whose counts differ by at most one, each sample into the cheapest row that may still take one."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    count, num_longer = divmod(len(costs), num_rows)
    heap = [(0.0, row) for row in range(num_rows)]
    for sample, cost in enumerate(costs):
        total, row = heappop(heap)
        while len(rows[row]) == count and num_longer == 0:
            total, row = heappop(heap)
        num_longer -= len(rows[row]) == count
        rows[row].append(sample)
        if len(rows[row]) <= count:
            heappush(heap, (total + cost, row))
    return rows


def fill_by_tokens(
    costs: Sequence[float], lengths: Sequence[int], num_rows: int, token_budget: int
) -> list[list[int]] | None:
    """Rows of at most `token_budget` tokens, each sample into the cheapest row with room; None if one finds no room.

    A sample longer than the budget takes an empty row and fills it. With as many samples as rows, no row is empty.
    """
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    open_rows = [(0.0, row) for row in range(num_rows)]
    rooms = [token_budget] * num_rows
    # Rows without room for the present sample; the next is shorter and may fit. Most room first.
    full_rows: list[tuple[int, int, float]] = []
    for sample, (cost, length) in enumerate(zip(costs, lengths, strict=True)):
        needed = min(length, token_budget)
        while full_rows and -full_rows[0][0] >= needed:
            _, row, total = heappop(full_rows)
            heappush(open_rows, (total, row))
        while open_rows and rooms[open_rows[0][1]] < needed:
            total, row = heappop(open_rows)
            heappush(full_rows, (-rooms[row], row, total))
        if not open_rows:
            return None
        total, row = open_rows[0]
        rows[row].append(sample)
        rooms[row] -= needed
        heapreplace(open_rows, (total + cost, row))
    return rows


def fill_tightly(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Rows of at most `token_budget` tokens, as few as best fit decreasing finds; a longer sample sits alone."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for sample, length in enumerate(lengths):
        at = bisect_left(rooms, (length, 0))
        if at == len(rooms):
            rooms.append((token_budget, len(rows)))
            rows.append([])
        room, row = rooms.pop(at)
        rows[row].append(sample)
        insort(rooms, (room - length, row))
    return rows


class Rows:
    """Rows with the cost and the tokens of each, made more even by exchanges."""

    def __init__(self, rows: list[list[int]], costs: Sequence[float], lengths: Sequence[int]) -> None:
        """`costs[i]` and `lengths[i]`, in tokens, of sample i; neither rises with i. `rows` is changed in place."""
        self._rows = rows
        self._costs, self._lengths = costs, lengths
        self._row_costs = [sum(map(costs.__getitem__, row)) for row in rows]
        self._row_tokens = [sum(map(lengths.__getitem__, row)) for row in rows]

    def even_out(self, token_budget: float = float("inf")) -> None:
        """Exchange until the rows are even within TOLERANCE or no exchange helps."""
        tolerance = TOLERANCE * sum(self._row_costs) / len(self._rows)
        for _ in range(MAX_EXCHANGES_PER_ROW * len(self._rows)):
            if max(self._row_costs) - min(self._row_costs) <= tolerance:
                return
            if not self._exchange_once(token_budget):
                return

    def _exchange_once(self, token_budget: float) -> bool:
        """Exchange between the dearest row and the cheapest it helps; else between the cheapest and the dearest row.

        Returns False if neither exists.
        """
        order = sorted(range(len(self._rows)), key=self._row_costs.__getitem__)
        near = min(MAX_PARTNERS, len(order) - 1)
        pairs = chain(
            ((order[-1], row) for row in order[:near]), ((row, order[0]) for row in reversed(order[-1 - near : -1]))
        )
        for dear, cheap in pairs:
            exchange = self._best_exchange(dear, cheap, token_budget)
            if exchange is not None:
                self._apply(dear, cheap, *exchange)
                return True
        return False

    def _best_exchange(self, dear: int, cheap: int, token_budget: float) -> tuple[int, int] | None:
        """What `dear` gives and takes so that the gap between the two rows shrinks most; None if nothing helps."""
        costs, lengths = self._costs, self._lengths
        best = half_gap = (self._row_costs[dear] - self._row_costs[cheap]) / 2
        room = token_budget - self._row_tokens[cheap]
        offers = [(costs[i], lengths[i], i) for i in self._rows[cheap]]
        found, at = None, 0
        for give in self._rows[dear]:
            wanted = costs[give] - half_gap
            while at < len(offers) - 1 and offers[at][0] > wanted:
                at += 1
            for cost, length, take in offers[max(0, at - 1) : at + 1]:
                if abs(cost - wanted) < best and lengths[give] - length <= room:
                    best, found = abs(cost - wanted), (give, take)
        return found

    def _apply(self, dear: int, cheap: int, give: int, take: int) -> None:
        for source, target, sample in ((dear, cheap, give), (cheap, dear, take)):
            self._rows[source].remove(sample)
            insort(self._rows[target], sample)
            self._row_costs[source] -= self._costs[sample]
            self._row_costs[target] += self._costs[sample]
            self._row_tokens[source] -= self._lengths[sample]
            self._row_tokens[target] += self._lengths[sample]
