"""Ends trajectories whose tool or reward does not answer in time; `core/deadlines.py` decides which.

The agent loop runs in a task of its own. When a deadline passes, the task is cancelled, and whoever waits for the
trajectory gets `CallOverdue` at once, whether the task ends or not: a tool may swallow its cancellation. What such a
task brings later is refused (`Trajectory.has_ended`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any

from partial_rollout.core.deadlines import Deadlines, Late
from partial_rollout.errors import CallOverdue
from partial_rollout.observability.events import DeadlinePassed
from partial_rollout.runtime.bounded import BLOCKED_S

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from partial_rollout.agent_loop.trajectory import Trajectory

logger = logging.getLogger(__name__)

CANCEL_S = 5.0
"""How long a cancelled agent loop may take to clean up before it is left alone."""
KEYS = {"agent": "tool_s", "tool": "tool_s", "reward": "reward_s"}
"""The time limit of each phase, below `partial_rollout.timeouts`."""
WHAT = {"agent": "its agent loop", "tool": "a tool or its agent loop", "reward": "its reward"}


class PhaseLimits:
    """One timer of the event loop for the next deadline of all trajectories of a worker."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        """Seconds by phase."""
        self._deadlines = Deadlines["Trajectory"](limits)
        self._ends: dict[Trajectory, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, trajectory: Trajectory, phase: str) -> None:
        """From now on the trajectory waits for something else than before."""
        if trajectory in self._ends:
            self._deadlines.begin(trajectory, phase, asyncio.get_running_loop().time())
            self._arm()

    async def run(self, trajectory: Trajectory, agent_loop: Coroutine[Any, Any, Any]) -> Any:
        """The result of `agent_loop`, a coroutine that was not begun.

        Raises:
            CallOverdue: a tool or the reward has not answered in time.
            Exception: what the agent loop raised.
        """
        overdue: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends[trajectory] = overdue
        running = asyncio.create_task(agent_loop, name=f"agent loop of {trajectory.key}")
        try:
            await asyncio.wait({running, overdue}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                overdue.result()
            return running.result()
        finally:
            self._deadlines.end(trajectory)
            del self._ends[trajectory]
            if not overdue.cancel():
                overdue.exception()  # known, or too late to matter
            await _end(running)

    def _arm(self) -> None:
        next_s = self._deadlines.next_s
        if self._timer is not None:
            if self._timer.when() <= next_s:
                return
            self._timer.cancel()
        self._timer = None if next_s == math.inf else asyncio.get_running_loop().call_at(next_s, self._look, next_s)

    def _look(self, due_s: float) -> None:
        self._timer, now_s = None, asyncio.get_running_loop().time()
        if now_s - due_s > BLOCKED_S:
            self._deadlines.put_off(now_s - due_s)
        for late in self._deadlines.look(now_s):
            if late.is_over:
                self._end_wait(late)
            else:
                logger.warning(
                    "%s. %d wait for so long; after %g s (partial_rollout.timeouts.%s) the attempt ends",
                    _describe(late),
                    late.num_late,
                    late.limit_s,
                    KEYS[late.phase],
                )
        self._arm()

    def _end_wait(self, late: Late[Trajectory]) -> None:
        text = f"{_describe(late)}, longer than partial_rollout.timeouts.{KEYS[late.phase]}={late.limit_s:g} allows"
        logger.warning("%s: its attempt ends", text, extra={"event": _event(late)})
        end = self._ends[late.key]
        if not end.done():
            end.set_exception(CallOverdue(text))


def _describe(late: Late[Trajectory]) -> str:
    trajectory = late.key
    turn = f"at response {trajectory.num_responses}" if trajectory.num_responses else "before its first response"
    return (
        f"trajectory {trajectory.session} of {trajectory.claim.prompt_name}, {turn}, has waited {late.waited_s:.0f} s "
        f"for {WHAT[late.phase]}"
    )


def _event(late: Late[Trajectory]) -> DeadlinePassed:
    trajectory, claim = late.key, late.key.claim
    return DeadlinePassed(
        uid=claim.uid,
        session=trajectory.session,
        phase=late.phase,
        response=trajectory.num_responses,
        row=trajectory.row,
        attempt=claim.attempt,
        seconds=late.waited_s,
        limit_s=late.limit_s,
    )


async def _end(running: asyncio.Task[Any]) -> None:
    """Cancel, and wait for the end; a task that does not end is left alone, and its failure is logged."""
    if running.done():
        return
    running.cancel()
    await asyncio.wait({running}, timeout=CANCEL_S)
    if not running.done():
        logger.error("%s does not end, although it was cancelled; what it brings is refused", running.get_name())
    running.add_done_callback(_note_end)


def _note_end(running: asyncio.Task[Any]) -> None:
    if not running.cancelled() and running.exception() is not None:
        logger.info("%s has ended: %r", running.get_name(), running.exception())
