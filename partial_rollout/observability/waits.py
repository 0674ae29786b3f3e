"""What the unfinished trajectories of a run wait for, from its event stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from partial_rollout.observability.events import (
    AnyEvent,
    BatchTaken,
    CommandEnded,
    GateMoved,
    PhaseBegan,
    PromptDropped,
    SegmentEnded,
    StageBegan,
    TrajectoryEnded,
)
from partial_rollout.observability.record import INTERRUPTED
from partial_rollout.observability.summary import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ENDED = "ended"
"""The phase of a trajectory that has failed or was cancelled."""
WHAT = {
    "agent": "its agent loop",
    "engine": "tokens of an engine",
    "gate": "tokens of an engine (gate closed)",
    "tool": "a tool or its agent loop",
    "reward": "its reward",
    "held": "a later round",
}
CANCELLED_S = 1.0
"""A request that is cancelled gives its agent loop back the word for a moment, before the trajectory ends."""
NUM_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Wait:
    """Trajectories of one prompt that wait for the same thing."""

    uid: str
    row: str
    what: str
    """A key of `WHAT`."""
    response: int
    """Number of the response that the trajectory is at; of several trajectories the lowest."""
    attempt: int
    since_s: float
    """Seconds since 1970: when the first of them began to wait for this."""
    begun_s: float
    """When a worker first began the prompt, whatever has become of its attempts: this is the prompt's age."""
    sessions: tuple[int, ...]
    """At least one."""
    tokens: int | None = 0
    """Tokens of the trajectories in the attempt under way; None: not known, images tell it when they are complete."""
    interruptions: int = 0
    until_s: float | None = None
    """When the last of them was cut off; None: they wait now."""

    @property
    def who(self) -> str:
        """`trajectory 3`, or how many."""
        first, *others = self.sessions
        return f"{len(others) + 1} trajectories" if others else f"trajectory {first}"

    def until(self, now_s: float) -> float:
        """The moment at which they were cut off; `now_s` where they wait now."""
        return now_s if self.until_s is None else self.until_s


@dataclass(slots=True)
class _Begun:
    """A prompt that is not complete."""

    at_s: float
    sessions: set[int] = field(default_factory=set[int])
    """Trajectories of the prompt that are not complete."""


class _Cut(NamedTuple):
    """A trajectory that was cut off: its last phase, and when it ended."""

    phase: PhaseBegan
    at_s: float


class Waits:
    """Follows the phases of all trajectories; `now` says who waits for what, `left` what a run's end has cut off."""

    def __init__(self) -> None:
        self._phases: dict[tuple[str, int], PhaseBegan] = {}
        self._before: dict[tuple[str, int], PhaseBegan] = {}
        """The phases before these."""
        self._cut: dict[tuple[str, int], _Cut] = {}
        """Trajectories that have failed or were cancelled, and have not begun again."""
        self._segments: dict[tuple[str, int], tuple[int, int]] = {}
        """Tokens and interruptions of each unfinished trajectory."""
        self._prompts: dict[str, _Begun] = {}
        """Prompts that have trajectories in `_phases` or `_cut`."""
        self.ended_s: float | None = None
        """When the run ended; None: it goes on, or was killed."""
        self._closed_s: float | None = None
        """Since when the gate is closed."""

    def add(self, events: Iterable[AnyEvent]) -> None:
        """Take in events, in the order of their times."""
        for event in events:
            self._add(event)

    def _add(self, event: AnyEvent) -> None:
        match event:
            case PhaseBegan(phase=phase) if phase != ENDED:
                key = (event.uid, event.session)
                self._prompts.setdefault(event.uid, _Begun(event.t)).sessions.add(event.session)
                if phase == "agent":
                    self._segments[key] = (0, 0)
                if key in self._phases:
                    self._before[key] = self._phases[key]
                self._phases[key] = event
                self._cut.pop(key, None)
            case PhaseBegan():
                self._end(event)
            case TrajectoryEnded():
                self._forget((event.uid, event.session))
            case SegmentEnded() if (event.uid, event.session) in self._segments:
                tokens, interruptions = self._segments[event.uid, event.session]
                interrupted = event.reason == INTERRUPTED
                self._segments[event.uid, event.session] = (tokens + event.tokens, interruptions + interrupted)
            case BatchTaken() | PromptDropped():
                gone = set(event.uids) if isinstance(event, BatchTaken) else {event.uid}
                for key in [key for key in [*self._phases, *self._cut] if key[0] in gone]:
                    self._forget(key)
            case GateMoved():
                self._closed_s = None if event.is_open else event.t
            case CommandEnded():
                self._cut |= {key: _Cut(phase, event.t) for key, phase in self._phases.items()}
                self._phases.clear()
                self.ended_s = event.t
            case StageBegan(number=1):  # what earlier starts left unfinished
                self._phases.clear()
                self._before.clear()
                self._cut.clear()
                self._segments.clear()
                self._prompts.clear()
                self.ended_s = None
            case _:
                pass

    def _end(self, event: PhaseBegan) -> None:
        """A trajectory has failed or was cancelled."""
        key = (event.uid, event.session)
        last, before = self._phases.pop(key, None), self._before.pop(key, None)
        if last is None:
            return
        is_cancelled = before is not None and last.phase == "tool" and event.t - last.t < CANCELLED_S
        self._cut[key] = _Cut(before if before is not None and is_cancelled else last, event.t)

    def _forget(self, key: tuple[str, int]) -> None:
        for known in (self._phases, self._before, self._cut, self._segments):
            known.pop(key, None)
        uid, session = key
        if (prompt := self._prompts.get(uid)) is not None:
            prompt.sessions.discard(session)
            if not prompt.sessions:
                del self._prompts[uid]

    def now(self) -> list[Wait]:
        """All waits, those of the oldest prompt first."""
        return self._waits(self._phases.values(), self._what)

    def left(self) -> list[Wait]:
        """What the trajectories waited for that the end of a run has cut off, those of the oldest prompt first."""
        return self._waits((cut.phase for cut in self._cut.values()), lambda phase: phase.phase)

    def _waits(self, phases: Iterable[PhaseBegan], what_of: Callable[[PhaseBegan], str]) -> list[Wait]:
        groups: dict[tuple[str, str], list[PhaseBegan]] = {}
        for phase in phases:
            groups.setdefault((phase.uid, what_of(phase)), []).append(phase)
        waits = [
            Wait(
                uid=uid,
                row=of[0].row,
                what=what,
                response=min(each.response for each in of),
                attempt=max(each.attempt for each in of),
                since_s=min(each.t for each in of),
                begun_s=self._prompts[uid].at_s,
                sessions=tuple(sorted(each.session for each in of)),
                tokens=sum(tokens for tokens, _ in seen) if seen else None,
                interruptions=sum(interruptions for _, interruptions in seen),
                until_s=max(
                    (self._cut[key].at_s for each in of if (key := (each.uid, each.session)) in self._cut), default=None
                ),
            )
            for (uid, what), of in groups.items()
            for seen in [self._seen(of)]
        ]
        return sorted(waits, key=lambda wait: (wait.begun_s, wait.since_s))

    def _seen(self, phases: Iterable[PhaseBegan]) -> list[tuple[int, int]]:
        keys = [(each.uid, each.session) for each in phases]
        return [self._segments[key] for key in keys if key in self._segments]

    def _what(self, phase: PhaseBegan) -> str:
        return "gate" if phase.phase == "engine" and self._closed_s is not None else phase.phase


def describe(waits: Waits, now_s: float) -> str:
    """Who waits, as text; of a run that has ended, who was unfinished then."""
    if waits.ended_s is None:
        return format_waits(waits.now(), now_s)
    if not (left := waits.left()):
        return "the run has ended; no trajectory was unfinished"
    return f"the run has ended; then {format_waits(left, waits.ended_s, 'waited')}"


def format_waits(waits: Sequence[Wait], now_s: float, verb: str = "wait") -> str:
    """A line for each wait of the oldest prompts, and how many there are by what is waited for.

    Times are until `now_s`; of those that were cut off, until then.
    """
    if not waits:
        return "no trajectory is unfinished"
    counts: dict[str, int] = {}
    for wait in waits:
        counts[wait.what] = counts.get(wait.what, 0) + len(wait.sessions)
    head = ", ".join(f"{count} for {WHAT.get(what, what)}" for what, count in counts.items())
    lines = [f"{sum(counts.values())} trajectories {verb}: {head}", *(_line(wait, now_s) for wait in waits[:NUM_SHOWN])]
    left = len(waits) - NUM_SHOWN
    return "\n".join([*lines, f"  ... and {left} more"] if left > 0 else lines)


def _line(wait: Wait, now_s: float) -> str:
    until_s = wait.until(now_s)
    row = f"row {wait.row}, " if wait.row else ""
    attempt = f", attempt {wait.attempt}" if wait.attempt > 1 else ""
    turn = f"at response {wait.response}" if wait.response else "before their first response"
    return (
        f"  {row}prompt {wait.uid}{attempt}: {wait.who}, {turn}, for {WHAT.get(wait.what, wait.what)} "
        f"since {duration(until_s - wait.since_s)}, begun {duration(until_s - wait.begun_s)} ago"
    )
