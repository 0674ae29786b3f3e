"""The states of a prompt, and the one table of the events that change them. Only queue.py moves a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from partial_rollout.errors import IllegalTransition
from partial_rollout.types import Claim, FinishedGroup, PromptMeta  # noqa: TC001 - as in whole.py

MAX_LOSSES = 4
"""Attempts of a prompt that may end with the loss of their worker; with the last one the prompt is dropped.

A step allows eight such losses, so two prompts that kill their workers do not end it.
"""


class State(Enum):
    """Where a prompt is. A prompt is in exactly one state at any time."""

    NEW = "new"
    PENDING = "pending"
    """The prompt waits for a worker."""
    ONGOING = "ongoing"
    """A worker generates the prompt's trajectories."""
    DEFERRED = "deferred"
    """A round has ended without the prompt, which is held back until a later round."""
    DONE = "done"
    """All trajectories of the prompt are complete and wait to be trained."""
    EXPIRED = "expired"
    """All trajectories of the prompt are complete, and too old to be trained."""
    CLEARING = "clearing"
    """The trajectories are too old, and the trainer clears the prompt's rows."""
    TAKEN = "taken"
    DROPPED = "dropped"


class Event(Enum):
    """What can happen to a prompt."""

    ADMIT = "admit"
    CLAIM = "claim"
    FINISH = "finish"
    GIVE_BACK = "give_back"
    DROP = "drop"
    DEFER = "defer"
    RESUME = "resume"
    RESTART = "restart"
    EXPIRE = "expire"
    CLEAR = "clear"
    TAKE = "take"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.NEW, Event.ADMIT): State.PENDING,
    (State.PENDING, Event.CLAIM): State.ONGOING,
    (State.ONGOING, Event.FINISH): State.DONE,
    (State.ONGOING, Event.GIVE_BACK): State.PENDING,
    (State.ONGOING, Event.DROP): State.DROPPED,
    # A deferred prompt keeps its claim and its tokens. One without a claim (its worker was lost, or the run was
    # restarted) waits for another one.
    (State.ONGOING, Event.DEFER): State.DEFERRED,
    (State.DEFERRED, Event.RESUME): State.ONGOING,
    (State.DEFERRED, Event.RESTART): State.PENDING,
    # A worker may have sent its report before it heard that the prompt is deferred.
    (State.DEFERRED, Event.FINISH): State.DONE,
    (State.DEFERRED, Event.GIVE_BACK): State.DEFERRED,
    (State.DEFERRED, Event.DROP): State.DROPPED,
    (State.DONE, Event.TAKE): State.TAKEN,
    (State.DONE, Event.EXPIRE): State.EXPIRED,
    (State.EXPIRED, Event.CLEAR): State.CLEARING,
    (State.CLEARING, Event.RESTART): State.PENDING,
    (State.CLEARING, Event.DROP): State.DROPPED,
    # A checkpoint is loaded.
    (State.PENDING, Event.DEFER): State.DEFERRED,
    (State.NEW, Event.FINISH): State.DONE,
}


def next_state(uid: str, state: State, event: Event) -> State:
    """The state of prompt `uid` after `event`; raises IllegalTransition where the table has no row.

    >>> next_state("a", State.PENDING, Event.CLAIM)
    <State.ONGOING: 'ongoing'>
    >>> next_state("a", State.PENDING, Event.TAKE)
    Traceback (most recent call last):
    partial_rollout.errors.IllegalTransition: prompt 'a': event 'take' is not allowed in state 'pending'
    """
    target = TRANSITIONS.get((state, event))
    if target is None:
        raise IllegalTransition(f"prompt {uid!r}: event {event.value!r} is not allowed in state {state.value!r}")
    return target


@dataclass(slots=True, eq=False)
class Entry:
    """What the queue knows of a prompt in flight."""

    meta: PromptMeta
    order: int
    """Admission number. Prompts are claimed in this order, so one that was given back is ahead of all fresher ones."""
    state: State = State.NEW
    failures: int = 0
    """Attempts that failed."""
    restarts: int = 0
    """Attempts whose tokens became too old."""
    losses: int = 0
    """Attempts that ended because their worker was lost."""
    deferrals: int = 0
    begun: int | None = None
    """The weight version that generated when the prompt began; None while it has no tokens."""
    ongoing_since_s: float = 0.0
    ongoing_before_s: float = 0.0
    """Seconds under the current claim before the prompt was last deferred."""
    was_called_long: bool = False
    """Whether the current claim was reported as a long-running one."""
    claim: Claim | None = None
    """The claim of an ongoing prompt, or of a deferred prompt whose worker keeps the tokens."""
    group: FinishedGroup | None = None
    """The prompt's trajectories, from the state DONE on."""

    @property
    def is_suspect(self) -> bool:
        """Whether one more loss is the last one: the prompt itself may have killed its workers."""
        return self.losses >= MAX_LOSSES - 1

    def acquit(self) -> None:
        """Another prompt was found to kill workers: this one is no suspect, until it loses a further one."""
        self.losses = min(self.losses, MAX_LOSSES - 2)

    def move(self, event: Event) -> None:
        """Follow the table; raises IllegalTransition."""
        self.state = next_state(self.meta.uid, self.state, event)
