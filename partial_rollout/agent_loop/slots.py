"""The worker's budget of trajectory slots."""

from __future__ import annotations

import asyncio


class SlotBudget:
    """Counts trajectories in flight against a budget; wakes the claim loop when slots come free.

    claimed (reserve n, before the first await of the group) -> each trajectory's end frees one slot

    A budget below what is in use takes slots away as they come free.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._in_use = 0
        self._freed = asyncio.Condition()

    @property
    def in_use(self) -> int:
        """Trajectories claimed and not ended."""
        return self._in_use

    @property
    def free(self) -> int:
        """Slots that a claim may use now."""
        return self.budget - self._in_use

    def reserve(self, num_slots: int) -> None:
        """Charge the slots of a claimed group."""
        self._in_use += num_slots

    async def release(self, num_slots: int = 1) -> None:
        """Free slots and wake whoever waits for them."""
        self._in_use -= num_slots
        async with self._freed:
            self._freed.notify_all()

    async def resize(self, budget: int) -> None:
        """Change the budget and wake whoever waits for slots."""
        self.budget = budget
        async with self._freed:
            self._freed.notify_all()

    async def wait_free(self, num_slots: int) -> None:
        """Wait until at least `num_slots` are free."""
        async with self._freed:
            await self._freed.wait_for(lambda: self.free >= num_slots)
