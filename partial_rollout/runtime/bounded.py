"""A deadline, and a look at the other end's health, for a blocking call that has neither."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from partial_rollout.errors import WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

CHECK_INTERVAL_S = 5.0
"""A dead peer of such a call sends no event; this is how late its death is noticed."""


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
    """Return `call()`, or raise when it is late or `check` raises; it then goes on in a thread nobody waits for.

    For calls whose failure ends the run: verl's weight channel waits for ever when its receiver dies.

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

    threading.Thread(target=run, daemon=True, name=who_waits).start()
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        if wait([result], timeout=min(check_interval_s, left_s)).done:
            return result.result()
        check()
    raise WaitTimeout(f"{who_waits}: no answer within {timeout_s:g} s")
