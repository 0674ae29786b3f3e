"""Tail policies: what starts in a round, what goes on, what the batch must contain. Pure and without state.

A round is one training step's rollout: `plan` -> groups start and go on -> enough are done, the batch is taken.

| policy     | a round starts                  | ends with                | unfinished groups                 |
|------------|---------------------------------|--------------------------|-----------------------------------|
| Partial    | whatever the prefetch allows    | any batch of done groups | are interrupted and go on at once |
| Wait       | one batch                       | all of it                | there are none                    |
| Reorder    | more than a batch (short)       | any batch of done groups | are deferred with their tokens    |
|            | a batch of deferred ones (long) | exactly those            | there are none                    |
| FewAtATime | fresh groups, a few deferred    | a batch, overdue ones in | are deferred with their tokens    |

A group is deferred once for every boundary it stays behind. After `max_deferrals` of them it is overdue, and the next
round that can has to train it: nothing starves. Reorder follows RollPacker (tail batching); here tokens are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from partial_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.settings.block import PartialRolloutConfig


@dataclass(frozen=True, slots=True)
class RoundView:
    """The queue between two rounds, in prompt groups."""

    pending: int
    ongoing: int
    done: int
    deferrals: Sequence[int] = ()
    """How often each deferred group was deferred, most often first."""

    @property
    def in_flight(self) -> int:
        """Groups neither trained nor dropped."""
        return self.pending + self.ongoing + self.done + len(self.deferrals)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a policy decides for one round."""

    kind: str
    """`open` (no boundary but the interruption), `whole`, `short`, `long` or `mixed`; a metric label."""
    num_resumed: int = 0
    """Deferred groups that go on, most often deferred first."""
    num_required: int = 0
    """The first so many of them must be in the batch."""
    num_started: float = math.inf
    """Pending groups that may be claimed, fresh ones included."""
    num_fresh: int = 0
    """Groups to admit from the dataloader."""


class TailPolicy(Protocol):
    """What differs between the ways to handle the tail of a batch."""

    @property
    def capacity(self) -> int:
        """Groups in flight at most."""
        ...

    @property
    def in_rounds(self) -> bool:
        """Whether taking a batch ends the round: unfinished groups are deferred, nothing starts before the next."""
        ...

    @property
    def max_steps(self) -> int | None:
        """Steps within which an admitted group is trained or dropped while no worker is lost; None: no bound."""
        ...

    def plan(self, view: RoundView) -> RoundPlan:
        """Decide the next round."""
        ...


@dataclass(frozen=True, slots=True)
class Partial:
    """Interrupt and resume: the queue is kept full, every round goes on with all that is unfinished."""

    capacity: int

    def __post_init__(self) -> None:
        """Raise ConfigError for a capacity below 1."""
        if self.capacity < 1:
            raise ConfigError(f"capacity={self.capacity} must be at least 1")

    @property
    def in_rounds(self) -> bool:
        """See TailPolicy."""
        return False

    @property
    def max_steps(self) -> int | None:
        """None: what the slots leave for a long response decides."""
        return None

    def plan(self, view: RoundView) -> RoundPlan:
        """Fill the queue up; groups deferred by another policy before a restart go on."""
        return RoundPlan("open", num_resumed=len(view.deferrals), num_fresh=max(0, self.capacity - view.in_flight))


@dataclass(frozen=True, slots=True)
class Wait:
    """The step waits for all of its batch, and nothing is interrupted."""

    batch: int

    @property
    def capacity(self) -> int:
        """One batch."""
        return self.batch

    @property
    def in_rounds(self) -> bool:
        """See TailPolicy."""
        return True

    @property
    def max_steps(self) -> int | None:
        """The step of its admission."""
        return 1

    def plan(self, view: RoundView) -> RoundPlan:
        """One batch; what another policy left behind before a restart comes first."""
        resumed = min(len(view.deferrals), max(0, self.batch - view.done))
        return _filled("whole", view, self.batch, resumed=resumed, required=resumed)


@dataclass(frozen=True, slots=True)
class Reorder:
    """Short rounds of more groups than are trained; what they leave behind is trained together in long rounds."""

    batch: int
    gen_batch: int
    max_deferrals: int

    @property
    def capacity(self) -> int:
        """A short round's groups beside deferred ones that do not fill a batch yet."""
        return self.batch + self.gen_batch

    @property
    def in_rounds(self) -> bool:
        """See TailPolicy."""
        return True

    @property
    def max_steps(self) -> int | None:
        """Waiting to start and to be trained, around the deferrals (docs/design/0006)."""
        return self.max_deferrals + 4

    def plan(self, view: RoundView) -> RoundPlan:
        """Long when deferred groups fill a batch, mixed when one is overdue, else short."""
        num_deferred = len(view.deferrals)
        if view.done >= self.batch:
            return _filled("short", view, self.batch)
        if num_deferred >= self.batch:
            return RoundPlan("long", self.batch, self.batch, num_started=0)
        if num_deferred and view.deferrals[0] >= self.max_deferrals:
            return _filled("mixed", view, self.gen_batch, resumed=num_deferred, required=num_deferred)
        return _filled("short", view, self.gen_batch)


@dataclass(frozen=True, slots=True)
class FewAtATime(Reorder):
    """As Reorder, but instead of long rounds a few deferred groups join each round, so no batch is all long."""

    max_joining: int

    @property
    def max_steps(self) -> int | None:
        """As Reorder, and the rounds that a batch of overdue groups takes to join."""
        return self.max_deferrals + math.ceil(self.batch / self.max_joining) + 4

    def plan(self, view: RoundView) -> RoundPlan:
        """Fewer groups start when more than a batch would be deferred: as many join as are left behind."""
        num_deferred = len(view.deferrals)
        if view.done >= self.batch:
            return _filled("short", view, self.batch)
        if num_deferred > self.batch:  # from a restart with other settings
            return RoundPlan("long", self.batch, self.batch, num_started=0)
        joining = min(self.max_joining, num_deferred)
        overdue = sum(count >= self.max_deferrals for count in view.deferrals[:joining])
        size = min(self.gen_batch, self.batch + joining + self.batch - num_deferred)
        return _filled("mixed" if joining else "short", view, size, resumed=joining, required=overdue)


def _filled(kind: str, view: RoundView, size: int, *, resumed: int = 0, required: int = 0) -> RoundPlan:
    """A round of `size` groups: done ones left over, resumed ones, and for the rest pending ones before fresh ones."""
    started = max(0, size - view.done - resumed)
    return RoundPlan(kind, resumed, required, started, num_fresh=max(0, started - view.pending))


def make_policy(config: PartialRolloutConfig, train_batch_size: int) -> TailPolicy:
    """The policy of a checked configuration."""
    tail = config.tail
    if tail.policy == "wait":
        return Wait(train_batch_size)
    if tail.policy == "partial":
        return Partial(config.capacity(train_batch_size))
    gen_batch = tail.groups_per_round(train_batch_size)
    if tail.max_deferred_per_round is None:
        return Reorder(train_batch_size, gen_batch, tail.deferral_limit)
    return FewAtATime(train_batch_size, gen_batch, tail.deferral_limit, tail.max_deferred_per_round)
