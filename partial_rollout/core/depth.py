"""How many batches of prompts are in flight, adapted to whether slots run out of prompts. Pure: no clock, no waiting.

More prompts in flight fill free slots and make tokens older: each further batch by about one update. So the queue gets
deeper only after slots were free for several steps for want of prompts, which is when more prompts help; and it goes
back when the KV cache is full although slots have fallen to half of their number at the start. A slot that a trajectory
takes is not free, also where no engine runs its request: an engine that starts slowly, a tool, responses that end
together and are scored and stored.
Engines with devices of their own also have free slots because training is slower: then each batch is whole before the
trainer wants it, and more prompts gain nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FREE_BELOW = 0.9
"""Mean share of the slots that trajectories take below which some are free for want of prompts: 0.85 of the slots were
to run a request, and trajectories take some more outside of the engines (docs/design/0010-auto.md)."""
WAITED = 0.05
"""Share of a step that the trainer's wait for its batch must have, in most steps, for more prompts to gain anything."""
PATIENCE = 5
"""Steps that count together: single ones differ by a factor of 2, the first ones fill slots, some validate or save."""
RISE = 1.0
"""Batches that are added at a time while the KV cache was never full: slots fill anew after each change, so two changes
cost more than one (docs/design/0010-auto.md)."""
CHANGE = 0.5
"""Batches that are taken away at a time, and added after that."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step's rollout says of the queue's depth."""

    taken: float
    """Mean number of slots that a trajectory took, running in an engine or not, by the number to start with."""
    pending: int
    """Prompts that no worker has claimed when the batch is complete."""
    is_kv_full: bool
    """Whether the KV cache was full, or requests were preempted, with half of the slots to start with."""
    waited: float
    """Share of the time between the two latest batches in which the trainer waited for the second one."""


@dataclass(frozen=True, slots=True)
class DepthDecision:
    """What the end of one step's rollout has decided."""

    before: float
    after: float
    reason: str


def is_waited_for(waits: Sequence[float]) -> bool:
    """Whether batches would come earlier if slots were fuller: the trainer waits for most of them.

    `waits` are shares of steps, as `StepLoad.waited`. A first step that fills all slots says nothing, nor does one that
    also validates: so the median counts.

    >>> is_waited_for([0.9, 0.01, 0.01]), is_waited_for([0.5, 0.02, 0.5])
    (False, True)
    """
    return median(waits) >= WAITED


class DepthController:
    """Decides the number of batches in flight, one step after the other.

    >>> controller = DepthController(least=2.0, most=3.0)
    >>> idle = StepLoad(taken=0.6, pending=0, is_kv_full=False, waited=0.5)
    >>> [controller.observe(idle).after for _ in range(6)]
    [2.0, 2.0, 2.0, 2.0, 3.0, 3.0]
    >>> controller.observe(StepLoad(taken=0.95, pending=0, is_kv_full=True, waited=0.5))
    DepthDecision(before=3.0, after=2.5, reason='the KV cache is full')
    """

    def __init__(self, least: float, most: float) -> None:
        """Begin with `least` batches, which is never gone below."""
        self._least, self._most = least, most
        self.depth = least
        self._patience, self._rise = PATIENCE, RISE
        self._steps: list[StepLoad] = []
        """The latest steps, since a prompt was pending or the depth changed."""

    def observe(self, load: StepLoad) -> DepthDecision:
        """Decide on the depth from the next step on."""
        before = self.depth
        if load.is_kv_full:
            return DepthDecision(before, self._back(), "the KV cache is full")
        if load.pending:
            self._steps.clear()
            return DepthDecision(before, before, f"prompts pending: {load.pending}")
        self._steps = [*self._steps, load][-self._patience :]
        num_steps = len(self._steps)
        taken, waits = fmean(each.taken for each in self._steps), [each.waited for each in self._steps]
        reason = (
            f"trajectories took {taken:.0%} of the slots over {num_steps} steps, no prompt pending, the trainer waited "
            f"{median(waits):.0%} of a step"
        )
        if num_steps == self._patience and taken < FREE_BELOW and is_waited_for(waits) and before < self._most:
            self._steps.clear()
            self.depth = min(self._most, before + self._rise)
        return DepthDecision(before, self.depth, reason)

    def _back(self) -> float:
        """One change back. The way up takes twice as long then, in small steps, so that the depth does not swing."""
        self._steps.clear()
        if self.depth > self._least:
            self.depth = max(self._least, self.depth - CHANGE)
            self._patience, self._rise = 2 * self._patience, CHANGE
        return self.depth
