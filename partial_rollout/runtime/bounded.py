"""A deadline for a blocking call that has none of its own."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, TypeVar

from partial_rollout.errors import WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def call_bounded(call: Callable[[], T], *, timeout_s: float, who_waits: str) -> T:
    """Return `call()`, or raise after `timeout_s`; the call then goes on in a daemon thread that nobody waits for.

    For ends of a run only: verl's weight channel waits for ever when its receiver dies.

    Raises:
        WaitTimeout: `call` did not return in time; `who_waits` says who waited for whom.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed over to the waiting thread, whatever it is
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name=who_waits).start()
    try:
        return result.result(timeout=timeout_s)
    except FutureTimeoutError:
        if result.done():
            raise
        raise WaitTimeout(f"{who_waits}: no answer within {timeout_s:g} s") from None
