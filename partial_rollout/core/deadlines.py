"""When a wait is warned of, and when it ends: for a tool, for a sign of life, for the start. No clock of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

K = TypeVar("K", bound="Hashable")

WARN_SHARE = 0.1
"""Share of a limit after which a warning names the wait."""
LEAST_WARN_S = 10.0
"""Time before which no single wait is warned of: on a busy machine sound calls take seconds."""


def warn_times(limit_s: float, sound_s: float = 0.0) -> Iterator[float]:
    """Seconds after which a wait is warned of: a tenth of its limit, and each time that it has lasted twice as long.

    `sound_s` is how long it may last without anything being wrong; from `limit_s` on there is no warning.

    >>> list(warn_times(600.0)), list(warn_times(60.0)), list(warn_times(600.0, sound_s=200.0)), list(warn_times(8.0))
    ([60.0, 120.0, 240.0, 480.0], [10.0, 20.0, 40.0], [240.0, 480.0], [])
    >>> list(warn_times(600.0, sound_s=600.0)), list(warn_times(600.0, sound_s=9000.0))
    ([], [])
    """
    warn_s = max(LEAST_WARN_S, sound_s + WARN_SHARE * (limit_s - sound_s))
    while warn_s < limit_s:
        yield warn_s
        warn_s *= 2


@dataclass(frozen=True, slots=True)
class Late(Generic[K]):
    """A wait that is named in a warning, or that ends."""

    key: K
    phase: str
    """What is waited for."""
    waited_s: float
    limit_s: float
    is_over: bool
    """Whether the wait ends here; otherwise it goes on."""
    num_late: int = 1
    """Waits of this phase that are past the time of the warning, this one included."""


class Deadlines(Generic[K]):
    """The waits of many, such as trajectories or processes, each for one thing at a time.

    begin -> waiting -> named in a warning -> overdue: `look` returns it, and it is forgotten
      ^         |
      +---------+ it goes on: `begin` of something else, or `end`

    Of many late waits for the same thing the oldest one is named, again when it has waited for twice as long.

    >>> deadlines = Deadlines({"tool": 60.0})
    >>> deadlines.begin("a_0", "tool", now_s=100.0)
    >>> deadlines.next_s
    106.0
    >>> [(late.waited_s, late.is_over) for now_s in (106.0, 107.0, 160.0) for late in deadlines.look(now_s)]
    [(6.0, False), (60.0, True)]
    >>> deadlines.next_s
    inf
    """

    def __init__(self, limits: Mapping[str, float]) -> None:
        """Seconds by what is waited for; a wait for anything else has no deadline here."""
        self._phases: dict[str, _Phase[K]] = {phase: _Phase(limit_s) for phase, limit_s in limits.items()}
        self._waits: dict[K, str] = {}

    @property
    def next_s(self) -> float:
        """The time at which `look` will have something to say; infinite while nobody waits."""
        return min((phase.next_s for phase in self._phases.values()), default=math.inf)

    def begin(self, key: K, phase: str, now_s: float) -> None:
        """From now on `key` waits for `phase`, and for nothing else; times never go back."""
        self.end(key)
        if phase in self._phases:
            self._waits[key] = phase
            self._phases[phase].since_s[key] = now_s

    def end(self, key: K) -> None:
        """`key` waits no more."""
        phase = self._waits.pop(key, None)
        if phase is not None:
            del self._phases[phase].since_s[key]

    def put_off(self, seconds: float) -> None:
        """Nobody could go on for so long, as on a machine that slept: it does not count."""
        for phase in self._phases.values():
            phase.since_s = {key: since_s + seconds for key, since_s in phase.since_s.items()}
            phase.warn_s += seconds

    def look(self, now_s: float) -> list[Late[K]]:
        """The waits that end now, each once, and those to warn of."""
        found: list[Late[K]] = []
        for name, phase in self._phases.items():
            over = [key for key, since_s in phase.since_s.items() if since_s + phase.limit_s <= now_s]
            found += [Late(key, name, now_s - phase.since_s[key], phase.limit_s, is_over=True) for key in over]
            for key in over:
                self.end(key)
            found += phase.warning(name, now_s)
        return found


class _Phase(Generic[K]):
    """All waits for one thing, the oldest first."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.since_s: dict[K, float] = {}
        self.warn_s = -math.inf
        """No warning before this time."""

    @property
    def next_s(self) -> float:
        oldest_s = next(iter(self.since_s.values()), math.inf)
        return min(oldest_s + self.limit_s, max(self.warn_s, oldest_s + WARN_SHARE * self.limit_s))

    def warning(self, name: str, now_s: float) -> list[Late[K]]:
        after_s = WARN_SHARE * self.limit_s
        late = [key for key, since_s in self.since_s.items() if since_s + after_s <= now_s]
        if not late or now_s < self.warn_s:
            return []
        waited_s = now_s - self.since_s[late[0]]
        self.warn_s = now_s + max(after_s, waited_s)
        return [Late(late[0], name, waited_s, self.limit_s, is_over=False, num_late=len(late))]
