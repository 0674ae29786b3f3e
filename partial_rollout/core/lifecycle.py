"""The states of a prompt and the one table of events that change them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from partial_rollout.errors import IllegalTransition

if TYPE_CHECKING:
    from partial_rollout.types import PromptMeta


class State(Enum):
    """Where a prompt is; exactly one at any time."""

    NEW = "new"
    PENDING = "pending"
    ONGOING = "ongoing"
    DONE = "done"
    TAKEN = "taken"
    DROPPED = "dropped"


class Event(Enum):
    """What can happen to a prompt."""

    ADMIT = "admit"
    CLAIM = "claim"
    FINISH = "finish"
    GIVE_BACK = "give_back"
    DROP = "drop"
    TAKE = "take"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.NEW, Event.ADMIT): State.PENDING,
    (State.PENDING, Event.CLAIM): State.ONGOING,
    (State.ONGOING, Event.FINISH): State.DONE,
    (State.ONGOING, Event.GIVE_BACK): State.PENDING,
    (State.ONGOING, Event.DROP): State.DROPPED,
    (State.DONE, Event.TAKE): State.TAKEN,
}


def next_state(uid: str, state: State, event: Event) -> State:
    """State of prompt `uid` after `event`; raises IllegalTransition where the table has no row."""
    target = TRANSITIONS.get((state, event))
    if target is None:
        raise IllegalTransition(f"prompt {uid!r}: event {event.value!r} is not allowed in state {state.value!r}")
    return target


@dataclass(slots=True, eq=False)
class Entry:
    """A prompt that is pending or ongoing."""

    meta: PromptMeta
    order: int  # Admission number. Claims follow it, so a prompt given back is ahead of all fresher ones.
    state: State = State.NEW
    failures: int = 0
    losses: int = 0
    claimed_at: float = 0.0

    def move(self, event: Event) -> None:
        """Follow the table; raises IllegalTransition."""
        self.state = next_state(self.meta.uid, self.state, event)
