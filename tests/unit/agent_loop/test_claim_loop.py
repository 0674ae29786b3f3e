"""The claim loop answers for every prompt exactly once, in the right order, and never ends unseen."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from contextlib import asynccontextmanager

import pytest

from partial_rollout.errors import (
    ConfigError,
    DataError,
    DrainTimeout,
    EngineDead,
    EngineError,
    InternalError,
    RunEnded,
    TooStale,
    WaitTimeout,
)
from tests.fake_worker import WORKER, FakeWorker, make_claim
from tests.unit.runtime.virtual_time import settle, woken


def raising(error):
    def call():
        raise error

    return call


@asynccontextmanager
async def running(worker: FakeWorker, *claims):
    """`run` with these claims waiting; what it starts has started, and nothing is left behind."""
    for claim in claims:
        worker.claims.put_nowait(claim)
    task = asyncio.create_task(worker.loop.run(num_per_prompt=2))
    await settle()
    yield task
    if not task.done():
        await worker.loop.stop()
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_group_is_finished_with_all_its_trajectories_and_forgotten_after_that():
    worker = FakeWorker()
    worker.on_finish = lambda: worker.calls.append(f"forgotten: {worker.forgotten}")
    async with running(worker, make_claim()):
        worker.gates.open("a_1")
        await settle()
        assert worker.calls == []
        worker.gates.open("a_0")
        await settle()
        assert worker.calls == ["forgotten: []", "finish a: a_0_0 a_1_0"]
        assert worker.forgotten == ["a"]


async def test_the_rows_of_a_group_that_the_manager_finds_without_spread_are_forgotten():
    worker = FakeWorker()
    worker.flat = {"a"}
    async with running(worker, make_claim()):
        worker.gates.open("a_0", "a_1")
        await settle()
        assert worker.calls == ["finish a: a_0_0 a_1_0", "clear a a_0_0 a_1_0"]
        assert worker.noted == [("a", "no_spread", None)]
        assert worker.forgotten == ["a"]


async def test_rows_of_other_groups_of_the_same_report_stay():
    worker = FakeWorker()
    worker.flat = {"a"}
    async with running(worker, make_claim("a"), make_claim("b")):
        worker.gates.open("a_0", "a_1", "b_0", "b_1")
        await settle()
        assert worker.calls == ["finish a: a_0_0 a_1_0", "finish b: b_0_0 b_1_0", "clear a a_0_0 a_1_0"]
        assert worker.noted == [("a", "no_spread", None)]


async def test_each_trajectory_frees_its_own_slot():
    worker = FakeWorker(num_slots=4)
    async with running(worker, make_claim("a"), make_claim("b")):
        assert (worker.loop.slots.free, worker.running, worker.free_slots) == (0, 4, [4, 2])
        worker.gates.open("a_0")
        await settle()
        assert (worker.loop.slots.free, worker.last_status.inflight_trajectories) == (1, 3)
        # A third prompt needs two slots, and they may come free in different groups.
        assert worker.free_slots == [4, 2]
        worker.gates.open("b_1")
        await settle()
        assert worker.free_slots == [4, 2, 2]
        assert worker.last_status.requests_in_flight == 2
        assert worker.calls == []


@pytest.mark.parametrize("error", [ValueError("bad tool"), EngineError("the engine ended a request with 'error'")])
async def test_a_failed_attempt_forgets_its_siblings_rows_before_another_worker_may_write_them(error):
    worker = FakeWorker()
    async with running(worker, make_claim()) as task:
        worker.gates.open("a_0")
        worker.gates.fail("a_1", error)
        await settle()
        assert worker.calls == ["clear a_0_0", f"fail a: {type(error).__name__}: {error}"]
        assert (worker.given_up, worker.forgotten) == (["a"], [])
        assert worker.loop.slots.in_use == 0
        assert not task.done()


async def test_the_last_failed_attempt_forgets_the_prompt_as_well():
    worker = FakeWorker(max_attempts=2)
    async with running(worker, make_claim(attempt=2)):
        worker.gates.fail("a_0", ValueError("bad tool"))
        worker.gates.open("a_1")
        await settle()
    assert worker.calls[:3] == ["clear a_1_0", "fail a: ValueError: bad tool", "clear a"]
    assert worker.noted == [("a", "agent_loop_failed", None)]


async def test_a_group_is_not_reported_before_its_last_trajectory_has_ended():
    worker = FakeWorker()
    async with running(worker, make_claim()):
        worker.gates.fail("a_0", ValueError("bad tool"))
        await settle()
        assert worker.calls == []
        worker.gates.open("a_1")
        await settle()
        assert worker.calls == ["clear a_1_0", "fail a: ValueError: bad tool"]


async def test_an_unusable_prompt_is_dropped_with_its_reason_and_frees_all_slots(caplog):
    worker = FakeWorker()
    worker.on_prepare = raising(DataError("700 tokens", reason="prompt_too_long"))
    caplog.set_level("WARNING", logger="partial_rollout")
    async with running(worker, dataclasses.replace(make_claim(), source_index="41")):
        assert "prompt a (extra_info.index=41) is dropped: 700 tokens" in caplog.text
        assert worker.calls == ["drop a: prompt_too_long", "clear a"]
        assert worker.noted == [("a", "prompt_too_long", None)]
        assert (worker.loop.slots.in_use, worker.running) == (0, 0)


async def test_a_prompt_that_cannot_be_prepared_is_one_failed_attempt():
    worker = FakeWorker()
    worker.on_prepare = raising(ValueError("the chat template has no role 'tool'"))
    async with running(worker, make_claim()) as task:
        assert worker.calls == ["fail a: ValueError: the chat template has no role 'tool'"]
        assert (worker.loop.slots.in_use, worker.running) == (0, 0)
        assert not task.done()


@pytest.mark.parametrize(("attempt", "last"), [(1, []), (2, ["clear a"])], ids=["restarted", "dropped"])
async def test_a_group_with_tokens_that_are_too_old_expires_and_its_rows_are_gone_before(attempt, last):
    worker = FakeWorker(max_attempts=2)
    async with running(worker, make_claim(attempt=attempt)) as task:
        worker.gates.open("a_0")
        worker.gates.fail("a_1", TooStale("version 3"))
        await settle()
        assert worker.calls == ["clear a_0_0", "expire a", *last]
        assert (worker.loop.slots.in_use, worker.given_up, worker.forgotten) == (0, ["a"], [])
        assert not task.done()


@pytest.mark.parametrize("other", [None, ValueError("bad tool")])
async def test_data_that_an_agent_loop_cannot_use_is_dropped_and_not_tried_again(other):
    worker = FakeWorker()
    async with running(worker, make_claim(num_trajectories=3)):
        worker.gates.open("a_0")
        worker.gates.fail("a_2", DataError("no trajectory", reason="empty_trajectory"))
        worker.gates.fail("a_1", other) if other else worker.gates.open("a_1")
        await settle()
        written = "a_0_0" if other else "a_0_0 a_1_0"
        assert worker.calls == [f"clear {written}", "drop a: empty_trajectory", "clear a"]


async def test_the_end_of_the_run_gives_the_prompt_back_without_a_trace():
    worker = FakeWorker()
    async with running(worker, make_claim()) as task:
        worker.gates.open("a_0")
        worker.gates.fail("a_1", RunEnded("over"))
        await settle()
        assert worker.calls == ["clear a_0_0", "give back a"]
        assert not task.done()


async def test_at_the_end_of_the_run_no_other_error_is_charged_to_the_prompt():
    worker = FakeWorker()
    async with running(worker, make_claim()):
        worker.gates.fail("a_0", ValueError("its tool has ended too"))
        worker.gates.fail("a_1", RunEnded("over"))
        await settle()
        assert (worker.calls, worker.forgotten, worker.given_up) == (["give back a"], ["a"], [])


@pytest.mark.parametrize(
    "error",
    [
        EngineDead("gone"),
        DrainTimeout("a"),
        WaitTimeout("queue"),
        InternalError("bug"),
        ConfigError("presence_penalty"),
    ],
)
async def test_an_error_that_every_prompt_would_meet_ends_the_run(error):
    worker = FakeWorker()
    async with running(worker, make_claim("a"), make_claim("b")) as task:
        worker.gates.open("a_0")
        worker.gates.fail("a_1", error)
        with pytest.raises(type(error), match=str(error)):
            await woken(task)
        assert (worker.calls, worker.running) == ([], 0)


async def test_such_an_error_does_not_wait_for_its_siblings():
    worker = FakeWorker()
    async with running(worker, make_claim("a"), make_claim("b")) as task:
        worker.gates.fail("a_0", EngineDead("gone"))
        with pytest.raises(EngineDead, match="gone"):
            await woken(task)
        assert (worker.calls, worker.running) == ([], 0)


async def test_such_an_error_does_not_wait_until_a_sibling_that_is_held_back_goes_on():
    worker, claim, sessions = FakeWorker(), make_claim(), itertools.count()

    async def hold_the_second(claim_id: int) -> None:
        if next(sessions):
            await worker.loop.holds.pass_by(claim_id)

    worker.before_trajectory = hold_the_second
    worker.loop.hold([claim])
    async with running(worker, claim) as task:
        assert worker.loop.holds.num_waiting == 1
        worker.gates.fail("a_0", InternalError("bug"))
        with pytest.raises(InternalError, match="bug"):
            await woken(task)


async def test_a_reporter_that_cannot_report_ends_the_run():
    worker = FakeWorker()
    worker.on_finish = raising(ConnectionError("manager lost"))
    async with running(worker, make_claim()) as task:
        worker.gates.open("a_0", "a_1")
        with pytest.raises(ConnectionError, match="manager lost"):
            await woken(task)


async def test_stop_gives_everything_back_and_leaves_no_task():
    worker = FakeWorker()
    async with running(worker, make_claim("a"), make_claim("b")) as task:
        assert await worker.loop.stop() == ["a"]
        assert worker.calls == [f"release {WORKER}"]
        await woken(task)
        assert (worker.running, worker.loop.slots.in_use) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_stop_releases_the_worker_when_the_last_trajectory_has_ended():
    """From then on another worker may write the same rows."""
    worker = FakeWorker()

    async def ends_slowly(claim_id: int) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await settle()
            worker.calls.append("ended")

    worker.before_trajectory = ends_slowly
    async with running(worker, make_claim()):
        await worker.loop.stop()
        assert worker.calls == ["ended", "ended", f"release {WORKER}"]


async def test_stop_before_run_releases_too():
    worker = FakeWorker()
    assert await worker.loop.stop() == ["a"]


async def test_a_claim_call_cancelled_by_somebody_else_is_not_a_stop():
    worker = FakeWorker()

    async def claim(*_, **__):
        raise asyncio.CancelledError

    worker.claim = claim
    task = asyncio.create_task(worker.loop.run(num_per_prompt=2))
    await settle()
    assert task.cancelled()


async def test_a_deferred_group_waits_without_slots_and_goes_on_when_it_is_handed_out_again():
    worker = FakeWorker(num_slots=2)
    claim, other = make_claim("a"), make_claim("b")
    worker.before_trajectory = worker.loop.holds.pass_by
    worker.loop.hold([claim, dataclasses.replace(other, worker_id="somebody else")])
    async with running(worker, claim):
        assert (worker.running, worker.loop.slots.free, worker.last_status.held_trajectories) == (2, 2, 2)
        assert worker.last_status.requests_in_flight == 0
        worker.claims.put_nowait(claim)
        await settle()
        assert (worker.loop.slots.free, worker.last_status.held_trajectories) == (0, 0)
        worker.gates.open("a_0", "a_1")
        await settle()
        assert worker.calls == ["finish a: a_0_0 a_1_0"]
        assert worker.forgotten == ["a"]
        worker.claims.put_nowait(other)
        await settle()
        assert worker.last_status.held_trajectories == 0


async def test_a_stopped_worker_leaves_no_held_trajectory():
    worker = FakeWorker(num_slots=2)
    claim = make_claim("a")
    worker.before_trajectory = worker.loop.holds.pass_by
    worker.loop.hold([claim])
    async with running(worker, claim):
        assert worker.last_status.held_trajectories == 2
    assert (worker.loop.slots.in_use, worker.loop.holds.num_waiting) == (0, 0)
