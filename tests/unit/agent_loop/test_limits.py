"""A trajectory whose tool or reward does not answer ends at its deadline, whether its agent loop ends or not."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.agent_loop.limits import CANCEL_S, PhaseLimits
from partial_rollout.agent_loop.trajectory import Trajectory
from partial_rollout.errors import CallOverdue
from partial_rollout.observability.events import DeadlinePassed
from tests.fake_worker import make_claim
from tests.unit.runtime.virtual_time import run_virtual, settle

if TYPE_CHECKING:
    from collections.abc import Coroutine

TOOL_S, REWARD_S = 600.0, 60.0
LIMITS = {"agent": TOOL_S, "tool": TOOL_S, "reward": REWARD_S}


def started(limits: PhaseLimits, agent_loop: Coroutine[Any, Any, Any]) -> tuple[Trajectory, asyncio.Task[Any]]:
    trajectory = Trajectory(make_claim("a"), 3)
    trajectory.row = "17"
    return trajectory, asyncio.create_task(limits.run(trajectory, agent_loop))


async def hung() -> None:
    await asyncio.Event().wait()


def test_a_tool_that_never_returns_ends_its_trajectory_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        limits = PhaseLimits(LIMITS)
        trajectory, task = started(limits, hung())
        await settle()
        limits.enter(trajectory, "tool")
        with pytest.raises(CallOverdue, match=r"trajectory 3 of prompt a, .* 600 s for a tool .*tool_s=600"):
            await task
        assert asyncio.get_running_loop().time() == TOOL_S
        limits.enter(trajectory, "reward")  # what has ended has no deadline
        assert len(asyncio.all_tasks()) == 1

    caplog.set_level(logging.INFO)
    run_virtual(main())
    *warnings, last = caplog.records
    assert [record.getMessage().partition(" has waited ")[2][:4] for record in warnings] == [
        "60 s",
        "120 ",
        "240 ",
        "480 ",
    ]
    (event,) = (record.event for record in [last])  # pyright: ignore[reportAttributeAccessIssue]
    assert event == DeadlinePassed(
        uid="a", session=3, phase="tool", response=0, row="17", attempt=1, seconds=600.0, limit_s=600.0
    )


def test_a_trajectory_that_goes_on_has_a_new_deadline_each_time() -> None:
    async def main() -> None:
        limits = PhaseLimits(LIMITS)
        end = asyncio.Event()
        trajectory, task = started(limits, end.wait())  # type: ignore[arg-type]
        await settle()
        for phase in ("agent", "engine", "tool", "engine", "tool", "reward"):
            limits.enter(trajectory, phase)
            await asyncio.sleep(REWARD_S - 1 if phase == "reward" else TOOL_S - 1)
        end.set()
        assert await task is True

    run_virtual(main())


def test_a_trajectory_that_has_ended_is_never_overdue(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        limits = PhaseLimits(LIMITS)
        first, task = started(limits, asyncio.sleep(1.0))
        await settle()
        limits.enter(first, "reward")
        await task
        limits.enter(first, "reward")  # too late
        second, other = started(limits, hung())
        await settle()
        limits.enter(second, "tool")
        with pytest.raises(CallOverdue, match="for a tool"):
            await other
        assert asyncio.get_running_loop().time() == 1.0 + TOOL_S

    caplog.set_level(logging.INFO)
    run_virtual(main())
    assert "for its reward" not in caplog.text


def test_a_deadline_before_the_one_that_was_next_is_kept() -> None:
    async def main() -> None:
        limits = PhaseLimits(LIMITS)
        first, task = started(limits, hung())
        second, other = started(limits, hung())
        await settle()
        limits.enter(first, "tool")
        await asyncio.sleep(130.0)  # its next warning comes after 240 s
        limits.enter(second, "reward")
        with pytest.raises(CallOverdue, match="for its reward"):
            await other
        assert asyncio.get_running_loop().time() == 130.0 + REWARD_S
        task.cancel()
        await asyncio.wait({task})

    run_virtual(main())


def test_waiting_for_an_engine_has_no_deadline_here() -> None:
    async def main() -> None:
        limits = PhaseLimits(LIMITS)
        trajectory, task = started(limits, hung())
        await settle()
        limits.enter(trajectory, "engine")
        await asyncio.sleep(100 * TOOL_S)
        assert not task.done()
        task.cancel()
        await asyncio.wait({task})

    run_virtual(main())


def test_an_agent_loop_that_swallows_its_cancellation_does_not_keep_its_slot(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def stubborn() -> None:
            for _ in range(2):
                try:
                    await asyncio.sleep(10 * TOOL_S)
                except asyncio.CancelledError:
                    logging.getLogger(__name__).info("swallowed")

        limits = PhaseLimits(LIMITS)
        trajectory, task = started(limits, stubborn())
        await settle()
        limits.enter(trajectory, "reward")
        with pytest.raises(CallOverdue, match=r"for its reward, longer than .*timeouts\.reward_s=60"):
            await task
        assert asyncio.get_running_loop().time() == REWARD_S + CANCEL_S

    caplog.set_level(logging.INFO)
    run_virtual(main())
    assert "agent loop of a_3 does not end, although it was cancelled" in caplog.text


def test_whoever_cancels_the_trajectory_cancels_its_agent_loop() -> None:
    async def main() -> None:
        limits = PhaseLimits(LIMITS)
        _, task = started(limits, hung())
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def test_what_an_agent_loop_raises_is_raised_on() -> None:
    async def main() -> None:
        async def broken() -> None:
            raise ValueError("no such tool")

        _, task = started(PhaseLimits(LIMITS), broken())
        with pytest.raises(ValueError, match="no such tool"):
            await task

    run_virtual(main())


def test_time_in_which_the_event_loop_was_blocked_does_not_count() -> None:
    async def main() -> None:
        limits = PhaseLimits(LIMITS)
        trajectory, task = started(limits, hung())
        await settle()
        limits.enter(trajectory, "reward")
        loop: Any = asyncio.get_running_loop()
        loop._jumping.now_s += 10 * REWARD_S  # as a synchronous tool of another trajectory does
        await asyncio.sleep(REWARD_S / 2)
        assert not task.done()
        with pytest.raises(CallOverdue):
            await task
        assert loop.time() <= 11 * REWARD_S

    run_virtual(main())
