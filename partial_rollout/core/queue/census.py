"""Counts of prompts that came and went, and the uids of those in flight."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from partial_rollout.core.queue.lifecycle import UidRegister
from partial_rollout.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from partial_rollout.types import PromptMeta, QueueSnapshot, QueueStatistics

AGENT_LOOP_FAILED = "agent_loop_failed"
"""Drop reason of a prompt whose attempts are used up; one fixed word, because it becomes a metric label."""
TOO_STALE = "too_stale"
"""Drop reason of a prompt whose tokens are past the staleness bound."""


class Census:
    """enter -> in flight -> take, or drop(reason); `retry(reason)` counts attempts that were not the last.

    Reasons are short fixed words, since they become metric labels.
    """

    def __init__(self, num_remembered: int) -> None:
        """`num_remembered` uids are known for a while after they have left."""
        self.admitted = self.taken = 0
        self.dropped: Counter[str] = Counter()
        self.retried: Counter[str] = Counter()
        self._next_order = 0  # not `admitted`, which a snapshot sets back
        self._uids = UidRegister(num_remembered)

    @property
    def in_flight(self) -> int:
        """Prompts that entered and have not left."""
        return len(self._uids.live)

    def require_new(self, prompts: Sequence[PromptMeta]) -> None:
        """Raise ConfigError or DuplicateUid unless all `prompts` may enter together."""
        self._uids.require_new(prompts)

    def enter(self, uid: str) -> int:
        """A prompt is admitted; returns its number in the order of admission."""
        self._uids.live.add(uid)
        self.admitted += 1
        self._next_order += 1
        return self._next_order

    def take(self, uids: Iterable[str]) -> None:
        """Prompts are trained."""
        for uid in uids:
            self._uids.retire(uid)
            self.taken += 1

    def drop(self, uid: str, reason: str) -> None:
        """A prompt is gone for good."""
        self._uids.retire(uid)
        self.dropped[reason] += 1

    def retry(self, reason: str) -> None:
        """An attempt has ended and another one follows."""
        self.retried[reason] += 1

    def restore(self, snapshot: QueueSnapshot) -> None:
        """Take over the counts of prompts that are no longer in flight, and the sum."""
        self.admitted, self.taken = snapshot.admitted, snapshot.taken
        self.dropped.update(snapshot.dropped)
        self.retried.update({AGENT_LOOP_FAILED: snapshot.failed_attempts, TOO_STALE: snapshot.restarted})

    def require_conserved(self, now: QueueStatistics) -> None:
        """Raise InternalError if a prompt is lost or held twice."""
        if not now.conserved or self.in_flight != now.in_flight:
            raise InternalError(f"a snapshot with {self.in_flight} uids in flight does not add up: {now}")
