"""The gate of one engine with its waits, and the drain. Everything here lives on one event loop: the engine's."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from partial_rollout.core.gate import Gate, GateState, GateStatistics, Ticket, Verdict
from partial_rollout.errors import DrainTimeout
from partial_rollout.rollout.time_mean import TimeWeightedMean

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NUM_NAMED_REQUESTS = 8
"""Request ids an error message spells out."""


class Broadcast:
    """Wakes every waiter; each re-checks its own predicate, so a wake-up is never taken for the thing itself."""

    def __init__(self) -> None:
        """Start with no waiter."""
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all who wait now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return once the predicate holds at a moment when this coroutine runs."""
        while not predicate():
            await self._event.wait()


class Admission:
    """Parks, admits and drains requests.

    enter ......... waits at the gate; ended by open_nowait or reject
    close_and_drain waits for `arrived` of every admitted request, then for the engine, then for `leave`; bounded
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with the gate open."""
        self._clock = clock
        self._gate = Gate()
        self._gate_moved = Broadcast()
        self._request_moved = Broadcast()
        self._running = TimeWeightedMean(clock())
        self._mean_running_at_close = 0.0
        self.last_drain_s = 0.0

    @property
    def openings(self) -> int:
        """How often the gate was opened after its first closing."""
        return self._gate.openings

    async def enter(self, request_id: str) -> Ticket | None:
        """Wait until the request may go to the engine; None means that it was turned away.

        The caller owns the ticket and must give it back with `leave`.
        """
        ticket = self._gate.park(request_id, self._clock())
        try:
            await self._gate_moved.wait_for(lambda: self._gate.verdict(ticket) is not Verdict.WAIT)
        except asyncio.CancelledError:
            self._gate.unpark(ticket)
            raise
        if self._gate.verdict(ticket) is Verdict.REJECT:
            self._gate.unpark(ticket)
            return None
        self._gate.admit(ticket, self._clock())
        self._running.change(+1, self._clock())
        return ticket

    def arrived(self, ticket: Ticket) -> None:
        """The engine has accepted the request: a pause from now on covers it."""
        self._gate.arrived(ticket)
        if self._gate.num_arriving == 0:
            self._request_moved.notify()

    def is_arriving(self, ticket: Ticket) -> bool:
        """Whether the request is inside and the engine has not accepted it yet."""
        return self._gate.is_arriving(ticket)

    async def all_arrived(self) -> None:
        """Wait until the engine has accepted every admitted request."""
        await self._request_moved.wait_for(lambda: self._gate.num_arriving == 0)

    def leave(self, ticket: Ticket) -> None:
        """The request is done, interrupted or failed."""
        self._gate.leave(ticket)
        self._running.change(-1, self._clock())
        if self._gate.num_in_flight == 0 or self._gate.num_arriving == 0:
            self._request_moved.notify()

    async def close_and_drain(self, pause_engine: Callable[[], Awaitable[None]], limit_s: float) -> list[str]:
        """Close the gate, interrupt the engine and wait until it is empty; return the interrupted request ids.

        Raises:
            DrainTimeout: after `limit_s`; names the requests that are left. The gate stays shut.
        """
        started_s = self._clock()
        self._shut()
        interrupted = self._gate.in_flight_ids()
        try:
            await asyncio.wait_for(self._empty(pause_engine), limit_s)
        except asyncio.TimeoutError:  # noqa: UP041 - not the built-in one on Python 3.10
            raise DrainTimeout(self._describe_leftover(limit_s)) from None
        if self._gate.state is GateState.DRAINING:
            self._gate.drained()
        self.last_drain_s = self._clock() - started_s
        return interrupted

    def require_openable(self) -> None:
        """Raise IllegalTransition where `open_nowait` would: a drain has not finished."""
        self._gate.require_openable()

    def require_drained(self) -> None:
        """Raise IllegalTransition unless a drain has finished and the gate is still shut."""
        self._gate.require_drained()

    def open_nowait(self) -> None:
        """Admit all who wait and all who come.

        Raises:
            IllegalTransition: a drain has not finished.
        """
        if self._gate.state is not GateState.OPEN:
            self._running.restart(self._clock())
        self._gate.open()
        self._gate_moved.notify()

    def in_flight_ids(self) -> list[str]:
        """Ids of the admitted requests, oldest first."""
        return self._gate.in_flight_ids()

    def reject(self) -> int:
        """Turn away all who wait and all who come until the next opening or closing; return how many waited."""
        num_parked = self._gate.reject()
        self._gate_moved.notify()
        return num_parked

    def statistics(self) -> GateStatistics:
        """Counts of the gate."""
        return self._gate.statistics(self._clock())

    def mean_running(self) -> float:
        """Mean number of admitted requests from the last opening until now, or until the gate was shut."""
        is_open = self._gate.state is GateState.OPEN
        return self._running.mean(self._clock()) if is_open else self._mean_running_at_close

    async def _empty(self, pause_engine: Callable[[], Awaitable[None]]) -> None:
        await self.all_arrived()
        await pause_engine()
        await self._request_moved.wait_for(lambda: self._gate.num_in_flight == 0)

    def _shut(self) -> None:
        if self._gate.state is GateState.OPEN:
            self._mean_running_at_close = self._running.mean(self._clock())
        self._gate.close()
        self._gate_moved.notify()

    def _describe_leftover(self, limit_s: float) -> str:
        ids, counts = self._gate.in_flight_ids(), self.statistics()
        named = ", ".join(ids[:NUM_NAMED_REQUESTS]) + (", ..." if len(ids) > NUM_NAMED_REQUESTS else "")
        return (
            f"drain: {len(ids)} request(s) still in the engine after {limit_s:g} s "
            f"({counts.arriving} not yet accepted by it, oldest {counts.oldest_in_flight_s:.1f} s): [{named}]"
        )
