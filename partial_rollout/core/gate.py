"""Admission gate of one engine: who may enter, who waits, who is inside. Pure: no clock, no event loop.

              close                 drained
    OPEN ---------------> DRAINING ---------> CLOSED
      ^                                          |
      +------------------- open -----------------+      (openings + 1)

A request parks first (`park`), asks `verdict` as often as it likes, and on PASS is admitted in the same breath: no
await may lie between the two. Capacity is charged by `admit`, freed by `leave`. The verdict depends on the state now,
never on an opening that happened while the request waited.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from partial_rollout.errors import IllegalTransition


class GateState(str, Enum):
    """State of the gate."""

    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


class GateEvent(str, Enum):
    """What can happen to the gate."""

    CLOSE = "close"
    DRAINED = "drained"
    OPEN = "open"


class Verdict(str, Enum):
    """Answer to a waiting request."""

    PASS = "pass"
    WAIT = "wait"
    REJECT = "reject"


# No row from DRAINING to OPEN: a drain waits for an empty engine, which it would not get if requests passed meanwhile.
TRANSITIONS: dict[tuple[GateState, GateEvent], GateState] = {
    (GateState.OPEN, GateEvent.CLOSE): GateState.DRAINING,
    # A drain that ran out of time is begun again by another close.
    (GateState.DRAINING, GateEvent.CLOSE): GateState.DRAINING,
    (GateState.CLOSED, GateEvent.CLOSE): GateState.CLOSED,
    (GateState.DRAINING, GateEvent.DRAINED): GateState.CLOSED,
    (GateState.CLOSED, GateEvent.OPEN): GateState.OPEN,
    (GateState.OPEN, GateEvent.OPEN): GateState.OPEN,
}


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request's stay at the gate; the number is unique, the request id need not be."""

    number: int
    request_id: str
    since_s: float = 0.0
    """When the request was admitted; 0 while it is parked."""


@dataclass(frozen=True, slots=True)
class GateStatistics:
    """Counts at one moment."""

    state: GateState
    openings: int
    """Number of openings after the first one."""
    in_flight: int
    """Admitted requests that have not left, `arriving` included."""
    arriving: int
    """Admitted requests that the engine has not yet confirmed."""
    parked: int
    oldest_in_flight_s: float = 0.0


class Gate:
    """The gate. Times are passed in, in seconds of any monotonic clock.

    >>> gate = Gate()
    >>> first = gate.park("request-1")
    >>> gate.admit(first, now_s=0.0)
    >>> gate.close()  # a drain begins: the request that is inside has to leave
    >>> second = gate.park("request-2")
    >>> gate.verdict(second)
    <Verdict.WAIT: 'wait'>
    >>> gate.leave(first)
    >>> gate.drained()
    >>> gate.open()
    >>> gate.verdict(second)
    <Verdict.PASS: 'pass'>
    """

    def __init__(self) -> None:
        """Start open, with no opening counted and nobody inside."""
        self.state = GateState.OPEN
        self.openings = 0
        self._rejecting = False
        self._next_number = 0
        # Insertion order is arrival order, so the first entry is the oldest.
        self._parked: dict[int, Ticket] = {}
        # Counted apart from `_in_flight`: an abort does nothing to a request that the engine has not got yet.
        self._arriving: dict[int, Ticket] = {}
        self._in_flight: dict[int, Ticket] = {}

    def park(self, request_id: str) -> Ticket:
        """Let a request wait; it is parked until `admit` or `unpark`."""
        ticket = Ticket(self._next_number, request_id)
        self._next_number += 1
        self._parked[ticket.number] = ticket
        return ticket

    def verdict(self, ticket: Ticket) -> Verdict:
        """Answer a parked request for this very moment."""
        if ticket.number not in self._parked:
            raise IllegalTransition(f"request {ticket.request_id!r} is not parked at the gate: it cannot ask to pass")
        # Asked before the state: after the last step requests are turned away at a gate that is closed.
        if self._rejecting:
            return Verdict.REJECT
        return Verdict.PASS if self.state is GateState.OPEN else Verdict.WAIT

    def may_pass(self, ticket: Ticket) -> bool:
        """Whether `admit` is allowed now."""
        return self.verdict(ticket) is Verdict.PASS

    def unpark(self, ticket: Ticket) -> None:
        """Forget a parked request that was rejected or gave up."""
        if self._parked.pop(ticket.number, None) is None:
            raise IllegalTransition(f"request {ticket.request_id!r} is not parked at the gate: it cannot unpark")

    def admit(self, ticket: Ticket, now_s: float) -> None:
        """Move a parked request inside.

        Raises:
            IllegalTransition: the gate would not let it pass now.
        """
        if not self.may_pass(ticket):
            raise IllegalTransition(f"gate {self.state.value}: request {ticket.request_id!r} may not be admitted")
        del self._parked[ticket.number]
        # The age begins here: time parked at a closed gate says nothing of a request that the engine does not end.
        entered = replace(ticket, since_s=now_s)
        self._in_flight[ticket.number] = self._arriving[ticket.number] = entered

    def arrived(self, ticket: Ticket) -> None:
        """Note that the engine holds the request; a drain may rely on that from here on."""
        if self._arriving.pop(ticket.number, None) is None:
            raise IllegalTransition(f"request {ticket.request_id!r} is not on its way to the engine")

    def is_arriving(self, ticket: Ticket) -> bool:
        """Whether the request was admitted and has neither arrived nor left."""
        return ticket.number in self._arriving

    def leave(self, ticket: Ticket) -> None:
        """Free the request's place, wherever it had come to."""
        if self._in_flight.pop(ticket.number, None) is None:
            raise IllegalTransition(f"request {ticket.request_id!r} is not in flight: it cannot leave")
        # The request's caller may have given up before the request arrived.
        self._arriving.pop(ticket.number, None)

    def close(self) -> None:
        """Stop admissions; parked requests wait again, even after `reject`. Repeating it is allowed."""
        self._step(GateEvent.CLOSE)
        self._rejecting = False

    def drained(self) -> None:
        """Finish closing.

        Raises:
            IllegalTransition: requests are still in flight, or the gate was not draining.
        """
        if self._in_flight:
            raise IllegalTransition(f"gate {self.state.value}: drained with {self.in_flight_ids()[:8]} in flight")
        self._step(GateEvent.DRAINED)

    def require_openable(self) -> None:
        """Raise IllegalTransition unless `open` is allowed now: no drain is unfinished."""
        self._require(GateEvent.OPEN)

    def require_drained(self) -> None:
        """Raise IllegalTransition unless the gate is closed and nobody is inside."""
        if self.state is not GateState.CLOSED:
            raise IllegalTransition(f"gate {self.state.value}: a drain has to come first")

    def open(self) -> None:
        """Admit again and count an opening; on an open gate only an earlier `reject` is taken back."""
        # Counted from CLOSED only: `openings` tells a client whether the gate was shut between two of its segments.
        if self._step(GateEvent.OPEN) is GateState.CLOSED:
            self.openings += 1
        self._rejecting = False

    def reject(self) -> int:
        """Refuse every parked and coming request until the next `open` or `close`; return how many are parked."""
        self._rejecting = True
        return len(self._parked)

    @property
    def num_arriving(self) -> int:
        """Admitted requests not yet confirmed by the engine."""
        return len(self._arriving)

    @property
    def num_in_flight(self) -> int:
        """Admitted requests that have not left."""
        return len(self._in_flight)

    def in_flight_ids(self) -> list[str]:
        """Ids of the admitted requests, oldest first."""
        return [ticket.request_id for ticket in self._in_flight.values()]

    def statistics(self, now_s: float) -> GateStatistics:
        """Counts, and the age of the oldest admitted request, at `now_s`."""
        oldest = next(iter(self._in_flight.values()), None)
        return GateStatistics(
            state=self.state,
            openings=self.openings,
            in_flight=len(self._in_flight),
            arriving=len(self._arriving),
            parked=len(self._parked),
            oldest_in_flight_s=now_s - oldest.since_s if oldest else 0.0,
        )

    def _step(self, event: GateEvent) -> GateState:
        """Take one row of the table; return the state before."""
        before = self.state
        self._require(event)
        self.state = TRANSITIONS[before, event]
        return before

    def _require(self, event: GateEvent) -> None:
        if (self.state, event) not in TRANSITIONS:
            raise IllegalTransition(f"gate {self.state.value}: event {event.value!r} is not allowed")
