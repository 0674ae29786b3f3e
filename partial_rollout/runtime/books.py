"""What the prompt manager must know after its process has died: the queue, and what its callers have asked for.

A change is an event of the queue, one of `OF_THE_QUEUE`, or a public method of `Books` where an event is not all of the
change. The journal (journal.py) writes each change down before it is made, and makes it again in a new process. So a
change decides by its arguments, the books and the clock that they were given, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence  # noqa: TC003 - as below
from dataclasses import dataclass
from typing import Any

from partial_rollout.core.queue.lifecycle import MAX_LOSSES
from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.staleness import StalenessBound  # noqa: TC001 - as below
from partial_rollout.core.queue.tail import Partial, RoundPlan, TailPolicy  # noqa: F401 - as below
from partial_rollout.core.queue.whole import WholeQueue  # noqa: TC001 - as below
from partial_rollout.errors import InternalError, StaleClaim

# Not for type checkers only: the journal decodes the arguments of a change by the annotations of the change's method,
# those of the queue included.
from partial_rollout.types import (
    Claim,
    FinishResult,
    PromptMeta,  # noqa: F401 - as above
    QueueSnapshot,
    QueueStatistics,
    ReleaseResult,
    TakeResult,
    TrajectorySummary,
)

OF_THE_QUEUE: tuple[Callable[..., Any], ...] = (
    *(PromptQueue.begin_round, PromptQueue.admit, PromptQueue.discard_expired, PromptQueue.take_long_running),
    *(PromptQueue.claim, PromptQueue.expire, PromptQueue.drop, PromptQueue.give_back, PromptQueue.fence_worker),
)
"""Events that change nothing beside the queue."""


@dataclass(slots=True)
class Desk:
    """What the books have beside the queue."""

    step: int = -1
    """The training step that the trainer reported last; -1 before the first one."""
    weight_version: int = -1
    gate: str = "unknown"
    last_failure: str = ""
    closed: str = ""
    """Why the manager was closed; empty while it is open."""
    stop_reason: str = ""
    """Why the run should end; empty while it should not."""


@dataclass(frozen=True, slots=True)
class WholeBooks:
    """All of `Books`."""

    queue: WholeQueue
    desk: Desk
    beating: list[str]


class Books:
    """The prompt queue, the few words that the manager keeps beside it, and the changes that concern both of them."""

    def __init__(
        self, policy: TailPolicy, max_attempts: int, clock: Callable[[], float], bound: StalenessBound
    ) -> None:
        self._max_attempts, self._clock = max_attempts, clock
        self.queue = PromptQueue(policy, max_attempts, clock, bound)
        self.desk = Desk()
        self.beating: dict[str, None] = {}
        """Processes that have given a sign of life, by name: they owe the next one."""

    # ---- the trainer's changes ----

    def take(self, num_groups: int, wanted: Sequence[str]) -> TakeResult:
        """Take a batch from the queue; raises InternalError unless all prompts are where they should be."""
        result = self.queue.take(num_groups, wanted)
        if result.groups:
            self.queue.require_conserved()
        return result

    def set_capacity(self, capacity: int) -> None:
        """Change the capacity; only the policy `partial` has one that changes."""
        if not isinstance(self.queue.policy, Partial):
            raise InternalError(f"{self.queue.policy} decides by itself how many prompts are in flight")
        self.queue.resize(Partial(capacity))

    def report_step(self, step: int, weight_version: int, gate: str) -> None:
        """Tokens age by the weight version."""
        self.desk.step, self.desk.weight_version, self.desk.gate = step, weight_version, gate
        self.queue.version = weight_version

    def restore(self, snapshot: QueueSnapshot) -> QueueStatistics:
        """Go on from a checkpoint; raises InternalError if prompts were admitted already."""
        if self.queue.statistics().admitted:
            raise InternalError(f"restore after prompts were admitted: {self.queue.statistics()}")
        # The restored queue takes over policy, bound and weight version of the one made at the start.
        old = self.queue
        self.queue = PromptQueue.restore(snapshot, old.policy, self._max_attempts, self._clock, old.bound)
        self.queue.version = old.version
        return self.queue.statistics()

    # ---- the workers' changes ----

    def claim_nothing(self) -> list[Claim]:
        """The answer to a poll that has ended."""
        return []

    def finish_many(self, groups: Sequence[tuple[Claim, Sequence[TrajectorySummary]]]) -> FinishResult:
        """Returns those that are refused or dropped; raises InternalError for a group that is not whole."""
        stale: list[str] = []
        no_spread: list[str] = []
        for claim, trajectories in groups:
            # One stale claim must not keep the other groups of the call from being trained.
            try:
                if not self.queue.finish(claim, trajectories):
                    no_spread.append(claim.uid)
            except StaleClaim:
                stale.append(claim.uid)
        return FinishResult(tuple(stale), tuple(no_spread))

    def fail(self, claim: Claim, reason: str) -> bool:
        """Fail a claim of the queue; `reason` is shown."""
        given_back = self.queue.fail(claim)
        self.desk.last_failure = f"{claim.prompt_name}: {reason}"
        return given_back

    def release_worker(self, worker_id: str, going_on: Sequence[str] = ()) -> ReleaseResult:
        """Release a worker in the queue; the worker owes no sign of life any more."""
        self.forget(worker_id)
        result = self.queue.release_worker(worker_id, going_on)
        for claim in result.dropped:
            self.desk.last_failure = f"{claim.prompt_name}: {MAX_LOSSES} workers were lost with it, last {worker_id}"
        return result

    # ---- changes beside the queue ----

    def beats(self, name: str) -> None:
        """A process has given its first sign of life."""
        self.beating[name] = None

    def forget(self, name: str) -> None:
        """A process owes no sign of life any more."""
        self.beating.pop(name, None)

    def request_stop(self, reason: str) -> bool:
        """False: training has not begun."""
        self.desk.stop_reason = reason
        return self.desk.step > 0

    def close(self, reason: str) -> None:
        """The first reason is kept."""
        self.desk.closed = self.desk.closed or reason or "closed"

    # ---- as one value ----

    def whole(self) -> WholeBooks:
        """All that `load_whole` needs; it shares parts with the books, so it must be used before the next change."""
        return WholeBooks(self.queue.whole(), self.desk, list(self.beating))

    def load_whole(self, whole: WholeBooks) -> None:
        """Become the books that `whole` was made of; these ones were made in the same way, and are new."""
        self.queue.load_whole(whole.queue)
        self.desk, self.beating = whole.desk, dict.fromkeys(whole.beating)
