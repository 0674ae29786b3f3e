"""An event loop whose clock jumps to the next timer, so that a test of an hour's wait takes no time."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits and no timer is set")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and advances only while nothing can run."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end; raises RuntimeError where real time would hang for ever."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


async def settle() -> None:
    """Let every task run until it waits for something else than us."""
    for _ in range(20):
        await asyncio.sleep(0)


async def woken(task: asyncio.Task[T]) -> T:
    """The result of a task that must end because of an event, not because time passes."""
    await settle()
    if not task.done():
        raise AssertionError("the task was not woken")
    return task.result()
