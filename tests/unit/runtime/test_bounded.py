"""A blocking call gets a deadline, a name and a look at the other end."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from partial_rollout.errors import EngineDead, WaitTimeout
from partial_rollout.runtime import bounded
from partial_rollout.runtime.bounded import Wait, call_bounded, in_own_thread
from tests.unit.core.queue.queues import ManualClock

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


def test_a_wait_is_named_after_a_tenth_of_its_limit_and_each_time_that_it_has_lasted_twice_as_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, told = ManualClock(), []
    wait = Wait("trainer waits for replicas to resume", 600.0, clock=clock)
    while not wait.is_over:
        clock.now_s += wait.step_s()
        wait.look("replica 1")
        told.append(clock.now_s)
    assert told == [60.0, 120.0, 240.0, 480.0, 600.0]
    assert [record.message for record in caplog.records] == [
        f"trainer waits for replicas to resume: no answer from replica 1 for {seconds} s; after 600 s this wait ends "
        "with an error"
        for seconds in (60, 120, 240, 480)
    ]


def test_a_wait_past_its_limit_has_no_time_left_and_one_that_was_put_off_has_the_rest() -> None:
    """A negative time-out lets Ray wait for ever."""
    clock = ManualClock()
    waiting = Wait("a waits for b", 10.0, clock=clock)
    clock.now_s = 10.5
    assert (waiting.is_over, waiting.step_s()) == (True, 0.0)
    waiting.put_off(1.0)
    waiting.look()
    assert (waiting.is_over, waiting.step_s(), waiting.step_s(longest_s=0.25)) == (False, 0.5, 0.25)


def test_what_a_sound_wait_takes_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    wait = Wait("trainer waits for validation", 7200.0, sound_s=1800.0, clock=clock)
    clock.now_s = 2339.0
    wait.look()
    assert caplog.records == []
    assert wait.step_s() == pytest.approx(1.0)
    clock.now_s = 5000.0  # a look that comes late warns once
    wait.look()
    wait.look()
    assert len(caplog.records) == 1
    assert wait.step_s(5.0) == 5.0


def test_a_blocking_call_that_takes_long_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, clock = threading.Event(), ManualClock()
    monkeypatch.setattr(bounded, "Wait", partial(Wait, clock=clock))

    def check() -> None:
        clock.now_s += 30.0
        if clock.now_s > 70.0:
            gate.set()

    call_bounded(gate.wait, timeout_s=600, who_waits="trainer waits for weights", check=check, check_interval_s=0.01)
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "trainer waits for weights: no answer for 60 s"
    ]
