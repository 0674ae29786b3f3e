"""How long the trainer has been busy with one thing, how long it may be, and who keeps it. No clock of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from partial_rollout.core.deadlines import Deadlines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from partial_rollout.core.deadlines import Late

USUAL = 20.0
"""A phase may take so many times its longest time so far: steps differ by what they train, but not by that much. The
warning after a tenth of it then comes at twice the longest time at the earliest."""
FIRST = 4.0
"""Until a phase of a kind has ended once it may take so many times longer: the first step compiles and fills caches."""
TRANSFER_QUEUE_CODE = "/transfer_queue/"
"""In the paths of TransferQueue's client, which waits for the controller without a bound."""
NUM_NAMED = 8
"""Names that a message lists."""


class Phases:
    """The phases of the trainer, one at a time.

    begin -> watched -> named in a warning, after one, two, four and eight tenths of its limit -> over: `look` says so
      ^         |
      +---------+ `begin` of the next phase

    >>> phases = Phases(least_s=1800.0)
    >>> phases.begin("train", now_s=0.0)
    >>> phases.begin("save", now_s=300.0)
    >>> phases.begin("train", now_s=310.0)
    >>> phases.limit_s("train"), phases.limit_s("save"), phases.limit_s("report")
    (6000.0, 1800.0, 7200.0)
    >>> [(late.waited_s, late.is_over) for now_s in (909.0, 910.0, 6310.0) for late in phases.look(now_s)]
    [(600.0, False), (6000.0, True)]
    """

    def __init__(self, least_s: float) -> None:
        """A phase may take `least_s` seconds at least, however short it has been so far."""
        self._least_s = least_s
        self._longest_s: dict[str, float] = {}
        self.kind = ""
        """The kind of the phase that has begun last."""
        self._since_s = 0.0
        self._deadlines = Deadlines[str]({})

    def begin(self, kind: str, now_s: float) -> None:
        """A phase of this kind begins, and the one before has ended; "": one that others limit."""
        if self.kind:
            self._longest_s[self.kind] = max(self.longest_s(self.kind), now_s - self._since_s)
        self.kind, self._since_s = kind, now_s
        self._deadlines = Deadlines[str]({kind: self.limit_s(kind)} if kind else {})
        self._deadlines.begin(kind, kind, now_s)

    def longest_s(self, kind: str) -> float:
        """The longest time of the phases of this kind that have ended; 0: none has."""
        return self._longest_s.get(kind, 0.0)

    def limit_s(self, kind: str) -> float:
        """How long the next phase of this kind may take."""
        if kind not in self._longest_s:
            return FIRST * self._least_s
        return max(self._least_s, USUAL * self._longest_s[kind])

    def put_off(self, seconds: float) -> None:
        """Nobody could go on for so long, as in a process that was stopped: it does not count."""
        self._since_s += seconds
        self._deadlines.put_off(seconds)

    def look(self, now_s: float) -> list[Late[str]]:
        """A warning, or the end of the phase; empty: neither."""
        return self._deadlines.look(now_s)


@dataclass(frozen=True, slots=True)
class Stuck:
    """Who keeps the trainer waiting, the likeliest first."""

    ranks: tuple[str, ...]
    """Training ranks by name; empty: none of them."""
    in_transfer_queue: bool
    """Whether TransferQueue is waited for."""

    @property
    def in_words(self) -> str:
        """For a message."""
        if self.in_transfer_queue:
            return "TransferQueue is waited for"
        if not self.ranks:
            return "no training rank has an open call"
        return f"training ranks with an open call: {shortened(self.ranks)}"


def who_is_stuck(own: str, ranks: Mapping[str, str]) -> Stuck:
    """Judge by stacks: the trainer's own, and those of the ranks that have an open call, in their order.

    A rank that stands where few others do comes first: the others may wait for it, as in a collective operation.

    >>> who_is_stuck("get", {"actor-0": "all_reduce", "actor-1": "load", "actor-2": "all_reduce"}).ranks
    ('actor-1', 'actor-0', 'actor-2')
    """
    by_stack = alike(ranks)
    waits = TRANSFER_QUEUE_CODE in own or any(TRANSFER_QUEUE_CODE in stack for stack in by_stack)
    return Stuck(tuple(name for names in by_stack.values() for name in names), waits)


def alike(ranks: Mapping[str, str]) -> dict[str, list[str]]:
    """The ranks of each stack, those first that stand where few others do."""
    found: dict[str, list[str]] = {}
    for name, stack in ranks.items():
        found.setdefault(stack, []).append(name)
    return dict(sorted(found.items(), key=lambda each: len(each[1])))


def shortened(names: tuple[str, ...] | list[str]) -> str:
    """The first names, and how many there are more."""
    more = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
