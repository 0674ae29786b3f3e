"""The prompt queue: every prompt's state, who holds it, and nothing else (no clock of its own, no waiting)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partial_rollout.core.queue import snapshots
from partial_rollout.core.queue.census import AGENT_LOOP_FAILED, TOO_STALE, Census
from partial_rollout.core.queue.claims import ClaimBook
from partial_rollout.core.queue.done import DoneGroups
from partial_rollout.core.queue.lifecycle import Entry, Event, State, check_group
from partial_rollout.core.queue.rounds import Rounds
from partial_rollout.core.queue.staleness import UNBOUNDED, StalenessBound
from partial_rollout.errors import CapacityExceeded, ConfigError
from partial_rollout.types import FinishedGroup, TakeResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from partial_rollout.core.queue.tail import RoundPlan, TailPolicy
    from partial_rollout.types import Claim, PromptMeta, QueueSnapshot, QueueStatistics, TrajectorySummary


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
    Past a bound that discards tokens, `expire` (unfinished) and `discard_expired` (done) drop a prompt or restart it.

    Two capacities are charged. Prompts in flight (all but TAKEN and DROPPED) are charged by `admit` up to the policy's
    `capacity` or what `take` found missing, freed by `take` and by dropping. Slots (trajectories in generation) are
    charged to the worker by `claim`, up to its `free_slots`; the *worker* frees each when its trajectory ends.

    Every event costs O(log pending) per prompt it touches; `begin_round` and `take` look at the deferred prompts too,
    `take_long_running` at the ongoing ones, `snapshot` and `restore` at all. Not thread-safe: one owner calls it.
    """

    def __init__(
        self, policy: TailPolicy, max_attempts: int, clock: Callable[[], float], bound: StalenessBound = UNBOUNDED
    ) -> None:
        """Raise ConfigError for a number of attempts below 1; `clock` returns seconds."""
        if max_attempts < 1:
            raise ConfigError(f"max_attempts={max_attempts} must be at least 1")
        self._max_attempts = max_attempts
        self._claims = ClaimBook(clock)
        self._rounds = Rounds(policy)
        self.policy, self.bound = policy, bound
        self._done = DoneGroups(bound)
        self._census = Census(num_remembered=policy.capacity)
        self._num_owed = 0

    @property
    def num_in_flight(self) -> int:
        """Prompts pending, ongoing, deferred or done, without those that have expired."""
        return self._census.in_flight - self._done.num_expired

    @property
    def next_group_size(self) -> int:
        """Slots that the next pending prompt needs; 0 when none may be claimed."""
        return self._rounds.next_group_size

    @property
    def is_claimable(self) -> bool:
        """Whether a worker with enough slots could claim."""
        return bool(self.next_group_size or self._claims.num_resumed)

    @property
    def version(self) -> int:
        """Weight version that generates now; tokens of prompts that begin are at least as new."""
        return self._claims.ages.version

    @version.setter
    def version(self, version: int) -> None:
        self._claims.ages.version = version
        self._done.expire(version)

    def num_due(self, num_groups: int) -> int:
        """Unfinished prompts that a batch of `num_groups` waits for, lest they pass the staleness bound later."""
        waits = self.bound.finishes and not self.policy.in_rounds
        return self._claims.ages.num_due(self.bound, num_groups) if waits else 0

    def admit(self, prompts: Sequence[PromptMeta]) -> None:
        """Make `prompts` pending, all or none; raises ConfigError, DuplicateUid or CapacityExceeded."""
        num, now, capacity = len(prompts), self.num_in_flight, self.policy.capacity
        if now + num > capacity and num > self._num_owed:
            raise CapacityExceeded(f"admitting {num} prompts with {now} in flight exceeds capacity {capacity}")
        self._census.require_new(prompts)
        self._num_owed = max(0, self._num_owed - num)
        for meta in prompts:
            entry = Entry(meta, self._census.enter(meta.uid))
            entry.move(Event.ADMIT)
            self._rounds.push(entry)

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
        trainable = self._done.add(entry, FinishedGroup(uid, step, source, tuple(trajectories), entry.deferrals))
        (self._rounds.finished if trainable else self._rounds.dropped)(uid)

    def fail(self, claim: Claim) -> bool:
        """Charge a failed attempt. True: given back for another one; False: dropped, attempts are used up."""
        return self._retry(claim, AGENT_LOOP_FAILED)

    def expire(self, claim: Claim) -> bool:
        """Its tokens are past the bound. True: it begins again, which is another attempt; False: it is dropped."""
        if self.bound.past == "restart":
            return self._retry(claim, TOO_STALE)
        self.drop(claim, TOO_STALE)
        return False

    def drop(self, claim: Claim, reason: str) -> None:
        """Let the claimed prompt go for good; `reason` is a short fixed word, since it becomes a metric label."""
        uid = self._claims.end(claim, Event.DROP).meta.uid
        self._rounds.dropped(uid)
        self._census.drop(uid, reason)

    def give_back(self, claim: Claim) -> None:
        """Make it pending again, ahead of fresher ones, at no charge; a deferred one starts again in its turn."""
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

    def take_long_running(self, limit_s: float) -> list[tuple[Claim, float]]:
        """Claims ongoing for more than `limit_s`, with their ages in seconds; each is returned once."""
        return self._claims.take_long_running(limit_s)

    def can_take(self, num_groups: int) -> bool:
        """Whether `take` would return groups or a number of missing prompts."""
        return self._can_take_now(num_groups) or self._num_missing(num_groups) > 0

    def take(self, num_groups: int) -> TakeResult:
        """Exactly `num_groups` groups, required ones and then the oldest; or how many prompts to admit before."""
        if num_groups < 1:
            raise ConfigError(f"num_groups={num_groups} must be at least 1")
        if not self._can_take_now(num_groups):
            self._num_owed = self._num_missing(num_groups)
            return TakeResult(num_missing=self._num_owed)
        groups = tuple(map(self._done.take, self._rounds.choose(num_groups, self._done.in_order())))
        self._census.take(group.uid for group in groups)
        self._done.expire(self.version + 1)
        deferred: tuple[Claim, ...] = ()
        if self.policy.in_rounds:
            left_behind = self._claims.defer_all()
            self._rounds.end(left_behind)
            deferred = tuple(entry.claim for entry in left_behind if entry.claim is not None)
        return TakeResult(groups, deferred=deferred, expired=self._done.hand_over())

    def discard_expired(self) -> list[str]:
        """Restart groups that `take` called expired, whose rows are gone; returns the uids of those dropped instead."""
        dropped: list[str] = []
        for entry in self._done.discard():
            if self.bound.past == "restart" and entry.charge(is_restart=True) < self._max_attempts:
                self._census.retry(TOO_STALE)
                entry.move(Event.RESTART)
                self._rounds.push(entry)
            else:
                entry.move(Event.DROP)
                self._census.drop(entry.meta.uid, TOO_STALE)
                dropped.append(entry.meta.uid)
        return dropped

    def statistics(self) -> QueueStatistics:
        """Counts at this moment."""
        return snapshots.count(self._rounds, self._claims, self._done, self._census)

    def snapshot(self) -> QueueSnapshot:
        """All that `restore` needs; O(prompts in flight)."""
        return snapshots.save(self._rounds, self._claims, self._done, self._census)

    @classmethod
    def restore(
        cls,
        snapshot: QueueSnapshot,
        policy: TailPolicy,
        max_attempts: int,
        clock: Callable[[], float],
        bound: StalenessBound = UNBOUNDED,
    ) -> PromptQueue:
        """A queue that continues from `snapshot`; what was ongoing is pending again, ahead of what was pending.

        More prompts may be in flight than a smaller capacity allows: `admit` refuses all but what `take` finds missing.
        Raises InternalError for a snapshot that lost a prompt or holds one twice.
        """
        queue = cls(policy, max_attempts, clock, bound)
        snapshots.load(snapshot, queue._rounds, queue._claims, queue._done, queue._census)
        queue._census.require_conserved(queue.statistics())
        return queue

    def _can_take_now(self, num_groups: int) -> bool:
        return self._rounds.can_choose(num_groups, len(self._done)) and not self.num_due(num_groups)

    def _num_missing(self, num_groups: int) -> int:
        """Prompts without which the round cannot fill its batch."""
        return max(0, num_groups - len(self._done) - len(self._claims.ongoing) - self._rounds.num_startable)

    def _retry(self, claim: Claim, reason: str) -> bool:
        entry = self._claims.entry(claim)
        if entry.charge(is_restart=reason == TOO_STALE) >= self._max_attempts:
            self.drop(claim, reason)
            return False
        self._census.retry(reason)
        self.give_back(claim)
        return True
