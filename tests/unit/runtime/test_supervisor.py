"""A supervised task that fails is seen by whoever waits through the supervisor."""

import asyncio

import pytest

from partial_rollout.errors import ActorLost
from partial_rollout.runtime.supervisor import Supervisor


async def _fail_after(gate: asyncio.Event) -> None:
    await gate.wait()
    raise ValueError("boom")


async def test_guard_raises_the_failure_of_a_task_while_it_waits() -> None:
    supervisor, gate, never = Supervisor(), asyncio.Event(), asyncio.Event()
    supervisor.spawn(_fail_after(gate), name="failing")
    waiting = asyncio.create_task(supervisor.guard(never.wait()))
    gate.set()
    with pytest.raises(ValueError, match="boom"):
        await waiting


async def test_guard_raises_what_a_task_that_goes_on_has_reported_and_the_first_report_counts() -> None:
    supervisor = Supervisor()
    supervisor.spawn(asyncio.Event().wait(), name="goes on")
    supervisor.fail(ValueError("boom"))
    supervisor.fail(ValueError("a consequence"))
    with pytest.raises(ValueError, match="boom"):
        await supervisor.guard(asyncio.Event().wait())
    assert len(supervisor) == 1
    await supervisor.cancel()


async def test_guard_cancels_what_it_waited_for_after_a_failure() -> None:
    supervisor, gate, cancelled = Supervisor(), asyncio.Event(), asyncio.Event()

    async def waited() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    supervisor.spawn(_fail_after(gate), name="failing")
    waiting = asyncio.create_task(supervisor.guard(waited()))
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(ValueError, match="boom"):
        await waiting
    await asyncio.wait_for(cancelled.wait(), 5)


async def test_guard_returns_the_result_when_nothing_fails() -> None:
    supervisor = Supervisor()

    async def answer() -> int:
        return 42

    assert await supervisor.guard(answer()) == 42


async def test_cancel_ends_every_task_and_counts_none() -> None:
    supervisor = Supervisor()
    for index in range(3):
        supervisor.spawn(asyncio.Event().wait(), name=f"waiting-{index}")
    assert len(supervisor) == 3
    await supervisor.cancel()
    assert len(supervisor) == 0


async def test_a_task_cancelled_by_somebody_else_is_a_failure() -> None:
    supervisor = Supervisor()
    task = supervisor.spawn(asyncio.Event().wait(), name="reporter")
    waiting = asyncio.create_task(supervisor.guard(asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(ActorLost, match="'reporter' was cancelled"):
        await waiting


async def test_tasks_ended_by_the_supervisor_are_no_failure() -> None:
    supervisor = Supervisor()
    supervisor.spawn(asyncio.Event().wait(), name="reporter")
    await supervisor.cancel()
    assert await supervisor.guard(asyncio.sleep(0, "answer")) == "answer"


async def test_the_clean_up_of_a_task_is_not_broken_off_by_who_cancels_it_too() -> None:
    supervisor, begun, release, ended = Supervisor(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def cleaning_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            begun.set()
            await release.wait()
            ended.set()

    supervisor.spawn(cleaning_up(), name="group-7")
    await asyncio.sleep(0)
    first = asyncio.create_task(supervisor.cancel())
    await begun.wait()
    second = asyncio.create_task(supervisor.cancel())
    await asyncio.sleep(0)
    release.set()
    assert (await first, await second) == ([], [])
    assert ended.is_set()


async def test_a_task_that_resists_its_cancellation_is_left_behind_and_named(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, release = Supervisor(), asyncio.Event()

    async def resisting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await release.wait()

    task = supervisor.spawn(resisting(), name="group-7")
    await asyncio.sleep(0)
    assert await asyncio.wait_for(supervisor.cancel(timeout_s=0.01), 5) == ["group-7"]
    assert "group-7" in caplog.text
    release.set()
    await asyncio.wait([task])
    assert len(supervisor) == 0
