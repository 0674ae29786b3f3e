"""Where trajectories of deferred prompts wait: between two requests to the engine, with the tokens they have."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from partial_rollout.agent_loop.slots import SlotBudget

CURRENT_CLAIM: ContextVar[int | None] = ContextVar("partial_rollout_claim", default=None)
"""Claim of the trajectory that the running task belongs to; None outside of training prompts."""


@dataclass(slots=True)
class _Hold:
    num_waiting: int = 0
    lifted: asyncio.Event = field(default_factory=asyncio.Event)


class Holds:
    """Which claims of this worker are held back.

    hold -> trajectories that `pass_by` wait and free their slots -> go_on: slots are charged again, they pass

    A request that is on its way when the hold comes is not called back: it generates until the next drain at most.
    """

    def __init__(self, slots: SlotBudget, changed: Callable[[], None]) -> None:
        """`changed` is called when a trajectory starts or ends to wait."""
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
        """Whether the claim is new; one that was begun before goes on instead. Ids of new claims only grow."""
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
            if claim_id in self._running or claim_id > self._newest_claim:
                self._holds.setdefault(claim_id, _Hold())

    async def pass_by(self) -> None:
        """Wait while the current trajectory's claim is held back."""
        while (hold := self._holds.get(CURRENT_CLAIM.get() or 0)) is not None:
            hold.num_waiting += 1
            try:
                await self._slots.release()
                self._changed()
                await hold.lifted.wait()
            except asyncio.CancelledError:
                if not hold.lifted.is_set():
                    hold.num_waiting -= 1
                    self._slots.reserve(1)
                raise

    def _go_on(self, claim_id: int) -> None:
        hold = self._holds.pop(claim_id, None)
        if hold is not None:
            # Here and not by whoever waits: the claim loop reads the free slots next.
            self._slots.reserve(hold.num_waiting)
            hold.lifted.set()
            self._changed()
