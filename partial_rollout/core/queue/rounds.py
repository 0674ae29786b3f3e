"""Prompts that wait, and the round that says which of them may go and what its batch must contain."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING

from partial_rollout.core.queue.lifecycle import Entry, Event
from partial_rollout.core.queue.tail import RoundView

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from partial_rollout.core.queue.tail import RoundPlan, TailPolicy
    from partial_rollout.types import Claim


class Rounds:
    """Pending and deferred prompts under a tail policy.

    begin -> pop_next (may start), resumed (go on) ... finished, dropped, restart -> choose -> end (defer the rest)

    Without rounds (`policy.in_rounds` is false) prompts start at any time and nothing is deferred.
    """

    def __init__(self, policy: TailPolicy) -> None:
        self.policy = policy
        self.deferred: dict[str, Entry] = {}
        """By uid, most often deferred first, then in the order of admission."""
        self._pending: list[tuple[bool, int, Entry]] = []
        self._num_startable: float = 0 if policy.in_rounds else math.inf
        self._required: dict[str, None] = {}
        self._missing: set[str] = set()

    @property
    def num_pending(self) -> int:
        """Pending prompts, whether they may start or not."""
        return len(self._pending)

    @property
    def num_startable(self) -> int:
        """Pending prompts that may start now."""
        return int(min(self._num_startable, len(self._pending)))

    @property
    def next_group_size(self) -> int:
        """Slots that the next prompt needs; 0 when none may start."""
        return self._pending[0][2].meta.num_trajectories if self.num_startable else 0

    def begin(self, num_ongoing: int, num_done: int) -> tuple[RoundPlan, list[Claim]]:
        """Let the policy plan a round; returns the claims whose prompts go on. Those without a claim start again."""
        deferrals = [entry.deferrals for entry in self.deferred.values()]
        plan = self.policy.plan(RoundView(len(self._pending), num_ongoing, num_done, deferrals))
        resumed = list(islice(self.deferred.values(), plan.num_resumed))
        self._num_startable = plan.num_started
        self._required = {entry.meta.uid: None for entry in resumed[: plan.num_required]}
        self._missing = set(self._required)
        for entry in resumed:
            del self.deferred[entry.meta.uid]
            if entry.claim is None:
                entry.move(Event.RESTART)
                self.restart(entry)
        return plan, [entry.claim for entry in resumed if entry.claim is not None]

    def push(self, entry: Entry) -> None:
        """Let a pending prompt wait; one that the batch must contain is ahead of all others."""
        heappush(self._pending, (entry.meta.uid not in self._required, entry.order, entry))

    def pop_next(self) -> Entry:
        """The prompt to start."""
        self._num_startable -= 1
        return heappop(self._pending)[2]

    def restart(self, entry: Entry) -> None:
        """Let a prompt that takes part in the round wait: it may start (again)."""
        self._num_startable += 1
        self.push(entry)

    def finished(self, uid: str) -> None:
        """The prompt is done."""
        self.deferred.pop(uid, None)
        self._missing.discard(uid)

    def dropped(self, uid: str) -> None:
        """The prompt is not trained; if it took part in the round, another may start for it."""
        if self.deferred.pop(uid, None) is None:
            self._num_startable += 1
        self._required.pop(uid, None)
        self._missing.discard(uid)

    def can_choose(self, num_groups: int, num_done: int) -> bool:
        """Whether a batch is done."""
        return num_done >= num_groups and not self._missing

    def choose(self, num_groups: int, done: Iterable[str]) -> list[str]:
        """Uids of the batch that is taken: required ones, then the oldest of `done`."""
        others = (uid for uid in done if uid not in self._required)
        return [*self._required, *islice(others, num_groups - len(self._required))]

    def end(self, unfinished: Iterable[Entry]) -> None:
        """Defer what the round leaves behind; whatever was deferred before is so once more."""
        self._num_startable, self._required = 0, {}
        left_behind = [*self.deferred.values(), *unfinished]
        for entry in left_behind:
            entry.deferrals += 1
        self._set_deferred(left_behind)

    def restore(self, entries: Sequence[Entry], *, num_deferred: int) -> None:
        """Take over pending entries, of which the first were deferred."""
        for entry in entries[:num_deferred]:
            entry.move(Event.DEFER)
        self._set_deferred(entries[:num_deferred])
        for entry in entries[num_deferred:]:
            self.push(entry)

    def pending(self) -> list[Entry]:
        """Pending prompts in the order in which they would start."""
        return [entry for _, _, entry in sorted(self._pending)]

    def _set_deferred(self, entries: Iterable[Entry]) -> None:
        ordered = sorted(entries, key=lambda entry: (-entry.deferrals, entry.order))
        self.deferred = {entry.meta.uid: entry for entry in ordered}
