"""Slots are charged per trajectory and wake the claim loop when they come free."""

import asyncio

from partial_rollout.agent_loop.slots import SlotBudget


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
