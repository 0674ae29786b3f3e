"""Deadlines: of one wait, with warnings on the way; of a blocking call that has none; of several steps together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from partial_rollout.core.deadlines import warn_times
from partial_rollout.errors import WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
logger = logging.getLogger(__name__)

UNUSUAL = 2.0
"""A wait for work, such as a batch, is warned of when it lasts so many times as long as the longest one that has ended:
with an 8B model and responses of 4,096 tokens a sound step waits for 70 s, with longer ones for minutes."""
BLOCKED_S = 1.0
"""A timer that is so late says that its event loop or process was blocked: nobody could go on meanwhile."""
CHECK_INTERVAL_S = 5.0
"""How late the death of the other end is noticed, which sends no event."""


class Wait:
    """One wait that has a limit, and is named in a warning when it has lasted for a tenth of it, and for twice as long.

    begin -> waiting for `step_s` seconds, then `look` -> ... -> answered, or `is_over`
    """

    def __init__(
        self, who_waits: str, timeout_s: float, sound_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`who_waits` names both ends; the wait may last `sound_s` without anything being wrong."""
        self.who_waits, self.timeout_s, self._clock = who_waits, timeout_s, clock
        self._since_s, self._warn = clock(), warn_times(timeout_s, sound_s)
        self._warn_s = next(self._warn, math.inf)

    @property
    def waited_s(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._since_s

    @property
    def is_over(self) -> bool:
        """Whether its limit is reached."""
        return self.waited_s >= self.timeout_s

    def step_s(self, longest_s: float = math.inf) -> float:
        """Seconds until there is something to say, or until the limit."""
        return max(0.0, min(min(self._warn_s, self.timeout_s) - self.waited_s, longest_s))

    def put_off(self, seconds: float) -> None:
        """Leave out so many seconds, in which nobody could have seen the answer."""
        self._since_s += seconds

    def look(self, missing: str = "") -> None:
        """Warn, if it is time to; `missing` says whose answer is missing."""
        waited_s = self.waited_s
        if waited_s >= self._warn_s and not self.is_over:
            self._warn_s = next((each for each in self._warn if each > waited_s), math.inf)
            logger.warning(
                "%s: no answer%s for %.0f s; after %g s this wait ends with an error",
                self.who_waits,
                f" from {missing}" if missing else "",
                waited_s,
                self.timeout_s,
            )


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
    sound_s: float = 0.0,
    late: type[WaitTimeout] = WaitTimeout,
) -> T:
    """Return `call()`, or raise when it is late or when `check` raises; a late call goes on in a thread of its own.

    For calls that cannot be cancelled and whose failure ends the run. A warning names a call that takes long; one that
    takes `sound_s` does not.

    Raises:
        WaitTimeout: `call` did not return in time; `who_waits` says who waited for whom. It is of the class `late`.
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
    waiting = Wait(who_waits, timeout_s, sound_s)
    while not waiting.is_over:
        if wait([result], timeout=waiting.step_s(check_interval_s)).done:
            return result.result()
        waiting.look()
        check()
    raise late(f"{who_waits}: no answer within {timeout_s:g} s")


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
