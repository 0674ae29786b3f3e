"""When requests have drafts: while a step that checks them brings more tokens than it takes longer. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque

FIRST_EXCESS = 0.0015
"""By how much a step takes longer for each token that is checked in it, until that was measured. With three drafts 8B
took 1.05, 1.25 and 2.15 of the time of the same engine's steps without drafts at 16, 64 and 256 requests on an H200,
with five 1.21, 1.54 and 2.75 (docs/results/gpu.md)."""
FIRST_TOKENS = 1.3
"""What a checked step is taken to bring a request before any was seen: with three drafts enough for 66 requests."""
WINDOW, PROBE_WINDOW = 1024, 128
"""Requests with checked drafts after which what was seen before counts little: usually, and in a probe."""
PERIOD = 256
"""Steps after which a probe comes: steps that are the other way, with drafts or without. It costs about a hundredth."""
PROBED, MOST_PROBES = 32, 8
"""A probe with drafts lasts until so many requests had them, and no more steps."""
USUAL = 8
"""Steps before a probe, of which the median says what it would have taken."""
EXCESSES, LEAST_EXCESSES = 9, 3
"""Probes of which the median counts, and how many there must be: a single one is off by a tenth or more."""


class DraftGate:
    """Decides in each step, by what drafts brought and by how much longer steps took with them.

    >>> gate = DraftGate(drafts=3)
    >>> gate.is_open(64), gate.is_open(256)
    (True, False)
    >>> gate.note(checked=1024, tokens=3 * 1024)
    >>> gate.is_open(256)
    True
    """

    def __init__(self, drafts: int) -> None:
        """`drafts` tokens are proposed to each request; nothing was seen yet."""
        self._first_excess, self.tokens_a_step = FIRST_EXCESS * drafts, FIRST_TOKENS
        self._pays, self._num_same, self._num_probes = False, 0, 0
        self._usual: deque[float] = deque(maxlen=USUAL)
        self._usual_kind: tuple[int, bool] | None = None
        """Kind of the steps in `_usual`: the size of their number of requests, and whether they had drafts."""
        self._excesses: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=EXCESSES))
        """Excesses by size: by how much a step took longer with drafts, for each request in it."""

    def is_open(self, requests: int) -> bool:
        """Whether a step of so many requests has drafts; asked once a step that may have them."""
        pays = self.tokens_a_step >= self.price(requests)
        if pays != self._pays:
            self._pays, self._num_same, self._num_probes = pays, 0, 0
        self._num_same += 1
        if self._num_same > PERIOD:
            self._num_same = 0
            self._num_probes = 1 if pays else min(MOST_PROBES, -(-PROBED // requests))
        is_probe = self._num_probes > 0
        self._num_probes -= is_probe
        return pays != is_probe

    def price(self, requests: int) -> float:
        """What a step of so many requests takes with drafts; without them it takes 1.

        Prices are measured for sizes: numbers of requests from one power of two up to the next. A number whose size was
        not measured takes the price of the nearest size that was; of two as near, the smaller one's. What drafts cost
        grows with the requests up to the end of that size. Above it, it grows by `FIRST_EXCESS` only, once that says
        more, since part of the cost is the same for any number. What drafts save, where steps without them have no
        whole graphs, does not grow. Below a measured size the price is in proportion to the requests, which may be too
        low for the same reason.
        """
        size, known = requests.bit_length(), self._measured()
        first = 1 + self._first_excess * requests
        if not known:
            return first
        nearest = min(known, key=lambda each: (abs(each - size), each))
        excess = statistics.median(self._excesses[nearest])
        most = 2 ** (nearest - 1 if excess < 0 else nearest)
        found = 1 + excess * min(requests, most)
        return found if nearest >= size else max(first, found)

    def has_measured(self, requests: int) -> bool:
        """Whether the price of so many requests comes from steps of about as many."""
        return requests.bit_length() in self._measured()

    def _measured(self) -> list[int]:
        return [size for size, found in self._excesses.items() if len(found) >= LEAST_EXCESSES]

    def note(self, checked: int, tokens: int) -> None:
        """Count `checked` requests that had drafts in a step, and all tokens that it brought them."""
        if checked:
            window = WINDOW if self._pays else PROBE_WINDOW
            self.tokens_a_step += min(1.0, checked / window) * (tokens / checked - self.tokens_a_step)

    def took(self, requests: int, seconds: float, *, has_drafts: bool) -> None:
        """Note the time of a step of these requests alone. After `USUAL` steps of the other kind it gives a price."""
        size, usual = requests.bit_length(), self._usual
        if self._usual_kind == (size, not has_drafts) and len(usual) == USUAL:
            ratio = seconds / statistics.median(usual)
            self._excesses[size].append(((ratio if has_drafts else 1 / ratio) - 1) / requests)
        if self._usual_kind != (size, has_drafts):
            self._usual_kind = (size, has_drafts)
            usual.clear()
        usual.append(seconds)
