"""The waits at an engine's gate, and the drain. Everything here lives on one event loop: the engine's."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from partial_rollout.core.gate import Gate, GateState, GateStatistics, Ticket, Verdict
from partial_rollout.core.time_mean import TimeWeightedMean
from partial_rollout.errors import DrainTimeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NUM_NAMED_REQUESTS = 8
"""How many request ids an error message names."""


class Broadcast:
    """Wakes every waiter; each checks its own predicate again, because a wake-up alone proves nothing."""

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

    `enter` waits at the gate, until `open` or `reject`. `close_and_drain` waits until every admitted request has
    `arrived`, pauses the engine, and waits until every request has called `leave`; all of it within a limit.

    >>> async def interrupt_a_request():
    ...     admission = Admission()
    ...     ticket = await admission.enter("a")
    ...     admission.arrived(ticket)
    ...
    ...     async def pause_engine():
    ...         admission.leave(ticket)  # the engine hands the request back
    ...
    ...     interrupted = await admission.close_and_drain(pause_engine, limit_s=1.0)
    ...     coming = asyncio.create_task(admission.enter("b"))
    ...     await asyncio.sleep(0)
    ...     parked = admission.statistics().parked
    ...     admission.open()
    ...     return interrupted, parked, (await coming).request_id
    >>> asyncio.run(interrupt_a_request())
    (['a'], 1, 'b')
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with the gate open."""
        self._clock = clock
        self._gate = Gate()
        self._gate_moved = Broadcast()
        self._request_moved = Broadcast()
        self._running = TimeWeightedMean(clock())
        self._mean_running_at_close = 0.0
        self._has_begun = False
        """Whether any request was admitted."""
        self.last_drain_s = 0.0

    @property
    def openings(self) -> int:
        """How often the gate was opened after its first closing."""
        return self._gate.openings

    async def enter(self, request_id: str) -> Ticket | None:
        """Wait until the request may go to the engine; return its ticket, or None if the request was turned away.

        The caller must give the ticket back with `leave`.
        """
        ticket = self._gate.park(request_id)
        try:
            await self._gate_moved.wait_for(lambda: self._gate.verdict(ticket) is not Verdict.WAIT)
        except asyncio.CancelledError:
            # Otherwise the request would be counted as parked for ever.
            self._gate.unpark(ticket)
            raise
        if self._gate.verdict(ticket) is Verdict.REJECT:
            self._gate.unpark(ticket)
            return None
        # No await since the verdict: the gate may move at any await.
        self._gate.admit(ticket, self._clock())
        if not self._has_begun:
            # The gate is open from the server's start on: the time until the trainer begins is no time of idle slots.
            self._has_begun = True
            self._running.restart(self._clock())
        self._running.change(+1, self._clock())
        return ticket

    def arrived(self, ticket: Ticket) -> None:
        """Note that the engine has accepted the request: a pause from now on includes it."""
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
        """Note that the request is complete, interrupted or failed."""
        self._gate.leave(ticket)
        self._running.change(-1, self._clock())
        if self._gate.num_arriving == 0:
            self._request_moved.notify()

    async def close_and_drain(self, pause_engine: Callable[[], Awaitable[None]], limit_s: float) -> list[str]:
        """Close the gate, interrupt the engine and wait until it is empty; return the interrupted request ids.

        Raises:
            DrainTimeout: after `limit_s`; names the requests that are left. The gate stays shut.
        """
        started_s = self._clock()
        self.shut()
        interrupted = self._gate.in_flight_ids()
        try:
            await asyncio.wait_for(self._empty(pause_engine), limit_s)
        except asyncio.TimeoutError:  # noqa: UP041 - not the built-in one on Python 3.10
            raise DrainTimeout(self._describe_leftover(limit_s)) from None
        # A second drain of a closed gate finds it CLOSED: repeating a drain is allowed.
        if self._gate.state is GateState.DRAINING:
            self._gate.drained()
        self.last_drain_s = self._clock() - started_s
        return interrupted

    def shut(self) -> None:
        """Let requests wait from now on; a drain has to follow before the gate can be opened."""
        if self._gate.state is GateState.OPEN:
            self._mean_running_at_close = self._running.mean(self._clock())
        self._gate.close()

    def shut_empty(self) -> None:
        """Let requests wait from now on; nobody was admitted yet, so the gate can be opened without a drain."""
        self.shut()
        self._gate.drained()

    def require_openable(self) -> None:
        """Raise IllegalTransition where `open` would: a drain has not finished."""
        self._gate.require_openable()

    def require_drained(self) -> None:
        """Raise IllegalTransition unless a drain has finished and the gate is still shut."""
        self._gate.require_drained()

    def open(self) -> None:
        """Admit all requests that wait and all that come.

        Raises:
            IllegalTransition: a drain has not finished.
        """
        # Time at a closed gate would count as time of idle slots.
        if self._gate.state is not GateState.OPEN:
            self._running.restart(self._clock())
        self._gate.open()
        self._gate_moved.notify()

    def in_flight_ids(self) -> list[str]:
        """Ids of the admitted requests, oldest first."""
        return self._gate.in_flight_ids()

    def reject(self) -> int:
        """Turn away waiting requests and all that come before the gate next moves; return how many were waiting."""
        num_parked = self._gate.reject()
        self._gate_moved.notify()
        return num_parked

    def statistics(self) -> GateStatistics:
        """Counts of the gate."""
        return self._gate.statistics(self._clock())

    def mean_running(self) -> float:
        """Mean number of admitted requests from the last opening until now, or until the gate was shut.

        Before the gate was first shut it counts from the first request on.
        """
        is_open = self._gate.state is GateState.OPEN
        return self._running.mean(self._clock()) if is_open else self._mean_running_at_close

    async def _empty(self, pause_engine: Callable[[], Awaitable[None]]) -> None:
        # A pause misses a request that is still on its way to the engine; that one would generate while weights change.
        await self.all_arrived()
        await pause_engine()
        await self._request_moved.wait_for(lambda: self._gate.num_in_flight == 0)

    def _describe_leftover(self, limit_s: float) -> str:
        ids, counts = self._gate.in_flight_ids(), self.statistics()
        named = ", ".join(ids[:NUM_NAMED_REQUESTS]) + (", ..." if len(ids) > NUM_NAMED_REQUESTS else "")
        return (
            f"drain: {len(ids)} request(s) still in the engine after {limit_s:g} s "
            f"({counts.arriving} not yet accepted by it, oldest {counts.oldest_in_flight_s:.1f} s): [{named}]"
        )
