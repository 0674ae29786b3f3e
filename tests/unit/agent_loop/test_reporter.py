"""Finished groups reach the manager once, in order, and coalesce while a call is under way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from partial_rollout.agent_loop.claim_loop import Reporter
from partial_rollout.types import Claim, FinishResult, TrajectorySummary, WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Manager:
    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.acknowledged: list[Claim] = []
        self.open = asyncio.Event()
        self.called = asyncio.Event()
        self.reported = asyncio.Event()

    async def finish_many(self, groups: Sequence[tuple[Claim, Sequence[TrajectorySummary]]]) -> FinishResult:
        self.batches.append([claim.uid for claim, _ in groups])
        self.called.set()
        await self.open.wait()
        return FinishResult()

    async def report_worker(self, worker_id: str, status: WorkerStatus) -> None:
        self.reported.set()


async def discard(groups: Sequence[object]) -> None:
    raise AssertionError(f"{groups} were not dropped")


def _claim(uid: str) -> Claim:
    return Claim(uid=uid, claim_id=1, worker_id="w", num_trajectories=1, global_step=1, attempt=1)


async def test_groups_that_finish_during_a_call_go_with_the_next_one() -> None:
    manager = _Manager()
    reporter = Reporter(manager, "w", lambda: WorkerStatus(0, 1), manager.acknowledged.append, discard)
    running = asyncio.create_task(reporter.run())
    reporter.finish(_claim("a"), [])
    await asyncio.wait_for(manager.called.wait(), 5)
    for uid in "bcd":
        reporter.finish(_claim(uid), [])
    assert manager.acknowledged == []  # a checkpoint still needs its tokens
    manager.called.clear()
    manager.open.set()
    await asyncio.wait_for(manager.called.wait(), 5)
    assert manager.batches == [["a"], ["b", "c", "d"]]
    assert manager.acknowledged[0].uid == "a"
    running.cancel()


async def test_a_change_alone_is_reported() -> None:
    manager = _Manager()
    reporter = Reporter(manager, "w", lambda: WorkerStatus(0, 1), manager.acknowledged.append, discard)
    running = asyncio.create_task(reporter.run())
    reporter.changed()
    await asyncio.wait_for(manager.reported.wait(), 5)
    assert manager.batches == []
    running.cancel()
