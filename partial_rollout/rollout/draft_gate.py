"""When drafts are made: while a step that checks them brings more tokens than it takes longer. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque

PRICE = 0.0015
"""By how much a step takes longer for each token that is checked in it, until that was measured. With three drafts 8B
took 1.05, 1.25 and 2.15 of the time of the same engine's steps without drafts at 16, 64 and 256 requests on an H200,
with five 1.21, 1.54 and 2.75 (docs/results/gpu.md)."""
FIRST_TOKENS = 1.3
"""What a step is taken to bring before any was seen: with three drafts enough for 66 requests."""
WINDOW = 1024
"""Checked drafts after which what was seen before counts little."""
PROBE = 256
"""Steps after which one is the other way, with drafts or without them: that costs a few steps in a thousand."""
LIKE = 8
"""Steps before a probe, of which the median says what it would have taken."""
RATIOS, LEAST_RATIOS = 9, 3
"""Probes of which the median is the price, and how many there must be. A single one is off by a tenth or more."""


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
        """`drafts` tokens in each draft; nothing was seen yet."""
        self._price, self.tokens_a_step = PRICE * drafts, FIRST_TOKENS
        self._paid, self._since = False, 0
        self._like: deque[float] = deque(maxlen=LIKE)
        self._like_what: tuple[int, bool] | None = None
        self._ratios: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RATIOS))

    def is_open(self, requests: int) -> bool:
        """Whether a step of so many requests has drafts; asked once a step."""
        pays = self.tokens_a_step >= self.price(requests)
        self._since = self._since + 1 if pays == self._paid else 1
        self._paid = pays
        if self._since > PROBE:
            self._since = 0
            return not pays
        return pays

    def price(self, requests: int) -> float:
        """What a step of so many requests takes with drafts, without them it takes 1."""
        ratios = self._ratios.get(requests.bit_length(), ())
        return statistics.median(ratios) if len(ratios) >= LEAST_RATIOS else 1 + self._price * requests

    def note(self, checked: int, tokens: int) -> None:
        """Count `checked` drafts, which brought so many tokens, those of the model itself included."""
        if checked:
            self.tokens_a_step += min(1.0, checked / WINDOW) * (tokens / checked - self.tokens_a_step)

    def took(self, requests: int, seconds: float, *, has_drafts: bool) -> None:
        """Note the time of a step of nothing but these requests. One after `LIKE` of the other way has a price."""
        size, usual = requests.bit_length(), self._like
        if self._like_what == (size, not has_drafts) and len(usual) == LIKE:
            ratio = seconds / statistics.median(usual)
            self._ratios[size].append(ratio if has_drafts else 1 / ratio)
        if self._like_what != (size, has_drafts):
            self._like_what = (size, has_drafts)
            usual.clear()
        usual.append(seconds)
