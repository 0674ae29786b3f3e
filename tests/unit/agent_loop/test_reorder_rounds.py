"""Reorder rollout through the real manager and the real claim loops; the engine makes a token when it is told to."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from partial_rollout.agent_loop.claim_loop import ClaimLoop
from partial_rollout.core.queue.tail import Reorder
from partial_rollout.runtime.prompt_manager import RolloutPromptManager
from partial_rollout.types import PromptMeta, TrajectorySummary
from tests.unit.runtime.virtual_time import settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.types import Claim

BATCH, GEN_BATCH, GROUP = 2, 3, 2
LONG = 5
"""Tokens of a long response; all others have one."""


class Worker:
    """A claim loop and the engine behind it: requests run until they are complete or the engine is drained."""

    def __init__(self, name: str, manager: RolloutPromptManager) -> None:
        self.loop = ClaimLoop(name, manager, self, worker=self, num_slots=GEN_BATCH * GROUP)
        self.tokens: Counter[str] = Counter()
        self.running: dict[str, asyncio.Future[None]] = {}

    def tick(self) -> None:
        """One token for every running request."""
        for key, request in list(self.running.items()):
            self.tokens[key] += 1
            if self.tokens[key] == self._length(key):
                request.set_result(None)

    def drain(self) -> None:
        for request in self.running.values():
            if not request.done():
                request.set_result(None)

    @staticmethod
    def _length(key: str) -> int:
        return LONG if key.startswith("long") else 1

    @property
    def requests_in_flight(self) -> int:
        return len(self.running)

    def prepare(self, claim: Claim, row: dict[str, Any]) -> dict[str, Any]:
        return row

    def forget(self, claim: Claim) -> None:
        """Nothing is kept."""

    async def read_prompt(self, uid: str) -> dict[str, Any]:
        return {}

    async def clear(self, keys: Sequence[str]) -> None:
        """Nothing is stored."""

    async def generate(self, claim: Claim, row: dict[str, Any], session: int) -> list[TrajectorySummary]:
        key = f"{claim.uid}_{session}"
        while self.tokens[key] < self._length(key):
            await self.loop.holds.pass_by(claim.claim_id)
            self.running[key] = asyncio.get_running_loop().create_future()
            await self.running[key]
            del self.running[key]
        return [TrajectorySummary(f"{key}_0", 1, self.tokens[key], 0, 0)]


class Run:
    """The trainer's side of a round."""

    def __init__(self) -> None:
        self.manager = RolloutPromptManager(Reorder(BATCH, GEN_BATCH, max_deferrals=9), max_attempts=2)
        self.workers = [Worker(f"w{index}", self.manager) for index in range(2)]

    async def begin(self, *uids: str) -> str:
        plan = await self.manager.begin_round()
        assert plan.num_fresh == len(uids)
        await self.manager.admit([PromptMeta(uid, GROUP, 0) for uid in uids])
        await settle()
        return plan.kind

    async def tick(self) -> None:
        for worker in self.workers:
            worker.tick()
        await settle()

    async def take(self) -> list[str]:
        result = await self.manager.take_batch(BATCH, 0)
        for worker in self.workers:
            worker.loop.hold(result.deferred)
            worker.drain()
        await settle()
        return sorted(group.uid for group in result.groups)

    def tokens(self) -> dict[str, int]:
        return {key: count for worker in self.workers for key, count in worker.tokens.items() if key.startswith("long")}


@asynccontextmanager
async def running():
    run = Run()
    tasks = [asyncio.create_task(worker.loop.run(num_per_prompt=GROUP)) for worker in run.workers]
    await settle()
    try:
        yield run
    finally:
        for worker in run.workers:
            await worker.loop.stop()
        await asyncio.gather(*tasks)
    assert [worker.loop.slots.in_use for worker in run.workers] == [0, 0]


async def test_deferred_groups_stand_still_and_go_on_from_their_tokens_together():
    async with running() as run:
        assert await run.begin("long0", "a", "b") == "short"
        await run.tick()
        assert await run.take() == ["a", "b"]
        assert run.tokens() == {"long0_0": 1, "long0_1": 1}
        assert await run.begin("c", "long1", "d") == "short"
        await run.tick()
        assert await run.take() == ["c", "d"]
        # The second round gave the first round's group no token.
        assert run.tokens() == dict.fromkeys(("long0_0", "long0_1", "long1_0", "long1_1"), 1)
        assert sum(worker.loop.slots.in_use for worker in run.workers) == 0
        assert await run.begin() == "long"
        for _ in range(LONG - 1):
            assert sum(worker.loop.slots.in_use for worker in run.workers) == 2 * GROUP
            await run.tick()
        assert await run.take() == ["long0", "long1"]
        assert set(run.tokens().values()) == {LONG}
        statistics = await run.manager.statistics()
        assert (statistics.conserved, statistics.taken, statistics.in_flight) == (True, 6, 0)
