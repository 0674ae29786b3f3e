"""How many trajectories generate at the same time, adapted to the engines. Pure: no clock, no waiting.

Additive increase, multiplicative decrease (Chiu and Jain, 1989): while slots are what limits the engines, the budget
grows by a constant; when the KV cache runs out, it shrinks by a factor. A smaller budget interrupts nobody: slots are
taken away as trajectories end, and until then there is no further decrease.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.core.engine_meter import EngineSpeed

DECREASE = 0.75
"""A preempted request is computed again from its prompt on, so it pays to leave the pressure quickly."""
KV_HIGH = 0.9
"""Share of the KV cache from which on it counts as full: running requests still grow, and beyond it they preempt."""
WORTH = 0.1
"""A raise must bring this share of what it would if decode steps took no longer: more slots also mean older tokens."""
STEP_SHARE = 8
"""The first budget is raised by one part of so many: a doubling takes eight rises."""


def share_slots(num_slots: int, *, num_workers: int, group: int) -> list[int]:
    """Each worker's slots, in whole groups: the first ones have a group more where they do not come out even."""
    each, num_larger = divmod(num_slots // group, num_workers)
    return [(each + (rank < num_larger)) * group for rank in range(num_workers)]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What engines say of themselves at one moment, summed up; the KV cache's is that of the fullest one."""

    running: int = 0
    """Requests that are being generated."""
    waiting: int = 0
    """Requests that the engine has accepted and found no room for."""
    kv_usage: float = 0.0
    """Share of the KV cache in use, from 0 to 1."""
    num_preemptions: int = 0
    """Running requests that lost their place to others, since the engine's start."""
    num_tokens: int = 0
    """Tokens generated since the engine's start."""

    def __add__(self, other: EngineLoad) -> EngineLoad:
        """The load of both."""
        return EngineLoad(
            self.running + other.running,
            self.waiting + other.waiting,
            max(self.kv_usage, other.kv_usage),
            self.num_preemptions + other.num_preemptions,
            self.num_tokens + other.num_tokens,
        )


@dataclass(frozen=True, slots=True)
class SlotBounds:
    """Between what the budget moves; multiples of `group`."""

    least: int
    most: int
    group: int = 1
    """Trajectories of a prompt: the budget is a multiple of it, because they are claimed together."""
    num_workers: int = 1
    """Each has its share of the budget, and may have less than a group free that nobody can claim."""


@dataclass(frozen=True, slots=True)
class SlotDecision:
    """One look at the engines."""

    before: int
    after: int
    reason: str

    @property
    def change(self) -> int:
        """Slots more, or less if negative."""
        return self.after - self.before


class SlotController:
    """The budget of trajectory slots over all workers: `observe` as often as you like, and apply what it decides."""

    def __init__(self, budget: int, bounds: SlotBounds) -> None:
        self._bounds = bounds
        self.budget = self._whole_groups(budget)
        self._step = max(bounds.group, self._whole_groups(budget // STEP_SHARE))
        self._num_preemptions = self._num_tokens = 0

    def observe(self, load: EngineLoad, slots_in_use: int, speeds: Sequence[EngineSpeed] = ()) -> SlotDecision:
        """Decide on the next budget.

        `slots_in_use` are trajectories in generation over all workers; `speeds` of the engines, as far as they are
        known, say whether more slots would bring more tokens.
        """
        # An engine that was started again counts from 0.
        preempted = max(0, load.num_preemptions - self._num_preemptions)
        self._num_preemptions = load.num_preemptions
        before = self.budget
        self.budget, reason = self._next(load, preempted, slots_in_use)
        if self.budget > before and not self._is_worth(before, speeds):
            self.budget, reason = before, f"more slots than {before} bring hardly more tokens"
        self._num_tokens = load.num_tokens
        return SlotDecision(before, self.budget, reason)

    def _next(self, load: EngineLoad, preempted: int, slots_in_use: int) -> tuple[int, str]:
        full = f"KV cache {load.kv_usage:.0%} full"
        if preempted or load.kv_usage >= KV_HIGH:
            why = f"{preempted} requests preempted" if preempted else full
            return self._lower(slots_in_use, why)
        if load.waiting:
            return self.budget, f"{load.waiting} requests wait in the engines"
        if load.num_tokens == self._num_tokens:
            return self.budget, "no token since the last look"
        if slots_in_use <= self.budget - self._bounds.num_workers * self._bounds.group:
            return self.budget, f"{self.budget - slots_in_use} slots are free"
        if self.budget >= self._bounds.most:
            return self.budget, "at the upper bound"
        return self._whole_groups(min(self._bounds.most, self.budget + self._step)), f"all slots in use, {full}"

    def _is_worth(self, before: int, speeds: Sequence[EngineSpeed]) -> bool:
        """Whether an engine would be faster with its share of the new budget; as long as none is known, yes."""
        known = [speed for speed in speeds if len(speed.steps) > 1]
        shares = before / max(len(speeds), 1), self.budget / max(len(speeds), 1)
        gains = [speed.tokens_per_s(shares[1]) / speed.tokens_per_s(shares[0]) - 1 for speed in known]
        return not known or max(gains) >= WORTH * (self.budget / before - 1)

    def _lower(self, slots_in_use: int, why: str) -> tuple[int, str]:
        if slots_in_use > self.budget:
            return self.budget, f"{why}; the last decrease has not taken effect"
        if self.budget <= self._bounds.least:
            return self.budget, f"{why}; at the lower bound"
        return max(self._bounds.least, self._whole_groups(int(self.budget * DECREASE))), why

    def _whole_groups(self, budget: int) -> int:
        return budget - budget % self._bounds.group
