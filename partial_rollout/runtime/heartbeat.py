"""Processes have a deadline, which a sign of life puts off: a frozen process is told from a slow one.

    worker: its event loop turns, or a trajectory goes on ──> counted ──thread──> beat ──> prompt manager: deadline
    any other actor:                                          counted by the thread itself

Ray tells nothing of a process that is alive and does nothing. The thread sends the count also while one tool after the
other keeps the event loop busy; a count that stays the same puts nothing off, so a worker that hangs is silent too.
Other actors, such as training ranks, may be busy with one thing for minutes: their signs say that the process runs, and
the trainer's watch on its phases (phase_watch.py) says that it goes on. That watch asks where such an actor stands; the
thread that sends the signs is told so with the answer to one, since the actor itself takes no call while it is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import threading
import traceback
from concurrent.futures import TimeoutError as LateAnswer
from typing import TYPE_CHECKING

from ray.exceptions import RayActorError

from partial_rollout.core.deadlines import WARN_SHARE, Deadlines, Late
from partial_rollout.runtime.bounded import BLOCKED_S
from partial_rollout.runtime.death_watch import own_process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ray.actor import ActorHandle

    from partial_rollout.types import Process

logger = logging.getLogger(__name__)

BEAT_S = 5.0
"""Between two signs of life: far below the deadline, and little work for a manager of a thousand workers."""
BEATS = 40
"""Signs of life within the time of a deadline, at least: four before the first warning."""
ANSWER_S = 60.0
"""Whoever takes signs of life answers at once; a sign that is late is followed by another one."""
SILENT = "sign of life"
CALL_CODE = ("/ray/_private/function_manager.py", "/ray/_private/async_compat.py")
"""Ray's code below which an actor's method runs."""


class Pulse:
    """A process' end: counts what goes on in it, and sends the count.

    begin, or begin_alone -> sends for ever, until the process ends or the manager has died
    """

    def __init__(self, send: Callable[[int], None], claim_s: float) -> None:
        """`send` is called in a thread and returns when the manager has answered."""
        self._send, self._interval_s = send, interval_s(claim_s)
        self._count = 0

    def begin(self) -> None:
        """Call this once, in the event loop of the worker."""
        self._turn(asyncio.get_running_loop())
        threading.Thread(target=self._run, daemon=True, name="pulse").start()

    def begin_alone(self, name: str = "pulse") -> None:
        """Call this once, in a process of which nothing else is counted: each sign of life is another one."""
        threading.Thread(target=self._run, args=(self.goes_on,), daemon=True, name=name).start()

    def goes_on(self) -> None:
        """A trajectory of the worker goes on."""
        self._count += 1

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self.goes_on()
        loop.call_later(self._interval_s, self._turn, loop)

    def _run(self, before: Callable[[], None] = lambda: None) -> None:
        between = threading.Event()
        while not between.wait(self._interval_s):
            before()
            try:
                self._send(self._count)
            except LateAnswer:
                logger.warning("a sign of life of this process was not answered in time; it sends another one")
            except RayActorError:
                return  # the manager has died and is not started again, which ends the run


def interval_s(claim_s: float) -> float:
    """Seconds between two signs of life of a process that may be silent for `claim_s`."""
    return min(BEAT_S, claim_s / BEATS)


def begin_beats(_actor: object, manager: ActorHandle, name: str, claim_s: float) -> Process:
    """Run inside an actor, which `manager` knows as `name`: send signs of life from now on; says where it runs."""

    def send(count: int) -> None:
        if manager.beat.remote(name, count).future().result(ANSWER_S):
            manager.tell_stack.remote(name, stack_of_call()).future().result(ANSWER_S)

    thread = f"pulse of {name}"
    # A later process of the manager asks again: the handle that this process has stays valid.
    if all(each.name != thread for each in threading.enumerate()):
        Pulse(send, claim_s).begin_alone(thread)
    return own_process("", "")


def stack_of(thread_id: int) -> str:
    """Where a thread of this process is, innermost first, one function a line; empty for one that has ended."""
    innermost = sys._current_frames().get(thread_id)
    frames = traceback.walk_stack(innermost) if innermost is not None else ()
    return "\n".join(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{line})" for frame, line in frames)


def stack_of_call() -> str:
    """Where the call stands that this actor has open; where Ray's code tells none, all threads but this one."""
    # Threads that Ray's C++ code has started are in no list of Python's.
    others = sys._current_frames().keys() - {threading.get_ident()}
    stacks = [stack_of(ident) for ident in sorted(others, key=lambda each: each != threading.main_thread().ident)]
    calls = [stack for stack in stacks if any(code in stack for code in CALL_CODE)]
    return "\n\n".join(each for each in calls or stacks if each)


class Stacks:
    """The manager's end: where actors stand that are asked. Lives in an event loop.

    asked for -> the actor's next sign of life is answered with "tell" -> told, or not told in time
    """

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[str]] = {}

    def is_asked(self, name: str) -> bool:
        """Whether the actor is to tell."""
        return name in self._asked and not self._asked[name].done()

    def tell(self, name: str, stack: str) -> None:
        """The actor stands there."""
        if self.is_asked(name):
            self._asked[name].set_result(stack)

    async def of(self, names: Sequence[str], timeout_s: float) -> dict[str, str]:
        """By name; an actor that does not tell in time is left out."""
        loop = asyncio.get_running_loop()
        waits = {name: self._asked.setdefault(name, loop.create_future()) for name in names}
        if waits:
            await asyncio.wait(waits.values(), timeout=timeout_s)
        for name, wait in waits.items():
            if self._asked.get(name) is wait:
                del self._asked[name]
        return {name: wait.result() for name, wait in waits.items() if wait.done()}


class Silence:
    """The manager's end: who has been silent, in the event loop of the manager.

    beat -> heard of -> named in a warning, after a tenth of the time -> silent: `end` is called
      ^        |
      +--------+ a beat with another count
    """

    def __init__(
        self,
        claim_s: float,
        clock: Callable[[], float],
        end: Callable[[str, str], object],
        call: Callable[[str], str] = str,
    ) -> None:
        """`end` is called with the name of a process that was silent for `claim_s`, and with that in words.

        `call` makes of a name what a warning calls the process.
        """
        self._deadlines = Deadlines[str]({SILENT: claim_s})
        self._claim_s, self._clock, self._end, self._call = claim_s, clock, end, call
        self._counts: dict[str, int] = {}
        self._heard_s: dict[str, float] = {}
        """When the last sign of life came."""
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._news = asyncio.Event()
        """Somebody has given a sign of life, or has been forgotten."""

    def beat(self, worker_id: str, count: int) -> None:
        """A sign of life; one with the same count as before is none."""
        if self._counts.get(worker_id) != count:
            self._counts[worker_id] = count
            self._heard_s[worker_id] = self._clock()
            self._deadlines.begin(worker_id, SILENT, self._clock())
            self._news.set()
            self._arm()

    def forget(self, worker_id: str) -> None:
        """The worker is lost or has stopped."""
        self._counts.pop(worker_id, None)
        self._heard_s.pop(worker_id, None)
        self._deadlines.end(worker_id)
        self._news.set()

    def late(self) -> dict[str, float]:
        """Seconds of silence of each process that is silent for longer than a warning waits."""
        now_s = self._clock()
        silent_s = {name: now_s - heard_s for name, heard_s in self._heard_s.items()}
        return {name: seconds for name, seconds in silent_s.items() if seconds >= WARN_SHARE * self._claim_s}

    async def decided(self, is_meant: Callable[[str], bool]) -> None:
        """Return when each of these has given a further sign of life, or is silent for longer than a warning waits."""
        began_s, late_s = self._clock(), WARN_SHARE * self._claim_s

        def undecided() -> list[float]:
            """Seconds until each that is not decided is late."""
            silent = [
                self._clock() - at_s for name, at_s in self._heard_s.items() if is_meant(name) and at_s <= began_s
            ]
            return [late_s - silent_s for silent_s in silent if silent_s < late_s]

        while waits_s := undecided():
            self._news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), min(waits_s))

    def stop(self) -> None:
        """The run ends: nobody's silence matters."""
        for worker_id in list(self._counts):
            self.forget(worker_id)

    def _arm(self) -> None:
        next_s = self._deadlines.next_s
        if self._timer is not None:
            if self._due_s <= next_s:
                return
            self._timer.cancel()
        self._timer, self._due_s = None, next_s
        if next_s < math.inf:
            self._timer = asyncio.get_running_loop().call_later(next_s - self._clock(), self._look)

    def _look(self) -> None:
        self._timer, now_s = None, self._clock()
        if now_s - self._due_s > BLOCKED_S:
            self._deadlines.put_off(now_s - self._due_s)
        for late in self._deadlines.look(now_s):
            if late.is_over:
                # The beats' count stays known: the thread of a worker that hangs goes on to send beats.
                self._heard_s.pop(late.key, None)
                self._end(late.key, describe_silence(late))
            else:
                logger.warning(
                    "%s has given no sign of life for %.0f s (others that are silent too: %d). After %g s without one "
                    "(partial_rollout.timeouts.claim_s) it is killed; docs/troubleshooting.md says what follows",
                    self._call(late.key),
                    late.waited_s,
                    late.num_late - 1,
                    late.limit_s,
                )
        self._arm()


def describe_silence(late: Late[str]) -> str:
    """Why a silent process was killed."""
    return (
        f"it was killed, because it had given no sign of life for {late.waited_s:.0f} s, longer than "
        f"partial_rollout.timeouts.claim_s={late.limit_s:g} allows"
    )
