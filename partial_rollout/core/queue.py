"""The prompt queue: every prompt's state, who holds it, and nothing else (no clock of its own, no waiting)."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from partial_rollout.core.lifecycle import Entry, Event, State, UidRegister, check_group, next_state
from partial_rollout.errors import CapacityExceeded, ConfigError, DuplicateUid, InternalError, StaleClaim
from partial_rollout.types import Claim, FinishedGroup, PromptMeta, QueueSnapshot, QueueStatistics, TakeResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from partial_rollout.types import TrajectorySummary

AGENT_LOOP_FAILED = "agent_loop_failed"
"""Drop reason of a prompt whose attempts are used up; one fixed word, because it becomes a metric label."""


class PromptQueue:
    """States of all prompts in flight, and who may work on them.

    ```
              admit            claim              finish           take
        NEW ---------> PENDING ------> ONGOING ----------> DONE ---------> TAKEN
                 in flight +1 ^          |  |                        in flight -1
                              +----------+  +--------> DROPPED(reason)
                   give_back, fail, release_worker     drop, or fail with no attempt left; in flight -1
    ```
    Two capacities are charged. Prompts in flight (pending + ongoing + done) are charged by `admit` up to `capacity`
    and freed by `take` and by dropping. Slots (trajectories in generation) are charged to the worker by `claim`, up to
    its `free_slots`; the *worker* frees each slot when its trajectory ends, not when the group does.

    A claim is current until its prompt leaves ONGOING; a report on any other claim raises StaleClaim and changes
    nothing. Every event costs O(log pending) per prompt it touches; `snapshot` and `restore` alone look at all.
    Not thread-safe: one owner calls it.
    """

    def __init__(self, capacity: int, max_attempts: int, clock: Callable[[], float]) -> None:
        """Raise ConfigError for a capacity or number of attempts below 1; `clock` returns seconds."""
        if capacity < 1 or max_attempts < 1:
            raise ConfigError(f"capacity={capacity} and max_attempts={max_attempts} must both be at least 1")
        self.capacity = capacity
        self._max_attempts = max_attempts
        self._clock = clock
        self._pending: list[tuple[int, Entry]] = []
        # An OrderedDict finds its oldest item in O(1); a dict would scan the holes that earlier claims left.
        self._ongoing: OrderedDict[int, tuple[Claim, Entry]] = OrderedDict()
        self._by_worker: defaultdict[str, dict[int, Claim]] = defaultdict(dict)
        self._done: deque[FinishedGroup] = deque()
        self._uids = UidRegister(num_remembered=capacity)
        self._dropped: Counter[str] = Counter()
        self._num_admitted = self._num_taken = self._num_failed_attempts = self._num_claimed_trajectories = 0
        self._next_order, self._next_claim_id = 0, 1

    @property
    def num_in_flight(self) -> int:
        """Prompts pending, ongoing or done."""
        return len(self._pending) + len(self._ongoing) + len(self._done)

    @property
    def next_group_size(self) -> int:
        """Slots that the next pending prompt needs; 0 when none is pending."""
        return self._pending[0][1].meta.num_trajectories if self._pending else 0

    def admit(self, prompts: Sequence[PromptMeta]) -> None:
        """Make `prompts` pending, all or none; raises ConfigError, DuplicateUid or CapacityExceeded."""
        self._check_admission(prompts)
        for meta in prompts:
            self._enter(meta)

    def can_claim(self, free_slots: int) -> bool:
        """Whether `claim` with `free_slots` would return at least one claim."""
        return 0 < self.next_group_size <= free_slots

    def claim(self, worker_id: str, free_slots: int) -> list[Claim]:
        """Claims for `worker_id` in queue order, up to the first prompt whose group does not fit in `free_slots`."""
        claims: list[Claim] = []
        while self.can_claim(free_slots):
            claims.append(self._start(heappop(self._pending)[1], worker_id))
            free_slots -= claims[-1].num_trajectories
        return claims

    def finish(self, claim: Claim, trajectories: Sequence[TrajectorySummary]) -> None:
        """Make the claimed prompt done; raises StaleClaim, or InternalError for a group that is not whole."""
        self._current(claim)
        check_group(claim, trajectories)
        meta = self._end(claim, Event.FINISH).meta
        self._done.append(FinishedGroup(meta.uid, meta.global_step, meta.source_index, tuple(trajectories)))

    def fail(self, claim: Claim) -> bool:
        """Charge a failed attempt. True: given back for another one; False: dropped, attempts are used up."""
        entry = self._current(claim)
        entry.failures += 1
        if entry.failures >= self._max_attempts:
            self.drop(claim, AGENT_LOOP_FAILED)
            return False
        self._num_failed_attempts += 1
        self.give_back(claim)
        return True

    def drop(self, claim: Claim, reason: str) -> None:
        """Let the claimed prompt go for good; `reason` is a short fixed word, since it becomes a metric label."""
        self._uids.retire(self._end(claim, Event.DROP).meta.uid)
        self._dropped[reason] += 1

    def give_back(self, claim: Claim) -> None:
        """Make the claimed prompt pending again, ahead of fresher ones, without charging an attempt."""
        entry = self._end(claim, Event.GIVE_BACK)
        heappush(self._pending, (entry.order, entry))

    def release_worker(self, worker_id: str) -> list[str]:
        """Give back all claims of a lost worker; returns their uids in claim order."""
        claims = list(self._by_worker[worker_id].values())
        for claim in claims:
            self._current(claim).losses += 1
            self.give_back(claim)
        del self._by_worker[worker_id]
        return [claim.uid for claim in claims]

    def take(self, num_groups: int) -> TakeResult:
        """Exactly `num_groups` groups, oldest finished first, or none and how many prompts are missing in flight."""
        if num_groups < 1:
            raise ConfigError(f"num_groups={num_groups} must be at least 1")
        if len(self._done) < num_groups:
            return TakeResult(num_missing=max(0, num_groups - self.num_in_flight))
        return TakeResult(groups=tuple(self._take_one() for _ in range(num_groups)))

    def statistics(self) -> QueueStatistics:
        """Counts at this moment."""
        claim, entry = next(iter(self._ongoing.values()), (None, None))
        return QueueStatistics(
            admitted=self._num_admitted,
            pending=len(self._pending),
            ongoing=len(self._ongoing),
            done=len(self._done),
            taken=self._num_taken,
            dropped=dict(self._dropped),
            failed_attempts=self._num_failed_attempts,
            claimed_trajectories=self._num_claimed_trajectories,
            oldest_ongoing_s=self._clock() - entry.claimed_at if entry else 0.0,
            oldest_ongoing_uid=claim.uid if claim else "",
            oldest_ongoing_worker=claim.worker_id if claim else "",
        )

    def snapshot(self) -> QueueSnapshot:
        """All that `restore` needs; O(prompts in flight)."""
        pending = [entry for _, entry in sorted(self._pending)]
        ongoing = [entry for _, entry in self._ongoing.values()]
        return QueueSnapshot(
            pending=tuple(entry.meta for entry in pending),
            ongoing=tuple(entry.meta for entry in ongoing),
            done=tuple(self._done),
            admitted=self._num_admitted,
            taken=self._num_taken,
            dropped=dict(self._dropped),
            failed_attempts=self._num_failed_attempts,
            failures={entry.meta.uid: entry.failures for entry in pending + ongoing if entry.failures},
            next_claim_id=self._next_claim_id,
        )

    @classmethod
    def restore(
        cls, snapshot: QueueSnapshot, capacity: int, max_attempts: int, clock: Callable[[], float]
    ) -> PromptQueue:
        """A queue that continues from `snapshot`; what was ongoing is pending again, ahead of what was pending.

        More prompts may be in flight than a smaller `capacity` allows; `admit` then refuses until enough are taken.
        Raises InternalError for a snapshot that lost a prompt or holds one twice.
        """
        queue = cls(capacity, max_attempts, clock)
        for meta in snapshot.ongoing + snapshot.pending:
            queue._enter(meta, num_failures=snapshot.failures.get(meta.uid, 0))
        queue._done.extend(snapshot.done)
        queue._uids.live.update(group.uid for group in snapshot.done)
        queue._dropped.update(snapshot.dropped)
        queue._num_taken = snapshot.taken
        queue._num_failed_attempts = snapshot.failed_attempts
        queue._next_claim_id = snapshot.next_claim_id
        queue._num_admitted = snapshot.admitted
        queue._check_conservation()
        return queue

    def _check_admission(self, prompts: Sequence[PromptMeta]) -> None:
        if self.num_in_flight + len(prompts) > self.capacity:
            raise CapacityExceeded(
                f"admitting {len(prompts)} prompts with {self.num_in_flight} in flight exceeds capacity {self.capacity}"
            )
        uids: set[str] = set()
        for meta in prompts:
            if meta.num_trajectories < 1:
                raise ConfigError(f"prompt {meta.uid!r}: num_trajectories={meta.num_trajectories} must be at least 1")
            if meta.uid in self._uids or meta.uid in uids:
                raise DuplicateUid(f"prompt {meta.uid!r} was admitted before")
            uids.add(meta.uid)

    def _check_conservation(self) -> None:
        now = self.statistics()
        if not now.conserved or len(self._uids.live) != now.in_flight:
            raise InternalError(f"a snapshot with {len(self._uids.live)} uids in flight does not add up: {now}")

    def _enter(self, meta: PromptMeta, num_failures: int = 0) -> None:
        entry = Entry(meta, order=self._next_order, failures=num_failures)
        entry.move(Event.ADMIT)
        heappush(self._pending, (entry.order, entry))
        self._uids.live.add(meta.uid)
        self._next_order += 1
        self._num_admitted += 1

    def _start(self, entry: Entry, worker_id: str) -> Claim:
        entry.move(Event.CLAIM)
        entry.claimed_at = self._clock()
        meta, attempt = entry.meta, 1 + entry.failures + entry.losses
        claim = Claim(meta.uid, self._next_claim_id, worker_id, meta.num_trajectories, meta.global_step, attempt)
        self._next_claim_id += 1
        self._ongoing[claim.claim_id] = (claim, entry)
        self._by_worker[worker_id][claim.claim_id] = claim
        self._num_claimed_trajectories += claim.num_trajectories
        return claim

    def _current(self, claim: Claim) -> Entry:
        current, entry = self._ongoing.get(claim.claim_id, (None, None))
        if entry is None or current != claim:
            raise StaleClaim(f"claim {claim.claim_id} of worker {claim.worker_id!r} on prompt {claim.uid!r} has ended")
        return entry

    def _end(self, claim: Claim, event: Event) -> Entry:
        entry = self._current(claim)
        entry.move(event)
        del self._ongoing[claim.claim_id]
        del self._by_worker[claim.worker_id][claim.claim_id]
        self._num_claimed_trajectories -= claim.num_trajectories
        return entry

    def _take_one(self) -> FinishedGroup:
        group = self._done.popleft()
        next_state(group.uid, State.DONE, Event.TAKE)
        self._uids.retire(group.uid)
        self._num_taken += 1
        return group
