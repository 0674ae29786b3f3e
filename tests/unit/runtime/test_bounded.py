"""A blocking call gets a deadline, a name and a look at the other end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from partial_rollout.errors import EngineDead, WaitTimeout
from partial_rollout.runtime.bounded import call_bounded, in_own_thread

WAIT_S = 20.0


def test_the_result_and_the_error_of_the_call_come_back() -> None:
    assert call_bounded(lambda: 42, timeout_s=60, who_waits="test") == 42
    with pytest.raises(ZeroDivisionError):
        call_bounded(lambda: 1 // 0, timeout_s=60, who_waits="test")


def test_a_late_call_is_named() -> None:
    gate = threading.Event()
    with pytest.raises(WaitTimeout, match="trainer waits for weights: no answer within 0.01 s"):
        call_bounded(gate.wait, timeout_s=0.01, who_waits="trainer waits for weights")
    gate.set()


def test_a_dead_peer_ends_the_wait_before_its_deadline() -> None:
    gate = threading.Event()

    def check() -> None:
        raise EngineDead("replica 0: the engine died")

    with pytest.raises(EngineDead):
        call_bounded(gate.wait, timeout_s=3600, who_waits="test", check=check, check_interval_s=0.01)
    gate.set()


def test_the_calls_own_timeout_is_not_taken_for_ours() -> None:
    def late() -> None:
        raise WaitTimeout("replica 1: drain")

    with pytest.raises(WaitTimeout, match="replica 1: drain"):
        call_bounded(late, timeout_s=60, who_waits="test")


async def test_a_call_in_its_own_thread_leaves_the_event_loop_free():
    """The thread's answer, its error, and one that nobody waits for any more."""
    gate = threading.Event()
    waiting = in_own_thread(lambda: gate.wait(WAIT_S), "gate")
    assert await asyncio.wait_for(in_own_thread(lambda: 42, "answer"), WAIT_S) == 42
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(in_own_thread(lambda: 1 // 0, "error"), WAIT_S)
    dropped = in_own_thread(lambda: gate.wait(WAIT_S), "dropped")
    dropped.cancel()
    assert not waiting.done()
    gate.set()
    assert await asyncio.wait_for(waiting, WAIT_S)


def test_a_call_that_never_returns_does_not_keep_the_event_loop_from_ending():
    gate = threading.Event()

    async def late() -> None:
        in_own_thread(lambda: gate.wait(WAIT_S), "never")

    asyncio.run(late())
    assert not gate.is_set()
    gate.set()
