"""Prompts that wait, and the current round: which of them may start, and which the batch must contain."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING

from partial_rollout.core.queue.lifecycle import Entry
from partial_rollout.core.queue.tail import RoundView
from partial_rollout.core.queue.whole import WholeRounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from partial_rollout.core.queue.tail import RoundPlan, TailPolicy

Waiting = tuple[bool, int, Entry]
"""A pending prompt: whether the batch may do without it, its order and its entry."""


class Rounds:
    """Pending and deferred prompts under a tail policy.

    begin -> pop_next for each prompt that starts -> finished, dropped, rejoin ... -> choose -> end

    A policy that does not bind prompts to a round (`in_rounds` is false) lets them start at any time and defers none.

    A worker that runs a suspect (`Entry.is_suspect`) is given no other one: when it was lost with both, nobody could
    tell which of them has killed it. It passes over the suspects that wait; all other workers start prompts in order.
    """

    def __init__(self, policy: TailPolicy) -> None:
        self.policy = policy
        self.deferred: dict[str, Entry] = {}
        """Deferred prompts by uid: most often deferred first, then in the order of admission."""
        self._pending: list[Waiting] = []
        """A heap; the prompts that the batch must contain come first, then the order of admission counts."""
        self._suspects: list[Waiting] = []
        """A heap like `_pending`, of the pending prompts that are suspects."""
        self._num_startable: float = 0 if policy.in_rounds else math.inf
        self._required: dict[str, None] = {}
        """Uids that the batch must contain, in the order in which they are taken."""
        self._missing: set[str] = set()
        """The required uids that are not done."""

    @property
    def num_pending(self) -> int:
        """Pending prompts, whether they may start or not."""
        return len(self._pending) + len(self._suspects)

    @property
    def num_startable(self) -> int:
        """Pending prompts that may start now."""
        # `_num_startable` is infinite where the policy does not bind prompts to a round.
        return int(min(self._num_startable, self.num_pending))

    @property
    def has_startable_suspect(self) -> bool:
        """Whether a prompt may start that not every worker is given."""
        return bool(self._suspects and self.num_startable)

    def next_group_size(self, *, runs_suspect: bool = False) -> int:
        """Slots that the next prompt needs; 0 when no prompt may start. `runs_suspect`: at a worker that does."""
        heap = self._next_heap(runs_suspect=runs_suspect)
        return heap[0][2].meta.num_trajectories if heap else 0

    def begin(self, num_ongoing: int, num_done: int) -> tuple[RoundPlan, list[Entry]]:
        """Let the policy plan a round; returns the plan and the deferred prompts that take part in the round."""
        deferrals = [entry.deferrals for entry in self.deferred.values()]
        plan = self.policy.plan(RoundView(self.num_pending, num_ongoing, num_done, deferrals))
        resumed = list(islice(self.deferred.values(), plan.num_resumed))
        self._num_startable = plan.num_started
        # The policy asked for these to be trained now, since they are overdue or make up a long round.
        self._required = {entry.meta.uid: None for entry in resumed[: plan.num_required]}
        self._missing = set(self._required)
        for entry in resumed:
            del self.deferred[entry.meta.uid]
        return plan, resumed

    def push(self, entry: Entry) -> None:
        """Let a pending prompt wait."""
        self._push((entry.meta.uid not in self._required, entry.order, entry))

    def pop_next(self, *, runs_suspect: bool = False) -> Entry:
        """The prompt to start, as in `next_group_size`, which is above 0."""
        heap = self._next_heap(runs_suspect=runs_suspect)
        self._num_startable -= 1
        return heappop(heap)[2]

    def rejoin(self, entry: Entry) -> None:
        """Let a pending prompt wait that takes part in the round: it may start, or start again."""
        self._num_startable += 1
        self.push(entry)

    def acquit(self) -> None:
        """Pending and deferred prompts are no suspects any more: the one that killed their workers was found."""
        for entry in self.deferred.values():
            entry.acquit()
        waiting, self._suspects = self._suspects, []
        for each in waiting:
            each[2].acquit()
            self._push(each)

    def let_start(self, num_more: int) -> None:
        """Let all pending prompts start in this round, and `num_more` that will be admitted for a batch by name."""
        self._num_startable = max(self._num_startable, self.num_pending + num_more)

    def finished(self, uid: str) -> None:
        """The prompt is done."""
        self.deferred.pop(uid, None)
        self._missing.discard(uid)

    def dropped(self, uid: str) -> None:
        """The prompt is not trained; if it took part in the round, another prompt may start in its place."""
        if self.deferred.pop(uid, None) is None:
            self._num_startable += 1  # without a replacement the round could not fill its batch
        self._required.pop(uid, None)
        self._missing.discard(uid)

    def can_choose(self, num_groups: int, num_done: int) -> bool:
        """Whether a batch of `num_groups` is done."""
        return num_done >= num_groups and not self._missing

    def choose(self, num_groups: int, done: Iterable[str]) -> list[str]:
        """Uids of the batch: the required ones, then the first of `done`."""
        others = (uid for uid in done if uid not in self._required)
        return [*self._required, *islice(others, num_groups - len(self._required))]

    def end(self, unfinished: Iterable[Entry]) -> None:
        """The round is over: `unfinished` prompts are deferred, and those that had been deferred are so once more."""
        self._num_startable, self._required = 0, {}
        left_behind = [*self.deferred.values(), *unfinished]
        for entry in left_behind:
            entry.deferrals += 1
        self.defer(left_behind)

    def defer(self, entries: Iterable[Entry]) -> None:
        """Let `entries`, and no others, be deferred."""
        # Most often deferred first: the policy resumes from the front, so no prompt is passed over for ever.
        ordered = sorted(entries, key=lambda entry: (-entry.deferrals, entry.order))
        self.deferred = {entry.meta.uid: entry for entry in ordered}

    def pending(self) -> list[Entry]:
        """Pending prompts in the order in which they would start."""
        return [entry for _, _, entry in self._sorted()]

    def whole(self) -> WholeRounds:
        """All of it but the entries."""
        return WholeRounds(
            deferred=list(self.deferred),
            pending=[(is_other, entry.meta.uid) for is_other, _, entry in self._sorted()],
            num_startable=float(self._num_startable),
            required=list(self._required),
            missing=sorted(self._missing),
        )

    def load_whole(self, whole: WholeRounds, entries: Mapping[str, Entry]) -> None:
        """Become the rounds that `whole` was made of; `entries` by uid."""
        self.deferred = {uid: entries[uid] for uid in whole.deferred}
        for is_other, uid in whole.pending:
            self._push((is_other, entries[uid].order, entries[uid]))
        self._num_startable, self._missing = whole.num_startable, set(whole.missing)
        self._required = dict.fromkeys(whole.required)

    def _push(self, waiting: Waiting) -> None:
        heappush(self._suspects if waiting[2].is_suspect else self._pending, waiting)

    def _next_heap(self, *, runs_suspect: bool) -> list[Waiting]:
        """The heap whose first prompt starts next; empty when no prompt may start."""
        if not self.num_startable:
            return []
        if runs_suspect:
            # A start is kept for each suspect that waits: a round that must contain it would not end without.
            return self._pending if self._num_startable > len(self._suspects) else []
        if not self._pending or not self._suspects:
            return self._pending or self._suspects
        return min(self._pending, self._suspects, key=lambda heap: heap[0][:2])

    def _sorted(self) -> list[Waiting]:
        return sorted([*self._pending, *self._suspects])
