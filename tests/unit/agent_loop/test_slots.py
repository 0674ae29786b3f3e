"""Slots are charged per trajectory and wake the claim loop when they come free."""

import asyncio

from partial_rollout.agent_loop.slots import SlotBudget
from tests.unit.runtime.virtual_time import settle


async def test_waits_until_a_whole_group_fits() -> None:
    slots = SlotBudget(4)
    slots.reserve(4)
    waiting = asyncio.create_task(slots.wait_free(2))
    await slots.release()
    await asyncio.sleep(0)
    assert not waiting.done()
    await slots.release()
    await asyncio.wait_for(waiting, 5)
    assert (slots.free, slots.in_use) == (2, 2)


async def test_a_larger_budget_wakes_who_waits_and_a_smaller_one_takes_slots_as_they_come_free():
    slots = SlotBudget(2)
    slots.reserve(2)
    waiting = asyncio.create_task(slots.wait_free(2))
    await settle()
    await slots.resize(4)
    await waiting
    await slots.resize(1)
    assert slots.free == -1
    waiting = asyncio.create_task(slots.wait_free(1))
    await slots.release()
    await settle()
    assert not waiting.done()
    await slots.release()
    await waiting
