"""The budget of trajectory slots, adapted to what the engines can carry. Pure: no clock, no waiting.

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
"""A preempted request is computed again from its prompt on, so the budget has to fall quickly."""
KV_ROOM = 0.6
"""Share of the KV cache above which no slots are added: requests that run grow on, also after the next look."""
KV_HIGH = 0.9
"""Share of the KV cache from which on it counts as full: running requests still grow, and beyond it they preempt."""
WORTH = 0.1
"""More slots than at the start also mean older tokens. So a raise above these must bring at least this share of the
tokens that it would bring if decode steps took no longer with more requests in them."""
STEP_SHARE = 8
"""A raise adds the first budget divided by this number, so a doubling takes eight raises."""


def share_slots(num_slots: int, *, num_workers: int, group: int) -> list[int]:
    """How many slots each worker gets, in whole groups; where groups are left over, the first workers get one more.

    >>> share_slots(20, num_workers=2, group=4)
    [12, 8]
    """
    each, num_larger = divmod(num_slots // group, num_workers)
    return [(each + (rank < num_larger)) * group for rank in range(num_workers)]


def first_look_s(interval_s: float, last_wait_s: float) -> float:
    """Seconds into the wait for a batch after which to look at the engines first; further looks come at intervals.

    A wait that is shorter than the interval is looked at in its middle, if it takes as long as the last one. At its
    end prompts may have run out, and slots that limited the engines before are free.

    >>> first_look_s(5.0, last_wait_s=1.6), first_look_s(5.0, last_wait_s=40.0)
    (0.8, 5.0)
    """
    return min(interval_s, last_wait_s / 2)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of all engines at one moment: sums, and of the KV cache the usage in the fullest engine."""

    running: int = 0
    """Requests that are being generated."""
    waiting: int = 0
    """Requests that an engine has accepted and has no room for."""
    kv_usage: float = 0.0
    """Share of the KV cache in use, from 0 to 1."""
    num_preemptions: int = 0
    """How often running requests had to make room for others, since the engines' start."""
    num_tokens: int = 0
    """Tokens generated since the engines' start."""

    def is_full(self, preempted: int) -> bool:
        """Whether the KV cache has no room for more; so many requests have made room since the load before."""
        return preempted > 0 or self.kv_usage >= KV_HIGH

    def __add__(self, other: EngineLoad) -> EngineLoad:
        """The load of two engines, or of two groups of engines."""
        return EngineLoad(
            self.running + other.running,
            self.waiting + other.waiting,
            max(self.kv_usage, other.kv_usage),
            self.num_preemptions + other.num_preemptions,
            self.num_tokens + other.num_tokens,
        )


@dataclass(frozen=True, slots=True)
class SlotBounds:
    """The bounds of the budget; multiples of `group`."""

    least: int
    most: int
    group: int = 1
    """Trajectories of a prompt. They are claimed together, so the budget is a multiple of their number."""
    num_workers: int = 1
    """Workers that share the budget. In each share up to `group` - 1 free slots are too few for a prompt."""


@dataclass(frozen=True, slots=True)
class SlotDecision:
    """What one look at the engines has decided."""

    before: int
    after: int
    reason: str

    @property
    def change(self) -> int:
        """Slots more, or less if negative."""
        return self.after - self.before


class SlotController:
    """Decides the budget of trajectory slots of all workers together, one look at the engines after the other.

    >>> controller = SlotController(64, SlotBounds(least=8, most=128, group=4))
    >>> controller.observe(EngineLoad(kv_usage=0.4, num_tokens=900), slots_in_use=64)
    SlotDecision(before=64, after=72, reason='all slots in use, KV cache 40% full')
    >>> controller.observe(EngineLoad(kv_usage=0.95, num_tokens=1800), slots_in_use=72)
    SlotDecision(before=72, after=52, reason='KV cache 95% full')
    """

    def __init__(self, budget: int, bounds: SlotBounds) -> None:
        self._bounds = bounds
        self.budget = self._first = self._whole_groups(budget)
        self._few = max(bounds.least, self._whole_groups(budget // 2))
        self._step = max(bounds.group, self._whole_groups(budget // STEP_SHARE))
        self._num_preemptions = self._num_tokens = self._in_use = 0
        self.was_full_with_few = False
        """Whether a look since `begin` found the KV cache full or requests preempted, and no more slots than half of
        the first budget, or than the lower bound, were in use since the look before it. Others, until a decrease has
        taken them away, may fill it."""

    def begin(self, load: EngineLoad) -> None:
        """Begin a step. Preemptions count from here on: those of a validation say nothing of the slots."""
        self._num_preemptions = load.num_preemptions
        self.was_full_with_few = False

    def observe(self, load: EngineLoad, slots_in_use: int, speeds: Sequence[EngineSpeed] = ()) -> SlotDecision:
        """Decide on the next budget.

        `slots_in_use` counts trajectories in generation over all workers. `speeds` are those of the engines, as far as
        known: they say whether more slots would bring more tokens.
        """
        # The count of an engine that was started again begins at 0.
        preempted = max(0, load.num_preemptions - self._num_preemptions)
        self._num_preemptions = load.num_preemptions
        before = self.budget
        if load.is_full(preempted) and max(before, self._in_use) <= self._few:
            self.was_full_with_few = True
        self._in_use = slots_in_use
        self.budget, reason = self._next(load, preempted, slots_in_use)
        if self.budget > before and not self._is_worth(before, speeds):
            self.budget, reason = before, f"more slots than {before} bring hardly more tokens"
        self._num_tokens = load.num_tokens
        return SlotDecision(before, self.budget, reason)

    def _next(self, load: EngineLoad, preempted: int, slots_in_use: int) -> tuple[int, str]:
        full = f"KV cache {load.kv_usage:.0%} full"
        if load.is_full(preempted):
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
        if load.kv_usage > KV_ROOM:
            return self.budget, f"{full}, which running requests still fill"
        most = self._first if self.budget < self._first else self._bounds.most
        return self._whole_groups(min(most, self.budget + self._step)), f"all slots in use, {full}"

    def _is_worth(self, before: int, speeds: Sequence[EngineSpeed]) -> bool:
        """Whether an engine would be faster with its share of the raised budget.

        Yes as long as no speed is known. And yes up to the first budget: tokens get no older than at the start, and
        with more requests the engine was last measured while the KV cache was full, when its steps take longer.
        """
        if self.budget <= self._first:
            return True
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
