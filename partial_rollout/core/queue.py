"""The prompt queue: every prompt's state, who holds it, and nothing else (no clock of its own, no waiting)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from partial_rollout.core.claims import ClaimBook
from partial_rollout.core.lifecycle import Entry, Event, State, UidRegister, check_group, next_state
from partial_rollout.core.rounds import Rounds
from partial_rollout.errors import CapacityExceeded, ConfigError, InternalError
from partial_rollout.types import FinishedGroup, QueueSnapshot, QueueStatistics, TakeResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from partial_rollout.core.tail import RoundPlan, TailPolicy
    from partial_rollout.types import Claim, PromptMeta, TrajectorySummary

AGENT_LOOP_FAILED = "agent_loop_failed"
"""Drop reason of a prompt whose attempts are used up; one fixed word, because it becomes a metric label."""


class PromptQueue:
    """States of all prompts in flight, and who may work on them.

    ```
              admit            claim              finish           take
        NEW ---------> PENDING ------> ONGOING ----------> DONE ---------> TAKEN
                 in flight +1 ^         | ^ |  ^                     in flight -1
                    give_back | +-------+ | |  +-- DEFERRED   take defers what is unfinished, with its tokens;
                         fail +-+         | +----------^      begin_round lets it go on
                                          +--> DROPPED(reason)   drop, or fail with no attempt left; in flight -1
    ```
    Two capacities are charged. Prompts in flight (all but TAKEN and DROPPED) are charged by `admit` up to the policy's
    `capacity` or what `take` found missing, freed by `take` and by dropping. Slots (trajectories in generation) are
    charged to the worker by `claim`, up to its `free_slots`; the *worker* frees each when its trajectory ends.

    Every event costs O(log pending) per prompt it touches; `begin_round` and `take` look at the deferred prompts too,
    `snapshot` and `restore` at all. Not thread-safe: one owner calls it.
    """

    def __init__(self, policy: TailPolicy, max_attempts: int, clock: Callable[[], float]) -> None:
        """Raise ConfigError for a number of attempts below 1; `clock` returns seconds."""
        if max_attempts < 1:
            raise ConfigError(f"max_attempts={max_attempts} must be at least 1")
        self._max_attempts = max_attempts
        self._claims = ClaimBook(clock)
        self._rounds = Rounds(policy)
        self.policy = policy
        self._done: OrderedDict[str, FinishedGroup] = OrderedDict()
        self._uids = UidRegister(num_remembered=policy.capacity)
        self._dropped: Counter[str] = Counter()
        self._num_admitted = self._num_taken = self._num_failed_attempts = self._next_order = self._num_owed = 0

    @property
    def num_in_flight(self) -> int:
        """Prompts pending, ongoing, deferred or done."""
        return len(self._uids.live)

    @property
    def next_group_size(self) -> int:
        """Slots that the next pending prompt needs; 0 when none may be claimed."""
        return self._rounds.next_group_size

    @property
    def is_claimable(self) -> bool:
        """Whether a worker with enough slots could claim."""
        return bool(self.next_group_size or self._claims.num_resumed)

    def admit(self, prompts: Sequence[PromptMeta]) -> None:
        """Make `prompts` pending, all or none; raises ConfigError, DuplicateUid or CapacityExceeded."""
        self._check_admission(prompts)
        self._num_owed = max(0, self._num_owed - len(prompts))
        for meta in prompts:
            self._rounds.push(self._enter(meta, QueueSnapshot()))

    def begin_round(self) -> RoundPlan:
        """Let the policy decide the next round and carry it out; the caller admits `num_fresh` prompts."""
        plan, held = self._rounds.begin(len(self._claims.ongoing), len(self._done))
        for claim in held:
            self._claims.resume(claim)
        return plan

    def can_claim(self, worker_id: str, free_slots: int) -> bool:
        """Whether `claim` would return at least one claim."""
        return self._claims.has_resumed(worker_id) or 0 < self.next_group_size <= free_slots

    def claim(self, worker_id: str, free_slots: int) -> list[Claim]:
        """Its resumed claims, whether their slots are free or not, then pending prompts in order while they fit."""
        claims = self._claims.take_resumed(worker_id)
        free_slots -= sum(claim.num_trajectories for claim in claims)
        while 0 < self.next_group_size <= free_slots:
            claims.append(self._claims.start(self._rounds.pop_next(), worker_id))
            free_slots -= claims[-1].num_trajectories
        return claims

    def finish(self, claim: Claim, trajectories: Sequence[TrajectorySummary]) -> None:
        """Make the claimed prompt done; raises StaleClaim, or InternalError for a group that is not whole."""
        self._claims.entry(claim)
        check_group(claim, trajectories)
        entry = self._claims.end(claim, Event.FINISH)
        uid, step, source = entry.meta.uid, entry.meta.global_step, entry.meta.source_index
        self._rounds.finished(uid)
        self._done[uid] = FinishedGroup(uid, step, source, tuple(trajectories), entry.deferrals)

    def fail(self, claim: Claim) -> bool:
        """Charge a failed attempt. True: given back for another one; False: dropped, attempts are used up."""
        entry = self._claims.entry(claim)
        entry.failures += 1
        if entry.failures >= self._max_attempts:
            self.drop(claim, AGENT_LOOP_FAILED)
            return False
        self._num_failed_attempts += 1
        self.give_back(claim)
        return True

    def drop(self, claim: Claim, reason: str) -> None:
        """Let the claimed prompt go for good; `reason` is a short fixed word, since it becomes a metric label."""
        uid = self._claims.end(claim, Event.DROP).meta.uid
        self._rounds.dropped(uid)
        self._uids.retire(uid)
        self._dropped[reason] += 1

    def give_back(self, claim: Claim) -> None:
        """Make the claimed prompt pending again, ahead of fresher ones, without charging an attempt.

        A deferred one stays deferred, and starts again when its turn comes.
        """
        entry = self._claims.end(claim, Event.GIVE_BACK)
        if entry.state is State.PENDING:
            self._rounds.restart(entry)

    def release_worker(self, worker_id: str) -> list[str]:
        """Give back all claims of a lost worker; returns their uids in claim order."""
        claims = self._claims.of_worker(worker_id)
        for claim in claims:
            self._claims.entry(claim).losses += 1
            self.give_back(claim)
        return [claim.uid for claim in claims]

    def can_take(self, num_groups: int) -> bool:
        """Whether `take` would return groups or a number of missing prompts."""
        return self._rounds.can_choose(num_groups, len(self._done)) or self._num_missing(num_groups) > 0

    def take(self, num_groups: int) -> TakeResult:
        """Exactly `num_groups` groups, required ones and then the oldest finished, and what is deferred thereby.

        Without them nothing is taken, and the result says how many prompts must be admitted first.
        """
        if num_groups < 1:
            raise ConfigError(f"num_groups={num_groups} must be at least 1")
        if not self._rounds.can_choose(num_groups, len(self._done)):
            self._num_owed = self._num_missing(num_groups)
            return TakeResult(num_missing=self._num_owed)
        groups = tuple(self._take_one(uid) for uid in self._rounds.choose(num_groups, self._done))
        if not self.policy.in_rounds:
            return TakeResult(groups)
        left_behind = self._claims.defer_all()
        self._rounds.end(left_behind)
        return TakeResult(groups, deferred=tuple(entry.claim for entry in left_behind if entry.claim is not None))

    def statistics(self) -> QueueStatistics:
        """Counts at this moment."""
        return QueueStatistics(
            admitted=self._num_admitted,
            pending=self._rounds.num_pending,
            ongoing=len(self._claims.ongoing),
            deferred=len(self._rounds.deferred),
            done=len(self._done),
            taken=self._num_taken,
            dropped=dict(self._dropped),
            failed_attempts=self._num_failed_attempts,
            claimed_trajectories=self._claims.num_trajectories,
            **self._claims.oldest(),
        )

    def snapshot(self) -> QueueSnapshot:
        """All that `restore` needs; O(prompts in flight)."""
        pending, deferred = self._rounds.pending(), list(self._rounds.deferred.values())
        ongoing = list(self._claims.ongoing.values())
        unfinished = deferred + ongoing + pending
        return QueueSnapshot(
            pending=tuple(entry.meta for entry in pending),
            ongoing=tuple(entry.meta for entry in ongoing),
            deferred=tuple(entry.meta for entry in deferred),
            done=tuple(self._done.values()),
            admitted=self._num_admitted,
            taken=self._num_taken,
            dropped=dict(self._dropped),
            failed_attempts=self._num_failed_attempts,
            failures={entry.meta.uid: entry.failures for entry in unfinished if entry.failures},
            deferrals={entry.meta.uid: entry.deferrals for entry in unfinished if entry.deferrals},
            next_claim_id=self._claims.next_id,
        )

    @classmethod
    def restore(
        cls, snapshot: QueueSnapshot, policy: TailPolicy, max_attempts: int, clock: Callable[[], float]
    ) -> PromptQueue:
        """A queue that continues from `snapshot`; what was ongoing is pending again, ahead of what was pending.

        More prompts may be in flight than a smaller capacity allows: `admit` refuses all but what `take` finds missing.
        Raises InternalError for a snapshot that lost a prompt or holds one twice.
        """
        queue = cls(policy, max_attempts, clock)
        entries = [queue._enter(meta, snapshot) for meta in snapshot.unfinished]
        queue._rounds.restore(entries, num_deferred=len(snapshot.deferred))
        queue._done.update((group.uid, group) for group in snapshot.done)
        queue._uids.live.update(queue._done)
        queue._dropped.update(snapshot.dropped)
        queue._num_taken, queue._num_failed_attempts = snapshot.taken, snapshot.failed_attempts
        queue._claims.next_id = snapshot.next_claim_id
        queue._num_admitted = snapshot.admitted
        queue._check_conservation()
        return queue

    def _check_admission(self, prompts: Sequence[PromptMeta]) -> None:
        capacity = self.policy.capacity
        if self.num_in_flight + len(prompts) > capacity and len(prompts) > self._num_owed:
            raise CapacityExceeded(
                f"admitting {len(prompts)} prompts with {self.num_in_flight} in flight exceeds capacity {capacity}"
            )
        self._uids.require_new(prompts)

    def _check_conservation(self) -> None:
        now = self.statistics()
        if not now.conserved or len(self._uids.live) != now.in_flight:
            raise InternalError(f"a snapshot with {len(self._uids.live)} uids in flight does not add up: {now}")

    def _enter(self, meta: PromptMeta, known: QueueSnapshot) -> Entry:
        """A pending entry, with what `known` says of its past."""
        failures, deferrals = known.failures.get(meta.uid, 0), known.deferrals.get(meta.uid, 0)
        entry = Entry(meta, order=self._next_order, failures=failures, deferrals=deferrals)
        entry.move(Event.ADMIT)
        self._uids.live.add(meta.uid)
        self._next_order += 1
        self._num_admitted += 1
        return entry

    def _num_missing(self, num_groups: int) -> int:
        """Prompts without which the round cannot fill its batch."""
        return max(0, num_groups - len(self._done) - len(self._claims.ongoing) - self._rounds.num_startable)

    def _take_one(self, uid: str) -> FinishedGroup:
        group = self._done.pop(uid)
        next_state(group.uid, State.DONE, Event.TAKE)
        self._uids.retire(group.uid)
        self._num_taken += 1
        return group
