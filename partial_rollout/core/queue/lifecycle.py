"""The states of a prompt and the one table of events that change them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from partial_rollout.errors import ConfigError, DuplicateUid, IllegalTransition, InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.types import Claim, PromptMeta, TrajectorySummary


class State(Enum):
    """Where a prompt is; exactly one at any time."""

    NEW = "new"
    PENDING = "pending"
    ONGOING = "ongoing"
    DEFERRED = "deferred"
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
    DEFER = "defer"
    RESUME = "resume"
    RESTART = "restart"
    TAKE = "take"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.NEW, Event.ADMIT): State.PENDING,
    (State.PENDING, Event.CLAIM): State.ONGOING,
    (State.ONGOING, Event.FINISH): State.DONE,
    (State.ONGOING, Event.GIVE_BACK): State.PENDING,
    (State.ONGOING, Event.DROP): State.DROPPED,
    # A deferred prompt keeps its claim and its tokens; without a claim (worker lost, run restarted) it starts again.
    (State.PENDING, Event.DEFER): State.DEFERRED,
    (State.ONGOING, Event.DEFER): State.DEFERRED,
    (State.DEFERRED, Event.RESUME): State.ONGOING,
    (State.DEFERRED, Event.RESTART): State.PENDING,
    # Reports that were under way while it was deferred.
    (State.DEFERRED, Event.FINISH): State.DONE,
    (State.DEFERRED, Event.GIVE_BACK): State.DEFERRED,
    (State.DEFERRED, Event.DROP): State.DROPPED,
    (State.DONE, Event.TAKE): State.TAKEN,
    # Its tokens are older than training allows.
    (State.DONE, Event.RESTART): State.PENDING,
    (State.DONE, Event.DROP): State.DROPPED,
}


def next_state(uid: str, state: State, event: Event) -> State:
    """State of prompt `uid` after `event`; raises IllegalTransition where the table has no row."""
    target = TRANSITIONS.get((state, event))
    if target is None:
        raise IllegalTransition(f"prompt {uid!r}: event {event.value!r} is not allowed in state {state.value!r}")
    return target


@dataclass(slots=True, eq=False)
class Entry:
    """A prompt that is neither trained nor dropped."""

    meta: PromptMeta
    order: int  # Admission number. Claims follow it, so a prompt given back is ahead of all fresher ones.
    state: State = State.NEW
    failures: int = 0
    restarts: int = 0
    losses: int = 0
    deferrals: int = 0
    begun: int | None = None  # Weight version that generated when it began; None while it has no tokens.
    ongoing_since: float = 0.0
    ongoing_before_s: float = 0.0  # Under the same claim, before it was last deferred.
    is_long_running: bool = False  # `take_long_running` has returned its claim.
    claim: Claim | None = None

    def charge(self, *, is_restart: bool) -> int:
        """Count an attempt that failed, or one whose tokens were too old; returns how many of its kind there were."""
        if is_restart:
            self.restarts += 1
            return self.restarts
        self.failures += 1
        return self.failures

    def move(self, event: Event) -> None:
        """Follow the table; raises IllegalTransition."""
        self.state = next_state(self.meta.uid, self.state, event)


class UidRegister:
    """Uids in flight, and the last `num_remembered` that were: `in` is true for both.

    Bounded, and empty after a restart: uids are fresh uuid4s, so one coming back is a bug that shows soon or never;
    late reports are refused by claim id, which is never forgotten.
    """

    def __init__(self, num_remembered: int) -> None:
        self.live: set[str] = set()
        self._num_remembered = num_remembered
        # An OrderedDict forgets its oldest item in O(1); a dict would scan the holes that earlier ones left.
        self._retired: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, uid: str) -> bool:
        return uid in self.live or uid in self._retired

    def require_new(self, prompts: Sequence[PromptMeta]) -> None:
        """Raise ConfigError or DuplicateUid unless all `prompts` may be admitted together."""
        uids: set[str] = set()
        for meta in prompts:
            if meta.num_trajectories < 1:
                raise ConfigError(f"prompt {meta.uid!r}: num_trajectories={meta.num_trajectories} must be at least 1")
            if meta.uid in self or meta.uid in uids:
                raise DuplicateUid(f"prompt {meta.uid!r} was admitted before")
            uids.add(meta.uid)

    def retire(self, uid: str) -> None:
        """A prompt in flight was taken or dropped."""
        self.live.remove(uid)
        self._retired[uid] = None
        if len(self._retired) > self._num_remembered:
            self._retired.popitem(last=False)


def check_group(claim: Claim, trajectories: Sequence[TrajectorySummary]) -> None:
    """Raise InternalError unless `trajectories` are a whole group of the claimed prompt."""
    num_keys = len({trajectory.key for trajectory in trajectories})
    if num_keys != len(trajectories) or num_keys < claim.num_trajectories:
        raise InternalError(
            f"prompt {claim.uid!r}: {num_keys} different keys in {len(trajectories)} trajectories, "
            f"expected at least {claim.num_trajectories}"
        )
