"""Background tasks whose failure is always seen."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from partial_rollout.errors import ActorLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

T = TypeVar("T")
logger = logging.getLogger(__name__)

CANCEL_S = 30.0
"""How long a cancelled task may take to clean up before it is left running."""


class Supervisor:
    """Owns named tasks; the first one that raises fails everything waited for through `guard`.

    spawn -> running -> ended, or cancelled by `cancel` (forgotten)
                     -> failed, or cancelled by somebody else (kept, raised from `guard`)

    Must be created inside the running event loop that runs the tasks.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelling: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __len__(self) -> int:
        """Number of tasks that have not ended."""
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Start `coroutine` as a supervised task."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        # By a callback: the error is seen when the task ends, whether or not anybody awaits the task.
        task.add_done_callback(self._on_done)
        return task

    def fail(self, error: BaseException) -> None:
        """Fail everything that is waited for through `guard`, as a supervised task does when it raises."""
        if not self._failure.done():
            self._failure.set_exception(error)
            # A failure after the last `guard` is still logged by asyncio when the future is collected.

    async def guard(self, awaitable: Awaitable[T]) -> T:
        """Await `awaitable`, unless a supervised task fails first; then cancel it and raise that failure."""
        waiting = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait({waiting, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            return await waiting
        # A cancelled caller comes here too: `asyncio.wait` leaves what it waits for running.
        finally:
            waiting.cancel()

    async def cancel(self, timeout_s: float = CANCEL_S) -> list[str]:
        """Cancel every task, wait until all have ended, and return the names of those that have not in `timeout_s`.

        A task may not end when it is cancelled: a tool's clean-up may wait for a dead server. Such a task must not hide
        the error that ends the run.
        """
        tasks = list(self._tasks)
        # Each once: a further cancellation would break off the clean-up that the first one has begun.
        begin = self._tasks - self._cancelling
        # Noted before they are cancelled, so that their end is not taken for somebody else's doing.
        self._cancelling |= begin
        for task in begin:
            task.cancel()
        if not tasks:
            return []
        _, left = await asyncio.wait(tasks, timeout=timeout_s)
        names = sorted(task.get_name() for task in left)
        if names:
            logger.error(
                "tasks left running, because they had not ended %g s after their cancellation: %s", timeout_s, names
            )
        return names

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = self._error_of(task)
        self._cancelling.discard(task)
        if error is not None:
            self.fail(error)

    def _error_of(self, task: asyncio.Task[Any]) -> BaseException | None:
        if not task.cancelled():
            return task.exception()
        if task in self._cancelling:
            return None
        return ActorLost(f"task {task.get_name()!r} was cancelled, though nobody had asked for its end")
