"""Tail policies: what starts in a round, what goes on, what the batch must contain. Pure and without state.

A round is one training step's rollout: `plan` -> groups start and go on -> enough are done, the batch is taken.

| policy     | a round starts                  | ends with                | unfinished groups                 |
|------------|---------------------------------|--------------------------|-----------------------------------|
| Partial    | whatever the prefetch allows    | any batch of done groups | are interrupted and go on at once |
| Wait       | one batch                       | all of it                | there are none                    |
| Reorder    | more than a batch (short)       | any batch of done groups | are deferred with their tokens    |
|            | a batch of deferred ones (long) | exactly those            | there are none                    |
| FewAtATime | fresh groups, a few deferred    | a batch, overdue ones in | are deferred with their tokens    |

A group is deferred once at the end of each round that leaves it behind. After `max_deferrals` deferrals a group is
overdue, and the next round that can must train it, so no group starves. Reorder follows RollPacker's tail batching;
unlike there, a deferred group keeps its tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from partial_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.settings.block import PartialRolloutConfig

DEFERRAL_LIMIT = 8
"""By default four short rounds leave a batch of groups behind, which then get a long round; a group may wait for twice
as many, so that most groups are trained in a long round."""


@dataclass(frozen=True, slots=True)
class RoundView:
    """What a policy sees of the queue between two rounds: numbers of prompt groups."""

    pending: int
    ongoing: int
    done: int
    deferrals: Sequence[int] = ()
    """How often each deferred group was deferred, highest number first."""

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
    """How many of the resumed groups, from the first on, the batch must contain."""
    num_started: float = math.inf
    """Pending groups that may be claimed, fresh ones included."""
    num_fresh: int = 0
    """Groups to admit from the dataloader."""


class TailPolicy(Protocol):
    """A way to handle the tail of a batch: the classes below."""

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
        """Training steps within which an admitted group is trained or dropped, if no worker is lost; None: no limit."""
        ...

    def plan(self, view: RoundView) -> RoundPlan:
        """Decide the next round."""
        ...


@dataclass(frozen=True, slots=True)
class Partial:
    """Interrupt and resume: the queue is kept full, and every round goes on with all that is unfinished.

    >>> Partial(capacity=16).plan(RoundView(pending=3, ongoing=5, done=0)).num_fresh
    8
    """

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
        """No bound (None): a long response is interrupted and resumed until it ends."""
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
        # No more than the batch lacks: this policy interrupts nothing, so the step would wait for whatever goes on.
        resumed = min(len(view.deferrals), max(0, self.batch - view.done))
        return _filled("whole", view, self.batch, resumed=resumed, required=resumed)


@dataclass(frozen=True, slots=True)
class Reorder:
    """Short rounds start more groups than are trained; long rounds train together the groups that were left behind.

    >>> policy = Reorder(batch=4, gen_batch=6, max_deferrals=8)
    >>> policy.plan(RoundView(pending=0, ongoing=0, done=0, deferrals=[1, 1]))
    RoundPlan(kind='short', num_resumed=0, num_required=0, num_started=6, num_fresh=6)
    >>> policy.plan(RoundView(pending=0, ongoing=0, done=0, deferrals=[2, 2, 1, 1]))
    RoundPlan(kind='long', num_resumed=4, num_required=4, num_started=0, num_fresh=0)
    """

    batch: int
    gen_batch: int
    max_deferrals: int

    @property
    def capacity(self) -> int:
        """The groups of a short round, and deferred groups that do not fill a batch yet."""
        return self.batch + self.gen_batch

    @property
    def in_rounds(self) -> bool:
        """See TailPolicy."""
        return True

    @property
    def max_steps(self) -> int | None:
        """The deferrals, and the steps in which a group waits to start and to be trained (docs/design/0006)."""
        return self.max_deferrals + 4

    def plan(self, view: RoundView) -> RoundPlan:
        """Long when deferred groups fill a batch, mixed when one is overdue, else short."""
        num_deferred = len(view.deferrals)
        # A batch is done already: whatever went on now would only be interrupted when it is taken.
        if view.done >= self.batch:
            return _filled("short", view, self.batch)
        # Nothing starts beside it: the deferred ones fill the batch.
        if num_deferred >= self.batch:
            return RoundPlan("long", self.batch, self.batch, num_started=0)
        # The first one was deferred most often. A batch of deferred ones, for a long round, may never come together.
        if num_deferred and view.deferrals[0] >= self.max_deferrals:
            return _filled("mixed", view, self.gen_batch, resumed=num_deferred, required=num_deferred)
        return _filled("short", view, self.gen_batch)


@dataclass(frozen=True, slots=True)
class FewAtATime(Reorder):
    """Like Reorder, but a few deferred groups join each round instead of having long rounds: no batch is all long."""

    max_joining: int

    @property
    def max_steps(self) -> int | None:
        """The steps of Reorder, and the rounds that a batch of overdue groups takes to join."""
        return self.max_deferrals + math.ceil(self.batch / self.max_joining) + 4

    def plan(self, view: RoundView) -> RoundPlan:
        """A few deferred groups join; fewer fresh ones start when otherwise more than a batch would be deferred."""
        num_deferred = len(view.deferrals)
        if view.done >= self.batch:
            return _filled("short", view, self.batch)
        if num_deferred > self.batch:  # after a restart with other settings
            return RoundPlan("long", self.batch, self.batch, num_started=0)
        joining = min(self.max_joining, num_deferred)
        overdue = sum(count >= self.max_deferrals for count in view.deferrals[:joining])
        # At most a batch stays behind, so that the deferred ones never make a round that is all long.
        size = min(self.gen_batch, self.batch + joining + self.batch - num_deferred)
        return _filled("mixed" if joining else "short", view, size, resumed=joining, required=overdue)


def _filled(kind: str, view: RoundView, size: int, *, resumed: int = 0, required: int = 0) -> RoundPlan:
    """A round of `size` groups: those done before, then resumed ones; pending ones before fresh ones fill the rest."""
    # Groups that are done already are trained in this round too, so fewer have to start.
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
        return Reorder(train_batch_size, gen_batch, DEFERRAL_LIMIT)
    return FewAtATime(train_batch_size, gen_batch, DEFERRAL_LIMIT, tail.max_deferred_per_round)
