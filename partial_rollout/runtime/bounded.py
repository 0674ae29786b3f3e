"""A deadline, and a look at the other end's health, for a blocking call that has neither."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from partial_rollout.errors import WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

CHECK_INTERVAL_S = 5.0
"""How late the death of the other end is noticed, which sends no event."""


class TimeLeft:
    """The time that the steps of one undertaking share, from `begin` on: together they take no longer.

    >>> seconds = iter([100.0, 100.0, 130.0, 160.0])
    >>> left = TimeLeft(60.0, clock=lambda: next(seconds))
    >>> left.begin()
    >>> left.share(0.5), left.share(0.5, keep=0.25), left.share(1.0)
    (30.0, 15.0, 0.0)
    """

    def __init__(self, whole_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.whole_s, self._clock = whole_s, clock
        self._end_s: float | None = None

    def begin(self) -> None:
        """The time begins to run; later calls change nothing."""
        if self._end_s is None:
            self._end_s = self._clock() + self.whole_s

    def share(self, part: float, *, keep: float = 0.0) -> float:
        """Seconds for a step that begins now: `part` of the whole at most, so that `keep` of it is left for others."""
        self.begin()
        left_s = (self._end_s or 0.0) - self._clock() - keep * self.whole_s
        return max(0.0, min(part * self.whole_s, left_s))


def _healthy() -> None:
    """Nothing to check."""


def call_bounded(
    call: Callable[[], T],
    *,
    timeout_s: float,
    who_waits: str,
    check: Callable[[], None] = _healthy,
    check_interval_s: float = CHECK_INTERVAL_S,
) -> T:
    """Return `call()`, or raise when it is late or when `check` raises; a late call goes on in a thread of its own.

    For calls that cannot be cancelled and whose failure ends the run.

    Raises:
        WaitTimeout: `call` did not return in time; `who_waits` says who waited for whom.
        Exception: what `call` or `check` raised.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed over to the waiting thread, whatever it is
            result.set_exception(error)

    # A daemon: a call that never returns must not keep the process from ending.
    threading.Thread(target=run, daemon=True, name=who_waits).start()
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        if wait([result], timeout=min(check_interval_s, left_s)).done:
            return result.result()
        check()
    raise WaitTimeout(f"{who_waits}: no answer within {timeout_s:g} s")


def in_own_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """`call()` in a thread of its own, for the running event loop, which goes on meanwhile; whoever waits sets a limit.

    Not for `asyncio.to_thread`, whose threads a process waits for at its end: a call that never returns must not keep
    the process from ending.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():  # nobody waits any more
            return
        if error is None:
            answer.set_result(result)  # pyright: ignore[reportArgumentType]
        else:
            answer.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - handed over to whoever waits, whatever it is
            failure = error
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and nobody waits
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True, name=name).start()
    return answer
