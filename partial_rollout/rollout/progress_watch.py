"""Ends an engine that stands still, so that whoever waits for its tokens hears of it as of a dead engine's end.

A frozen engine sends no event, and its process is alive: its server looks at its token count from time to time, and
bounds what it asks of an engine behind a closed gate, which has no tokens to give.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import psutil

from partial_rollout.core.deadlines import WARN_SHARE
from partial_rollout.core.progress import Progress
from partial_rollout.observability.events import EventWriter, Fault, Warned
from partial_rollout.runtime.bounded import BLOCKED_S
from partial_rollout.runtime.remote_call import MORE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

logger = logging.getLogger(__name__)

LOOK_S = 1.0
ROLE = "engine"


class ProgressWatch:
    """Looks at one engine of one server, from its start to its end, in the event loop of the engine.

    watching -> warned -> stuck: the engine's processes are killed; `verdict` says why
    """

    def __init__(
        self, name: str, stall_s: float, events: EventWriter, on_stuck: Callable[[], object] = lambda: None
    ) -> None:
        """`name` is the server's, for warnings and errors; `on_stuck` is called when the engine was ended."""
        self._name, self._events, self._progress = name, events, Progress(stall_s)
        self._on_stuck = on_stuck
        self._task: asyncio.Task[None] | None = None
        self._warn_s = self._progress.warn_s
        self._processes: Collection[psutil.Process] = ()
        self.verdict = ""
        """Why the engine was ended; empty while it was not."""

    def start(self, look: Callable[[], tuple[int, int]], processes: Collection[psutil.Process]) -> None:
        """Watch; `look` says how many requests keep the engine busy and how many tokens it has generated."""
        self._processes = processes
        self._task = asyncio.create_task(self._run(look), name=f"progress of {self._name}")
        self._task.add_done_callback(self._on_end)

    def stop(self) -> None:
        """The engine is ended on purpose."""
        if self._task is not None:
            self._task.cancel()

    @contextlib.contextmanager
    def answers_within(self, limit_s: float, limit: str, what: str) -> Iterator[None]:
        """End the engine if what is inside takes longer, which waits for it to do `what`; `limit` says which limit."""
        loop = asyncio.get_running_loop()
        late = f"{self._name} was asked to {what}, and has not answered for"
        due_s, did = loop.time() + limit_s, f"was asked to {what} and did not answer"

        def end() -> None:
            # The loop was blocked: the answer may be there, and is taken in after this timer.
            if loop.time() - due_s > BLOCKED_S:
                more = f"{limit}, and {MORE_S:g} s more since the event loop was blocked"
                timers.append(loop.call_later(MORE_S, self._end, did, limit_s + MORE_S, more))
            else:
                self._end(did, limit_s, limit)

        timers = [
            loop.call_later(WARN_SHARE * limit_s, self._say, f"{late} {WARN_SHARE * limit_s:.0f} s of {limit_s:.0f} s"),
            loop.call_at(due_s, end),
        ]
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    async def _run(self, look: Callable[[], tuple[int, int]]) -> None:
        while not self.verdict:
            due_s = time.monotonic() + LOOK_S
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            # The loop was blocked, or this process stood still: tokens may be there, and are taken in after this look.
            if now_s - due_s > BLOCKED_S:
                self._progress.put_off(now_s - due_s)
            requests, tokens = look()
            stood_still_s = self._progress.look(requests=requests, tokens=tokens, now_s=now_s)
            if self._progress.is_stuck:
                did = f"held {requests} requests and generated nothing"
                limit = "partial_rollout.timeouts.stall_s beyond its longest pause before"
                self._end(did, stood_still_s, limit)
            else:
                self._warn(requests, stood_still_s)

    def _warn(self, requests: int, stood_still_s: float) -> None:
        if stood_still_s < self._warn_s:
            if not stood_still_s:
                self._warn_s = self._progress.warn_s
            return
        self._warn_s = 2 * stood_still_s
        text = (
            f"{self._name} holds {requests} requests and has generated nothing for {stood_still_s:.0f} s; after "
            f"{self._progress.limit_s:.0f} s it is ended (partial_rollout.timeouts.stall_s)"
        )
        self._say(text)

    def _say(self, text: str) -> None:
        logger.warning("%s", text)
        self._events.write(Warned(text=text, source=__name__))

    def _end(self, did: str, silent_s: float, limit: str) -> None:
        states = ", ".join(f"pid {process.pid} {_state(process)}" for process in self._processes)
        self.verdict = f"the engine ({states}) {did} for {silent_s:.0f} s, which is {limit}: it was ended"
        logger.error("%s: %s", self._name, self.verdict)
        first: Any = next(iter(self._processes), None)
        fault = Fault(
            role=ROLE,
            name=self._name,
            pid=first.pid if first is not None else 0,
            text=f"{self._name}: {self.verdict}",
            action="its processes were killed",
            noticed_after_s=silent_s,
        )
        self._events.write(fault)
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._on_stuck()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s is not watched any more", self._name, exc_info=task.exception())


def _state(process: psutil.Process) -> str:
    """`stopped`, `running`, ... as the operating system says."""
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return "gone"
