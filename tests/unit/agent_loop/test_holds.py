"""Trajectories of deferred prompts wait without a slot, and exactly those go on that were told to."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from partial_rollout.agent_loop.slots import Holds, SlotBudget
from tests.unit.runtime.virtual_time import settle


class World:
    """Trajectories that ask for leave once and then note that they have passed."""

    def __init__(self, *claim_ids: int) -> None:
        self.slots = SlotBudget(8)
        self.changes = 0
        self.holds = Holds(self.slots, self.changed)
        self.passed: list[int] = []
        for claim_id in claim_ids:
            self.holds.begin(claim_id)

    def changed(self) -> None:
        self.changes += 1

    async def trajectory(self, claim_id: int) -> None:
        self.slots.reserve(1)
        try:
            await self.holds.pass_by(claim_id)
            self.passed.append(claim_id)
        finally:
            await self.slots.release()


@asynccontextmanager
async def waiting(world: World, *claim_ids: int):
    tasks = [asyncio.create_task(world.trajectory(claim_id)) for claim_id in claim_ids]
    await settle()
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (world.slots.in_use, world.holds.num_waiting) == (0, 0)


async def test_only_held_claims_wait_and_their_slots_are_free() -> None:
    world = World(1, 2)
    world.holds.hold([1])
    async with waiting(world, 1, 1, 2, 3):
        assert (world.passed, world.holds.num_waiting, world.slots.in_use) == ([2, 3], 2, 0)
        assert world.changes == 2
        assert [world.holds.holds_back(claim_id) for claim_id in (1, 2)] == [True, False]


async def test_a_trajectory_that_is_cancelled_when_it_has_just_been_let_go_frees_its_slot() -> None:
    world = World(1)
    world.holds.hold([1])
    async with waiting(world, 1) as (task,):
        world.holds.begin(1)
        task.cancel()  # before it had its turn
        await settle()
        assert (task.cancelled(), world.slots.in_use) == (True, 0)


async def test_a_claim_that_goes_on_takes_its_slots_back_before_anybody_can_count_them_free() -> None:
    world = World(1)
    world.holds.hold([1])
    async with waiting(world, 1, 1):
        assert world.holds.begin(1) is False
        assert (world.slots.in_use, world.passed) == (2, [])
        await settle()
        assert world.passed == [1, 1]


async def test_a_hold_that_comes_before_the_claim_is_not_lost() -> None:
    world = World(1)
    world.holds.hold([2])
    assert world.holds.begin(2) is True
    async with waiting(world, 2):
        assert world.passed == []


async def test_a_claim_that_has_ended_is_neither_held_nor_begun_again() -> None:
    world = World(1, 2)
    world.holds.end(1)
    world.holds.hold([1])
    async with waiting(world, 1):
        assert world.passed == [1]
    assert world.holds.begin(1) is False
    assert world.slots.in_use == 0


async def test_a_claim_that_is_held_again_at_once_goes_on_waiting() -> None:
    world = World(1)
    world.holds.hold([1])
    async with waiting(world, 1):
        world.holds.begin(1)
        world.holds.hold([1])
        await settle()
        assert (world.passed, world.holds.num_waiting, world.slots.in_use) == ([], 1, 0)
