"""A worker's places for trajectories: how many are in use, and whose trajectories wait without one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class SlotBudget:
    """Counts the trajectories in generation against a budget, and wakes the claim loop when slots come free.

    `reserve` charges the slots of a claimed group, before the group's first await. Each trajectory frees its slot when
    it ends, or while it is held back. A budget below what is in use takes slots away as they come free.

    >>> slots = SlotBudget(8)
    >>> slots.reserve(4)
    >>> slots.free
    4
    >>> asyncio.run(slots.release())
    >>> slots.in_use, slots.free
    (3, 5)
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._in_use = 0
        self._freed = asyncio.Condition()

    @property
    def in_use(self) -> int:
        """Trajectories that were claimed, have not ended and are not held back."""
        return self._in_use

    @property
    def free(self) -> int:
        """Slots that a claim may use now."""
        return self.budget - self._in_use

    def reserve(self, num_slots: int) -> None:
        """Charge slots."""
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


@dataclass(slots=True)
class _Hold:
    num_waiting: int = 0
    lifted: asyncio.Event = field(default_factory=asyncio.Event)


class Holds:
    """The worker's claims whose trajectories are held back, because their prompts are deferred to a later round.

    begin -> hold -> `pass_by` waits, and the slot of each trajectory that waits is free
                  -> begin again: the slots are charged again, and the trajectories pass

    Trajectories wait between two requests to an engine, with the tokens that they have. A request that is on its way
    when the hold comes is not called back: it generates until the next drain at most.
    """

    def __init__(self, slots: SlotBudget, changed: Callable[[], None]) -> None:
        """`changed` is called when a trajectory begins or ends to wait."""
        self._slots = slots
        self._changed = changed
        self._newest_claim = 0
        self._running: set[int] = set()
        self._holds: dict[int, _Hold] = {}

    @property
    def num_waiting(self) -> int:
        """Trajectories held back now."""
        return sum(hold.num_waiting for hold in self._holds.values())

    def begin(self, claim_id: int) -> bool:
        """Whether the claim is new. A claim that was begun before goes on instead. Ids of new claims only grow."""
        if claim_id <= self._newest_claim:
            self._go_on(claim_id)
            return False
        self._newest_claim = claim_id
        self._running.add(claim_id)
        return True

    def end(self, claim_id: int) -> None:
        """The claim's group has ended."""
        self._running.discard(claim_id)
        self._holds.pop(claim_id, None)

    def hold(self, claim_ids: Iterable[int]) -> None:
        """Let trajectories of these claims wait before their next request; claims that have ended are left out."""
        for claim_id in claim_ids:
            # The manager may defer a claim before this worker has received it.
            if claim_id in self._running or claim_id > self._newest_claim:
                self._holds.setdefault(claim_id, _Hold())

    def holds_back(self, claim_id: int) -> bool:
        """Whether a trajectory of the claim would wait in `pass_by`."""
        return claim_id in self._holds

    async def pass_by(self, claim_id: int) -> None:
        """Called by a trajectory: wait while its claim is held back."""
        while (hold := self._holds.get(claim_id)) is not None:
            hold.num_waiting += 1
            try:
                await self._slots.release()
                self._changed()
                await hold.lifted.wait()
            except asyncio.CancelledError:
                if not hold.lifted.is_set():
                    # Whoever cancels frees the trajectory's slot, which it does not have now.
                    hold.num_waiting -= 1
                    self._slots.reserve(1)
                raise

    def _go_on(self, claim_id: int) -> None:
        hold = self._holds.pop(claim_id, None)
        if hold is not None:
            # Charged here and not by the trajectories that wait: the claim loop reads the free slots next.
            self._slots.reserve(hold.num_waiting)
            hold.lifted.set()
            self._changed()
