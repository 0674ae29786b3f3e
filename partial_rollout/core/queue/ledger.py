"""The ledger of the queue: which prompts are in flight and which are done, how many have left; and all as one value."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import TYPE_CHECKING

from partial_rollout.core.queue.lifecycle import Entry
from partial_rollout.core.queue.whole import WholeLedger
from partial_rollout.errors import ConfigError, DuplicateUid, InternalError
from partial_rollout.types import QueueSnapshot, QueueStatistics

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from partial_rollout.core.queue.claims import ClaimBook
    from partial_rollout.core.queue.rounds import Rounds
    from partial_rollout.types import FinishedGroup, PromptMeta

AGENT_LOOP_FAILED = "agent_loop_failed"
"""Drop reason of a prompt whose attempts are used up. Drop reasons are fixed words, since they become metric labels."""
NO_SPREAD = "no_spread"
"""Drop reason of a prompt whose trajectories all have the same metric, with `algorithm.filter_groups`."""
TOO_STALE = "too_stale"
"""Drop reason of a prompt whose tokens are older than the staleness bound allows."""
WORKER_LOST = "worker_lost"
"""Drop reason of a prompt of which too many attempts ended with the loss of their worker."""
NUM_SHOWN = 8
"""Differences that an error lists."""


class Ledger:
    """Prompts in flight by uid, finished prompts that wait, and counts of the prompts that have left.

    enter -> (in flight) -> finish -> take
                                   -> expire -> start_clearing -> end_clearing
             drop(reason) ends a prompt in any state

    >>> from partial_rollout.types import PromptMeta
    >>> ledger = Ledger(num_remembered=8)
    >>> ledger.require_new([PromptMeta("a", 4, global_step=1)])
    >>> entry = ledger.enter(PromptMeta("a", 4, global_step=1))
    >>> ledger.drop("a", "prompt_too_long")
    >>> ledger.admitted, ledger.num_in_flight, dict(ledger.dropped)
    (1, 0, {'prompt_too_long': 1})
    """

    def __init__(self, num_remembered: int) -> None:
        """The uids of the last `num_remembered` prompts that have left stay known, so that none comes back unseen."""
        self.admitted = self.taken = 0
        self.dropped: Counter[str] = Counter()
        self.retried: Counter[str] = Counter()
        """Attempts that were not a prompt's last one, by the reason of their end."""
        self.done: dict[str, Entry] = {}
        """Finished prompts by uid, oldest finished first."""
        self.expired: dict[str, Entry] = {}
        self.clearing: dict[str, Entry] = {}
        self._next_order = 0  # not `admitted`, which a snapshot sets back
        self._in_flight: set[str] = set()
        # Bounded, and empty after a restart: uids are fresh uuid4s, so one that comes back is a bug that shows soon or
        # never. An OrderedDict forgets its oldest item in O(1); a dict would scan the holes that earlier ones left.
        self._left: OrderedDict[str, None] = OrderedDict()
        self._num_remembered = num_remembered

    @property
    def num_in_flight(self) -> int:
        """Prompts that were admitted and neither taken nor dropped."""
        return len(self._in_flight)

    @property
    def num_too_old(self) -> int:
        """Finished prompts that will not be trained."""
        return len(self.expired) + len(self.clearing)

    def num_unknown(self, uids: Iterable[str]) -> int:
        """How many of these prompts are not on their way to be trained: not admitted, dropped, taken or too old."""
        gone = self.expired.keys() | self.clearing.keys()
        return sum(uid not in self._in_flight or uid in gone for uid in uids)

    def require_new(self, prompts: Sequence[PromptMeta]) -> None:
        """Raise ConfigError or DuplicateUid unless all `prompts` may be admitted together."""
        uids: set[str] = set()
        for meta in prompts:
            if meta.num_trajectories < 1:
                raise ConfigError(f"prompt {meta.uid!r}: num_trajectories={meta.num_trajectories} must be at least 1")
            if meta.uid in self._in_flight or meta.uid in self._left or meta.uid in uids:
                raise DuplicateUid(f"prompt {meta.uid!r} was admitted before")
            uids.add(meta.uid)

    def enter(self, meta: PromptMeta) -> Entry:
        """A prompt is admitted."""
        self._in_flight.add(meta.uid)
        self.admitted += 1
        self._next_order += 1
        return Entry(meta, self._next_order)

    def finish(self, entry: Entry, group: FinishedGroup) -> None:
        """The prompt's trajectories are complete."""
        entry.group = group
        self.done[group.uid] = entry

    def expire(self, entry: Entry) -> None:
        """A finished prompt is too old."""
        self.expired[entry.meta.uid] = self.done.pop(entry.meta.uid)

    def start_clearing(self) -> list[Entry]:
        """The expired prompts, each once: their rows are cleared now."""
        entries = list(self.expired.values())
        self.clearing |= self.expired
        self.expired.clear()
        return entries

    def end_clearing(self) -> list[Entry]:
        """The prompts whose rows were cleared; they are done no more."""
        entries = list(self.clearing.values())
        self.clearing.clear()
        return entries

    def take(self, uid: str) -> Entry:
        """A finished prompt is trained."""
        self._leave(uid)
        self.taken += 1
        return self.done.pop(uid)

    def drop(self, uid: str, reason: str) -> None:
        """A prompt is gone for good."""
        self._leave(uid)
        self.dropped[reason] += 1

    def load(self, snapshot: QueueSnapshot) -> None:
        """Take over the counts of a snapshot whose prompts have been entered."""
        self.admitted, self.taken = snapshot.admitted, snapshot.taken
        self.dropped.update(snapshot.dropped)
        self.retried.update({AGENT_LOOP_FAILED: snapshot.failed_attempts, TOO_STALE: snapshot.restarted})

    def finished(self) -> list[Entry]:
        """Prompts in flight whose trajectories are complete."""
        return [*self.done.values(), *self.expired.values(), *self.clearing.values()]

    def whole(self) -> WholeLedger:
        """All of it but the entries."""
        return WholeLedger(
            admitted=self.admitted,
            taken=self.taken,
            dropped=dict(self.dropped),
            retried=dict(self.retried),
            done=list(self.done),
            expired=list(self.expired),
            clearing=list(self.clearing),
            next_order=self._next_order,
            left=list(self._left),
            num_remembered=self._num_remembered,
        )

    def load_whole(self, whole: WholeLedger, entries: Mapping[str, Entry]) -> None:
        """Become the ledger that `whole` was made of; `entries` by uid."""
        self.admitted, self.taken, self._next_order = whole.admitted, whole.taken, whole.next_order
        self.dropped, self.retried = Counter(whole.dropped), Counter(whole.retried)
        self.done = {uid: entries[uid] for uid in whole.done}
        self.expired = {uid: entries[uid] for uid in whole.expired}
        self.clearing = {uid: entries[uid] for uid in whole.clearing}
        self._in_flight, self._left = set(entries), OrderedDict.fromkeys(whole.left)
        self._num_remembered = whole.num_remembered

    def require_conserved(self, now: QueueStatistics) -> None:
        """Raise InternalError if a prompt is lost or held twice."""
        if not now.conserved or self.num_in_flight != now.in_flight:
            raise InternalError(f"a snapshot with {self.num_in_flight} uids in flight does not add up: {now}")

    def differences(self, held: Mapping[str, Iterable[str]]) -> list[str]:
        """What does not add up, in words, when prompts are `held` in these states; empty if all does."""
        # By prompt and not by sums: a prompt that is lost and another one that is held twice would add up.
        states: defaultdict[str, list[str]] = defaultdict(list)
        for state, uids in held.items():
            for uid in uids:
                states[uid].append(state)
        # Names, and not counts: whoever looks for the bug needs a uid that he finds in events and log.
        found = [f"prompt {uid} is {' and '.join(where)}" for uid, where in states.items() if len(where) > 1]
        found += [f"prompt {uid} is lost" for uid in sorted(self._in_flight - states.keys())]
        found += [f"prompt {uid} is {states[uid][0]}, but has left" for uid in sorted(states.keys() - self._in_flight)]
        gone = self.taken + self.dropped.total()
        if self.admitted != len(self._in_flight) + gone:
            counts = f"{len(self._in_flight)} in flight + {self.taken} trained + {self.dropped.total()} dropped"
            found.append(f"{self.admitted} prompts were admitted, but there are {counts}")
        return found

    def _leave(self, uid: str) -> None:
        self._in_flight.remove(uid)
        # Remembered in the order of leaving, so that the first one is the one to forget.
        self._left[uid] = None
        if len(self._left) > self._num_remembered:
            self._left.popitem(last=False)


def count(ledger: Ledger, claims: ClaimBook, rounds: Rounds) -> QueueStatistics:
    """Counts at this moment."""
    return QueueStatistics(
        admitted=ledger.admitted,
        pending=rounds.num_pending,
        ongoing=len(claims.ongoing),
        deferred=len(rounds.deferred),
        # Too old ones stay done in the counts until their rows are cleared: conservation knows no state between.
        done=len(ledger.done) + ledger.num_too_old,
        taken=ledger.taken,
        dropped=dict(ledger.dropped),
        failed_attempts=ledger.retried[AGENT_LOOP_FAILED],
        restarted=ledger.retried[TOO_STALE],
        claimed_trajectories=claims.num_trajectories,
        **claims.oldest(),
    )


def require_conserved(ledger: Ledger, claims: ClaimBook, rounds: Rounds) -> None:
    """Raise InternalError with the differences unless each prompt in flight is in one state; O(prompts in flight)."""
    held = {
        "pending": [entry.meta.uid for entry in rounds.pending()],
        "ongoing": [entry.meta.uid for entry in claims.ongoing.values()],
        "deferred": list(rounds.deferred),
        "done": list(ledger.done),
        "too old": [*ledger.expired, *ledger.clearing],
    }
    differences = ledger.differences(held)
    if differences:
        shown = "; ".join(differences[:NUM_SHOWN])
        more = f"; and {len(differences) - NUM_SHOWN} more" if len(differences) > NUM_SHOWN else ""
        raise InternalError(f"the prompt queue has lost or doubled prompts, so the run ends: {shown}{more}")


def save(ledger: Ledger, claims: ClaimBook, rounds: Rounds) -> QueueSnapshot:
    """All that `PromptQueue.restore` needs; O(prompts in flight)."""
    pending, deferred, ongoing = rounds.pending(), list(rounds.deferred.values()), list(claims.ongoing.values())
    unfinished = deferred + ongoing + pending
    return QueueSnapshot(
        pending=_metas(pending),
        ongoing=_metas(ongoing),
        deferred=_metas(deferred),
        # `clearing` is empty: the trainer ends a clearing in the call that has taken the batch, and saves later. Groups
        # that expired are saved as done: the bound of the run that goes on says whether they are too old.
        done=tuple(entry.group for held in (ledger.expired, ledger.done) for entry in held.values() if entry.group),
        admitted=ledger.admitted,
        taken=ledger.taken,
        dropped=dict(ledger.dropped),
        failed_attempts=ledger.retried[AGENT_LOOP_FAILED],
        restarted=ledger.retried[TOO_STALE],
        failures={entry.meta.uid: entry.failures for entry in unfinished if entry.failures},
        restarts={entry.meta.uid: entry.restarts for entry in unfinished if entry.restarts},
        losses={entry.meta.uid: entry.losses for entry in unfinished if entry.losses},
        deferrals={entry.meta.uid: entry.deferrals for entry in unfinished if entry.deferrals},
        begun={entry.meta.uid: entry.begun for entry in unfinished if entry.begun is not None},
        next_claim_id=claims.next_id,
    )


def _metas(entries: Iterable[Entry]) -> tuple[PromptMeta, ...]:
    return tuple(entry.meta for entry in entries)
