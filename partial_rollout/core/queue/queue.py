"""The prompt queue: the state of every prompt and who may work on it. It has no clock of its own and never waits."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from partial_rollout.core.queue import ledger
from partial_rollout.core.queue.claims import ClaimBook
from partial_rollout.core.queue.ledger import AGENT_LOOP_FAILED, NO_SPREAD, TOO_STALE, WORKER_LOST, Ledger
from partial_rollout.core.queue.lifecycle import MAX_LOSSES, Event, State
from partial_rollout.core.queue.rounds import Rounds
from partial_rollout.core.queue.spread import shared_metric
from partial_rollout.core.queue.staleness import UNBOUNDED, StalenessBound
from partial_rollout.core.queue.tail import Partial
from partial_rollout.core.queue.whole import WholeQueue
from partial_rollout.errors import CapacityExceeded, ConfigError, InternalError
from partial_rollout.types import FinishedGroup, PromptMeta, ReleaseResult, TakeResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from partial_rollout.core.queue.lifecycle import Entry
    from partial_rollout.core.queue.tail import RoundPlan, TailPolicy
    from partial_rollout.types import Claim, QueueSnapshot, QueueStatistics, TrajectorySummary


class PromptQueue:
    """The states of all prompts in flight, and who may work on them. Each event is one method.

    ```
              admit            claim              finish           take
        NEW ---------> PENDING ------> ONGOING ----------> DONE ---------> TAKEN
                 in flight +1 ^         | ^ |  ^             |       in flight -1
                    give_back | +-------+ | |  +-- DEFERRED  |   take defers what is unfinished, with its tokens;
                         fail +-+         | +----------^     |   begin_round lets it go on
                              |           +--> DROPPED       |   drop, fail with no attempt left, or finish without
                              |                  ^           |   spread, or the loss of too many workers; in flight -1
            discard_expired   +------------------+-- CLEARING <-- EXPIRED <-- (too old)
    ```
    DONE prompts expire only under a staleness bound that discards tokens. A group without spread is dropped only where
    groups are filtered; `take` asks for another prompt in its place at once.

    Two capacities are charged. Prompts in flight (all but TAKEN and DROPPED) are charged by `admit`, up to the policy's
    `capacity` or to what `take` found missing; `take` and dropping free them. Slots (trajectories in generation) are
    charged to the worker by `claim`, up to its `free_slots`; the *worker* frees each slot when its trajectory ends.

    Every event costs O(log pending) per prompt it touches. `begin_round` and `take` look at the deferred prompts too,
    `take_long_running` at the ongoing ones, `snapshot` and `restore` at all. Not thread-safe: one owner calls it.

    >>> from partial_rollout.core.queue.tail import Partial
    >>> from partial_rollout.types import TrajectorySummary
    >>> queue = PromptQueue(Partial(capacity=2), max_attempts=2, clock=lambda: 0.0)
    >>> queue.admit([PromptMeta(uid, num_trajectories=1, global_step=1) for uid in ("a", "b")])
    >>> (claim,) = queue.claim("worker-0", free_slots=1)
    >>> queue.finish(claim, [TrajectorySummary("a_0_0", prompt_len=3, response_len=5, min_version=0, max_version=0)])
    True
    >>> [group.uid for group in queue.take(num_groups=1).groups]
    ['a']
    >>> now = queue.statistics()
    >>> now.pending, now.taken, now.conserved
    (1, 1, True)
    """

    def __init__(
        self, policy: TailPolicy, max_attempts: int, clock: Callable[[], float], bound: StalenessBound = UNBOUNDED
    ) -> None:
        """Raise ConfigError for a number of attempts below 1; `clock` returns seconds."""
        if max_attempts < 1:
            raise ConfigError(f"max_attempts={max_attempts} must be at least 1")
        self.policy, self.bound = policy, bound
        self._max_attempts = max_attempts
        self._ledger = Ledger(num_remembered=policy.capacity)
        self._claims = ClaimBook(clock)
        self._rounds = Rounds(policy)
        self._num_owed = 0
        """Prompts that `take` found missing: they may be admitted beyond the capacity."""
        self._num_unreplaced = 0
        """Groups without spread that were dropped in this round and not replaced."""
        self._filtered: Counter[float] = Counter()
        """Groups without spread since the last answer of `take`, by their metric."""
        self._oldest_allowed = 0
        """A finished group with older tokens than this version expires."""

    # ---- the trainer's events ----

    def admit(self, prompts: Sequence[PromptMeta]) -> None:
        """Make `prompts` pending, all or none; raises ConfigError, DuplicateUid or CapacityExceeded."""
        # The check comes before any change: a caller that is refused may try again with fewer prompts.
        num, now, capacity = len(prompts), self.num_in_flight, self.policy.capacity
        if now + num > capacity and num > self._num_owed:
            raise CapacityExceeded(f"admitting {num} prompts with {now} in flight exceeds capacity {capacity}")
        self._ledger.require_new(prompts)
        self._num_owed = max(0, self._num_owed - num)
        for meta in prompts:
            entry = self._ledger.enter(meta)
            # In the order of the dataloader, which is the order in which a round starts them.
            entry.move(Event.ADMIT)
            self._rounds.push(entry)

    def begin_round(self) -> RoundPlan:
        """Let the policy decide the next round and carry it out; the caller admits the plan's `num_fresh` prompts."""
        plan, resumed = self._rounds.begin(len(self._claims.ongoing), len(self._ledger.done))
        self._num_unreplaced = 0  # the plan has seen that they are gone
        for entry in resumed:
            if entry.claim is None:
                # The prompt's worker was lost, or the run was restarted: nobody holds the prompt.
                entry.move(Event.RESTART)
                self._rounds.rejoin(entry)
            else:
                entry.move(Event.RESUME)
                self._claims.resume(entry.claim)
        return plan

    def take(self, num_groups: int, wanted: Sequence[str] = ()) -> TakeResult:
        """Exactly `num_groups` groups, required ones and then the oldest; or how many prompts to admit before.

        With `wanted`, the groups of these uids in their order, and no others; missing are those not in flight.
        """
        if num_groups < 1:
            raise ConfigError(f"num_groups={num_groups} must be at least 1")
        if not self.has_batch(num_groups, wanted):
            # The trainer may ask more than once for the same batch: what is owed is counted anew, not added up.
            self._num_owed = self._num_missing(num_groups, wanted)
            if wanted:
                # The round was planned without them, if a prompt that was dropped at the first try has finished now.
                self._rounds.let_start(self._num_owed)
            num_filtered, self._num_unreplaced = self._num_unreplaced, 0
            return TakeResult(num_missing=self._num_owed, num_filtered=num_filtered, filtered=self._take_filtered())
        chosen = wanted or self._rounds.choose(num_groups, self._uids_done())
        taken = [self._ledger.take(uid) for uid in chosen]
        for entry in taken:
            entry.move(Event.TAKE)
        # This batch is trained at `version`; whatever is left is trained at the next version at the earliest.
        self._expire_done(self.version + 1)
        expired = self._ledger.start_clearing()
        for entry in expired:
            entry.move(Event.CLEAR)
        deferred, filtered = self._defer_unfinished(), self._take_filtered()
        return TakeResult(groups=_groups(taken), deferred=deferred, expired=_groups(expired), filtered=filtered)

    def discard_expired(self) -> list[str]:
        """Let go of the groups that `take` returned as expired, whose rows the caller has cleared.

        Their prompts start again, or are dropped: returns the uids of the dropped ones.
        """
        dropped: list[str] = []
        for entry in self._ledger.end_clearing():
            entry.group = None
            if self.bound.past == "restart" and self._has_attempts_left(entry, TOO_STALE):
                entry.move(Event.RESTART)
                self._rounds.push(entry)
            else:
                entry.move(Event.DROP)
                self._ledger.drop(entry.meta.uid, TOO_STALE)
                dropped.append(entry.meta.uid)
        return dropped

    def resize(self, policy: TailPolicy) -> None:
        """Go on with a policy of the same kind that allows another number of prompts in flight.

        Nobody is turned out by a smaller one: until enough prompts are trained, `admit` takes only what `take` misses.
        """
        self.policy = self._rounds.policy = policy

    # ---- a worker's events ----

    def claim(self, worker_id: str, free_slots: int) -> list[Claim]:
        """The worker's resumed claims, whether they fit or not; then pending prompts in order while they fit.

        A prompt that may have killed its workers (`Entry.is_suspect`) is passed over while the worker runs another one.
        """
        # Resumed trajectories wait in this worker with their tokens, so nobody else can run them: they go on even where
        # the slots have been given to others meanwhile.
        claims = self._claims.fetch_resumed(worker_id)
        free_slots -= sum(claim.num_trajectories for claim in claims)
        # A prompt that does not fit is not overtaken by a smaller one, or it would starve.
        while 0 < self._next_group_size(worker_id) <= free_slots:
            entry = self._rounds.pop_next(runs_suspect=self._runs_suspect(worker_id))
            entry.move(Event.CLAIM)
            claims.append(self._claims.start(entry, worker_id))
            free_slots -= entry.meta.num_trajectories
        return claims

    def finish(self, claim: Claim, trajectories: Sequence[TrajectorySummary]) -> bool:
        """Make the claimed prompt done. False: its trajectories have no spread, the prompt is dropped.

        Raises StaleClaim, or InternalError for a group that is not whole.
        """
        self._claims.entry(claim)  # a stale claim is refused before its trajectories are looked at
        _require_whole(claim, trajectories)
        shared = shared_metric(trajectories)
        # Decided here and not by the worker: whoever decides counts the group as missing in the same event, so that the
        # trainer cannot see a batch that will never be full.
        if shared is not None:
            self.drop(claim, NO_SPREAD)
            self._filtered[shared] += 1
            self._num_unreplaced += 1
            return False
        entry = self._end_claim(claim, Event.FINISH)
        uid, step, source = entry.meta.uid, entry.meta.global_step, entry.meta.source_index
        self._ledger.finish(entry, FinishedGroup(uid, step, source, tuple(trajectories), entry.deferrals))
        if self._expire_if_too_old(entry):
            # For the round the prompt is lost: another one may start in its place.
            self._rounds.dropped(uid)
        else:
            self._rounds.finished(uid)
        return True

    def fail(self, claim: Claim) -> bool:
        """Charge a failed attempt. True: another attempt follows; False: that was the last one, the prompt is dropped.

        Raises StaleClaim.
        """
        return self._retry(claim, AGENT_LOOP_FAILED)

    def expire(self, claim: Claim) -> bool:
        """The prompt's tokens are past the staleness bound. True: it starts again; False: it is dropped.

        Raises StaleClaim.
        """
        if self.bound.past == "restart":
            return self._retry(claim, TOO_STALE)
        self.drop(claim, TOO_STALE)
        return False

    def drop(self, claim: Claim, reason: str) -> None:
        """Let the claimed prompt go for good, counted under the fixed word `reason`; raises StaleClaim."""
        uid = self._end_claim(claim, Event.DROP).meta.uid
        self._rounds.dropped(uid)
        self._ledger.drop(uid, reason)

    def give_back(self, claim: Claim) -> None:
        """Make the claimed prompt pending again, ahead of fresher ones, without charging an attempt.

        A deferred prompt stays deferred: it starts again in its turn. Raises StaleClaim.
        """
        entry = self._end_claim(claim, Event.GIVE_BACK)
        if entry.state is State.PENDING:
            self._rounds.rejoin(entry)

    def fence_worker(self, worker_id: str) -> list[Claim]:
        """Refuse the late reports of a lost worker, so that its rows can be cleared; returns its claims, oldest first.

        Its prompts stay with it until `release_worker`: nobody else may write their rows before.
        """
        return self._claims.fence(worker_id)

    def release_worker(self, worker_id: str, going_on: Sequence[str] = ()) -> ReleaseResult:
        """Give back all claims of a worker that was lost, and so was fenced before, or that stops, and was not.

        Each prompt of a lost worker is charged a loss. One with `MAX_LOSSES` is dropped, and then no other prompt is a
        suspect (`Entry.is_suspect`) any more. Tokens of the prompts `going_on` were found elsewhere: their next claims
        go on from these.
        """
        is_lost, claims = self._claims.unfence(worker_id), self._claims.of_worker(worker_id)
        entries = [self._claims.entry(claim) for claim in claims]
        # A deferred suspect may be beside another one: nobody can tell which of them it was, so both are tried again.
        may_be_last = sum(entry.is_suspect for entry in entries) == 1
        given_back: list[str] = []
        dropped: list[Claim] = []
        for claim, entry in zip(claims, entries, strict=True):
            if is_lost and (may_be_last or not entry.is_suspect):
                entry.losses += 1
            if entry.losses >= MAX_LOSSES:
                self.drop(claim, WORKER_LOST)
                dropped.append(claim)
                continue
            begun = entry.begun
            self.give_back(claim)
            given_back.append(claim.uid)
            if claim.uid in going_on:
                entry.begun = self._claims.ages.begin(begun)
        if dropped:
            # The others have lost the same workers, and would still be generated one after the other.
            for entry in self._claims.entries():
                entry.acquit()
            self._rounds.acquit()
        return ReleaseResult(tuple(given_back), tuple(dropped))

    # ---- what may happen next ----

    @property
    def num_in_flight(self) -> int:
        """Prompts pending, ongoing, deferred or done; those whose finished trajectories are too old do not count."""
        return self._ledger.num_in_flight - self._ledger.num_too_old

    @property
    def next_group_size(self) -> int:
        """Slots that the next pending prompt needs; 0 when no prompt may be claimed."""
        return self._rounds.next_group_size()

    @property
    def has_startable_suspect(self) -> bool:
        """Whether a prompt may be claimed by some workers only: by those of which no other suspect is ongoing."""
        return self._rounds.has_startable_suspect

    @property
    def version(self) -> int:
        """Weight version that generates now; tokens of prompts that begin are at least as new."""
        return self._claims.ages.version

    @version.setter
    def version(self, version: int) -> None:
        self._claims.ages.version = version
        self._expire_done(version)

    def num_due(self, num_groups: int) -> int:
        """Unfinished prompts for which a batch of `num_groups` waits, lest they pass the staleness bound later."""
        waits = self.bound.finishes and not self.policy.in_rounds
        return self._claims.ages.num_due(self.bound, num_groups) if waits else 0

    def can_claim(self, worker_id: str, free_slots: int) -> bool:
        """Whether `claim` would return at least one claim."""
        return self._claims.has_resumed(worker_id) or 0 < self._next_group_size(worker_id) <= free_slots

    def can_take(self, num_groups: int, wanted: Sequence[str] = ()) -> bool:
        """Whether `take` would return groups or a number of missing prompts."""
        return self.has_batch(num_groups, wanted) or self._num_missing(num_groups, wanted) > 0

    def has_batch(self, num_groups: int, wanted: Sequence[str] = ()) -> bool:
        """Whether `take` would return groups."""
        if wanted:
            is_done = all(uid in self._ledger.done for uid in wanted)
        else:
            is_done = self._rounds.can_choose(num_groups, len(self._ledger.done))
        return is_done and not self.num_due(num_groups)

    def take_long_running(self, limit_s: float) -> list[tuple[Claim, float]]:
        """Claims ongoing for more than `limit_s`, with their ages in seconds; each is returned once."""
        return self._claims.take_long_running(limit_s)

    def uids_of_worker(self, worker_id: str) -> list[str]:
        """Prompts that a worker has claims on, oldest first."""
        return [claim.uid for claim in self._claims.of_worker(worker_id)]

    # ---- as one value ----

    def statistics(self) -> QueueStatistics:
        """Counts at this moment."""
        return ledger.count(self._ledger, self._claims, self._rounds)

    def require_conserved(self) -> None:
        """Raise InternalError, which lists what does not add up, unless every prompt is where it should be."""
        ledger.require_conserved(self._ledger, self._claims, self._rounds)

    def snapshot(self) -> QueueSnapshot:
        """All that `restore` needs; O(prompts in flight)."""
        return ledger.save(self._ledger, self._claims, self._rounds)

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
        queue._load(snapshot)
        # A checkpoint that lost a prompt is refused here; later, a batch would be waited for in vain.
        queue._ledger.require_conserved(queue.statistics())
        return queue

    def whole(self) -> WholeQueue:
        """All that `load_whole` needs for a queue that answers each event as this one does; O(prompts in flight)."""
        ledger, claims, rounds = self._ledger.whole(), self._claims.whole(), self._rounds.whole()
        held = {id(entry): entry for entry in self._claims.entries()}
        held |= {id(entry): entry for entry in (*self._rounds.pending(), *self._rounds.deferred.values())}
        held |= {id(entry): entry for entry in self._ledger.finished()}
        return WholeQueue(
            entries=sorted(held.values(), key=lambda entry: entry.order),
            ledger=ledger,
            claims=claims,
            rounds=rounds,
            num_owed=self._num_owed,
            num_unreplaced=self._num_unreplaced,
            filtered={float(metric): num for metric, num in self._filtered.items()},
            oldest_allowed=self._oldest_allowed,
            capacity=self.policy.capacity,
        )

    def load_whole(self, whole: WholeQueue) -> None:
        """Become the queue that `whole` was made of; this one was made in the same way, and is new."""
        entries = {entry.meta.uid: entry for entry in whole.entries}
        self._ledger.load_whole(whole.ledger, entries)
        self._claims.load_whole(whole.claims, entries)
        self._rounds.load_whole(whole.rounds, entries)
        self._num_owed, self._num_unreplaced = whole.num_owed, whole.num_unreplaced
        self._filtered, self._oldest_allowed = Counter(whole.filtered), whole.oldest_allowed
        if isinstance(self.policy, Partial):
            self.resize(Partial(whole.capacity))

    def _load(self, snapshot: QueueSnapshot) -> None:
        unfinished = [self._load_unfinished(meta, snapshot) for meta in snapshot.unfinished]
        num_deferred = len(snapshot.deferred)
        # Deferred prompts come first in `snapshot.unfinished`; nobody has a claim on them after a restart.
        for entry in unfinished[:num_deferred]:
            entry.move(Event.DEFER)
        self._rounds.defer(unfinished[:num_deferred])
        for entry in unfinished[num_deferred:]:
            self._rounds.push(entry)
        for group in snapshot.done:
            entry = self._ledger.enter(PromptMeta(group.uid, group.num_sessions, group.global_step, group.source_index))
            entry.move(Event.FINISH)
            self._ledger.finish(entry, group)
        self._claims.next_id = snapshot.next_claim_id
        # Last: entering the prompts has counted them as admitted, and the snapshot's count includes them.
        self._ledger.load(snapshot)

    def _load_unfinished(self, meta: PromptMeta, snapshot: QueueSnapshot) -> Entry:
        entry = self._ledger.enter(meta)
        entry.move(Event.ADMIT)
        entry.failures = snapshot.failures.get(meta.uid, 0)
        entry.restarts = snapshot.restarts.get(meta.uid, 0)
        entry.losses = snapshot.losses.get(meta.uid, 0)
        entry.deferrals = snapshot.deferrals.get(meta.uid, 0)
        if meta.uid in snapshot.begun:
            entry.begun = self._claims.ages.begin(snapshot.begun[meta.uid])
        return entry

    # ---- parts of events ----

    def _runs_suspect(self, worker_id: str) -> bool:
        # Asked only where it matters, since it looks at all claims of the worker.
        return self._rounds.has_startable_suspect and self._claims.runs_suspect(worker_id)

    def _next_group_size(self, worker_id: str) -> int:
        return self._rounds.next_group_size(runs_suspect=self._runs_suspect(worker_id))

    def _end_claim(self, claim: Claim, event: Event) -> Entry:
        entry = self._claims.entry(claim)
        entry.move(event)
        self._claims.end(claim)
        return entry

    def _retry(self, claim: Claim, reason: str) -> bool:
        if not self._has_attempts_left(self._claims.entry(claim), reason):
            self.drop(claim, reason)
            return False
        self.give_back(claim)
        return True

    def _has_attempts_left(self, entry: Entry, reason: str) -> bool:
        """Charge the prompt an attempt that ended for `reason`; attempts of each reason are charged apart."""
        if reason == TOO_STALE:
            num = entry.restarts = entry.restarts + 1
        else:
            num = entry.failures = entry.failures + 1
        if num >= self._max_attempts:
            return False
        self._ledger.retried[reason] += 1
        return True

    def _defer_unfinished(self) -> tuple[Claim, ...]:
        """Defer what a batch leaves behind, if the policy binds prompts to a round; returns the claims held back."""
        if not self.policy.in_rounds:
            return ()
        # Claims stay with their workers, which keep the tokens: a deferred prompt goes on where it was.
        left_behind = self._claims.defer_all()
        for entry in left_behind:
            entry.move(Event.DEFER)
        self._rounds.end(left_behind)
        return tuple(entry.claim for entry in left_behind if entry.claim is not None)

    def _expire_done(self, trained_version: int) -> None:
        """Put apart the groups that are too old for an update of `trained_version`, and so for any later one."""
        if not self.bound.discards:
            return
        self._oldest_allowed = max(self._oldest_allowed, self.bound.oldest(trained_version))
        # A copy, because expiring takes the entry out of what is iterated.
        for entry in list(self._ledger.done.values()):
            self._expire_if_too_old(entry)

    def _expire_if_too_old(self, entry: Entry) -> bool:
        if not self.bound.discards or entry.group is None or entry.group.min_version >= self._oldest_allowed:
            return False
        entry.move(Event.EXPIRE)
        self._ledger.expire(entry)
        return True

    def _uids_done(self) -> Iterator[str]:
        """Oldest finished first; under a staleness bound those with the oldest tokens first."""
        done = self._ledger.done
        if self.bound.max_staleness is None:
            return iter(done)
        ages = {uid: entry.group.min_version for uid, entry in done.items() if entry.group is not None}
        return iter(sorted(done, key=ages.__getitem__))

    def _num_missing(self, num_groups: int, wanted: Sequence[str]) -> int:
        """Prompts without which the round cannot fill its batch, and those that replace groups without spread."""
        if wanted:
            return self._ledger.num_unknown(wanted)
        num_coming = len(self._claims.ongoing) + self._rounds.num_startable
        return max(0, num_groups - len(self._ledger.done) - num_coming, self._num_unreplaced)

    def _take_filtered(self) -> dict[float, int]:
        filtered, self._filtered = dict(self._filtered), Counter()
        return filtered


def _groups(entries: Sequence[Entry]) -> tuple[FinishedGroup, ...]:
    return tuple(entry.group for entry in entries if entry.group is not None)


def _require_whole(claim: Claim, trajectories: Sequence[TrajectorySummary]) -> None:
    """Raise InternalError unless `trajectories` are a whole group of the claimed prompt."""
    num_keys = len({trajectory.key for trajectory in trajectories})
    if num_keys != len(trajectories) or num_keys < claim.num_trajectories:
        raise InternalError(
            f"prompt {claim.uid!r}: {num_keys} different keys in {len(trajectories)} trajectories, "
            f"expected at least {claim.num_trajectories}"
        )
