from __future__ import annotations

import asyncio

import pytest

from partial_rollout.core.gate import GateState
from partial_rollout.errors import DrainTimeout, IllegalTransition
from partial_rollout.rollout.admission import Admission
from tests.unit.core.queue.queues import ManualClock


async def no_pause() -> None:
    """An engine that has nothing to interrupt."""


async def let_run() -> None:
    """Run every task that can run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def entered(admission: Admission, request_id: str):
    ticket = await admission.enter(request_id)
    assert ticket is not None
    admission.arrived(ticket)
    return ticket


async def test_open_and_closed_again_before_the_waiter_runs_lets_nobody_through():
    admission = Admission()
    await admission.close_and_drain(no_pause, 1.0)
    waiter = asyncio.create_task(admission.enter("a"))
    await let_run()
    admission.open()
    # `close_and_drain` shuts the gate before its first await: the waiter has been woken, but has not run.
    await admission.close_and_drain(no_pause, 1.0)
    await let_run()
    assert not waiter.done()
    assert admission.statistics().parked == 1
    admission.open()
    assert await waiter is not None


async def test_drain_waits_for_admissions_on_their_way_before_it_pauses():
    admission, order = Admission(), []
    ticket = await admission.enter("a")

    async def pause() -> None:
        order.append("pause")

    drain = asyncio.create_task(admission.close_and_drain(pause, 5.0))
    await let_run()
    assert order == []
    admission.arrived(ticket)
    await let_run()
    assert order == ["pause"]
    assert not drain.done()
    admission.leave(ticket)
    assert await drain == ["a"]
    assert admission.statistics().state is GateState.CLOSED


@pytest.mark.parametrize("others", [[], ["b"]], ids=["alone", "beside another one"])
async def test_an_admission_that_fails_on_its_way_does_not_hold_up_the_drain(others: list[str]):
    admission = Admission()
    ticket = await admission.enter("a")
    inside = [await entered(admission, request_id) for request_id in others]

    async def pause() -> None:
        for each in inside:
            admission.leave(each)

    drain = asyncio.create_task(admission.close_and_drain(pause, 5.0))
    await let_run()
    admission.leave(ticket)
    await let_run()
    assert drain.done()
    assert await drain == ["a", *others]


async def test_a_gate_that_nobody_has_passed_is_shut_and_opened_without_a_drain():
    admission = Admission()
    admission.shut_empty()
    waiter = asyncio.create_task(admission.enter("a"))
    await let_run()
    assert not waiter.done()
    admission.open()
    assert await waiter is not None


async def test_a_drain_that_runs_out_names_the_requests_and_keeps_the_gate_shut():
    admission = Admission()
    stuck = await entered(admission, "stuck-one")
    with pytest.raises(DrainTimeout, match=r"1 request\(s\) still in the engine after 0\.01 s.*stuck-one"):
        await admission.close_and_drain(no_pause, 0.01)
    assert admission.statistics().state is GateState.DRAINING
    with pytest.raises(IllegalTransition):
        admission.open()
    admission.leave(stuck)
    await admission.close_and_drain(no_pause, 1.0)
    admission.open()


async def test_a_drain_that_runs_out_names_only_some_of_many():
    admission = Admission()
    for i in range(50):
        await entered(admission, f"r{i}")
    with pytest.raises(DrainTimeout) as error:
        await admission.close_and_drain(no_pause, 0.01)
    assert "50 request(s)" in str(error.value)
    assert len(str(error.value)) < 400


async def test_a_cancelled_waiter_leaves_no_trace():
    admission = Admission()
    await admission.close_and_drain(no_pause, 1.0)
    waiter = asyncio.create_task(admission.enter("a"))
    await let_run()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert admission.statistics().parked == 0


async def test_reject_turns_away_those_who_wait_and_those_who_come():
    admission = Admission()
    await admission.close_and_drain(no_pause, 1.0)
    waiter = asyncio.create_task(admission.enter("a"))
    await let_run()
    assert admission.reject() == 1
    assert await waiter is None
    assert await admission.enter("b") is None
    assert admission.statistics().parked == 0


async def test_before_the_first_request_no_slot_is_idle():
    """Weights come and training begins while the gate of a new server is open."""
    clock = ManualClock()
    admission = Admission(clock)
    clock.now_s = 100.0
    await entered(admission, "a")
    clock.now_s = 104.0
    assert admission.mean_running() == 1.0
    await entered(admission, "b")
    clock.now_s = 108.0
    assert admission.mean_running() == 1.5


async def test_mean_running_counts_from_the_opening_to_the_closing():
    clock = ManualClock()
    admission = Admission(clock)
    first = await entered(admission, "a")
    clock.now_s = 4.0
    second = await entered(admission, "b")
    clock.now_s = 8.0
    assert admission.mean_running() == pytest.approx((1 * 4 + 2 * 4) / 8)
    admission.leave(first)
    admission.leave(second)
    await admission.close_and_drain(no_pause, 1.0)
    clock.now_s = 100.0
    assert admission.mean_running() == pytest.approx(1.5)
    admission.open()
    clock.now_s = 110.0
    assert admission.mean_running() == 0.0
