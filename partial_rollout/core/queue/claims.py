"""Claims: which worker generates which prompt, and so who may report on the prompt."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from partial_rollout.core.queue.staleness import Ages
from partial_rollout.core.queue.whole import WholeClaims
from partial_rollout.errors import StaleClaim
from partial_rollout.types import Claim

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from partial_rollout.core.queue.lifecycle import Entry


class ClaimBook:
    """Current claims, on ongoing prompts and on deferred ones whose tokens a worker keeps.

    start -> ongoing --defer_all--> deferred --resume--> ongoing; `end` from either

    A claim is current until its prompt is finished, dropped or given back; a report on any other claim raises
    StaleClaim. An unfinished prompt loses its tokens when its claim ends, so the claim book also counts, in `ages`, the
    weight versions at which unfinished prompts began.

    >>> from partial_rollout.core.queue.lifecycle import Entry
    >>> from partial_rollout.types import PromptMeta
    >>> book = ClaimBook(clock=lambda: 0.0)
    >>> claim = book.start(Entry(PromptMeta("a", num_trajectories=2, global_step=1), order=0), "worker-0")
    >>> book.entry(claim).meta.uid, book.num_trajectories
    ('a', 2)
    >>> book.end(claim)
    >>> book.entry(claim)
    Traceback (most recent call last):
    partial_rollout.errors.StaleClaim: claim 1 of worker 'worker-0' on prompt 'a' has ended
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self.next_id = 1
        self.ages = Ages()
        self.num_trajectories = 0
        """Trajectories of ongoing prompts."""
        self.ongoing: dict[int, Entry] = {}
        """Ongoing prompts by claim id."""
        self._deferred: dict[int, Entry] = {}
        self._by_worker: defaultdict[str, dict[int, Claim]] = defaultdict(dict)
        self._fenced: set[str] = set()
        """Workers that are lost, whose claims have not been given back yet."""
        self._unfetched: defaultdict[str, dict[int, Claim]] = defaultdict(dict)
        """Resumed claims, by worker and claim id, of which the worker has not heard."""
        self._clock = clock

    def start(self, entry: Entry, worker_id: str) -> Claim:
        """Give `worker_id` a claim on the prompt."""
        entry.ongoing_since_s, entry.ongoing_before_s, entry.was_called_long = self._clock(), 0.0, False
        # A prompt that has begun before it is claimed has tokens: of a checkpoint, or of a worker that was lost.
        goes_on = entry.begun is not None
        if entry.begun is None:
            entry.begun = self.ages.begin(None)
        meta, attempt = entry.meta, 1 + entry.failures + entry.restarts + entry.losses
        claim = Claim(
            meta.uid,
            self.next_id,
            worker_id,
            num_trajectories=meta.num_trajectories,
            global_step=meta.global_step,
            attempt=attempt,
            goes_on=goes_on,
            source_index=meta.source_index,
        )
        # Ids are never used again, not even after a restart (`next_id` is in the snapshot): a late report of an earlier
        # claim must meet StaleClaim and not the claim of somebody else.
        self.next_id += 1
        entry.claim = claim
        self.ongoing[claim.claim_id] = entry
        self._by_worker[worker_id][claim.claim_id] = claim
        self.num_trajectories += claim.num_trajectories
        return claim

    def entry(self, claim: Claim) -> Entry:
        """The claimed prompt; raises StaleClaim, also for a claim of a fenced worker."""
        entry = self.ongoing.get(claim.claim_id) or self._deferred.get(claim.claim_id)
        # Compared as a whole: a report with a wrong uid or worker must not count for another prompt.
        if entry is None or entry.claim != claim or claim.worker_id in self._fenced:
            raise StaleClaim(f"claim {claim.claim_id} of worker {claim.worker_id!r} on prompt {claim.uid!r} has ended")
        return entry

    def end(self, claim: Claim) -> None:
        """Let a current claim end."""
        # A deferred claim was taken off the count of running trajectories when it was deferred.
        entry = self._deferred.pop(claim.claim_id, None)
        if entry is None:
            entry = self.ongoing.pop(claim.claim_id)
            self.num_trajectories -= claim.num_trajectories
            self._forget_unfetched(claim)
        entry.claim = None
        if entry.begun is not None:
            self.ages.end(entry.begun)
            entry.begun = None
        del self._by_worker[claim.worker_id][claim.claim_id]

    def defer_all(self) -> list[Entry]:
        """Hold back every ongoing prompt; its claim stays with its worker. Returns the prompts, oldest claim first."""
        left_behind = list(self.ongoing.values())
        for entry in left_behind:
            entry.ongoing_before_s = self._age_s(entry)
        # A worker that has not fetched its resumed claims need not: they are deferred again.
        self._deferred |= self.ongoing
        self.ongoing.clear()
        self._unfetched.clear()
        self.num_trajectories = 0
        return left_behind

    def resume(self, claim: Claim) -> None:
        """Let a deferred prompt go on; its worker hears of it with its next `fetch_resumed`."""
        entry = self._deferred.pop(claim.claim_id)
        entry.ongoing_since_s = self._clock()
        self.ongoing[claim.claim_id] = entry
        self.num_trajectories += claim.num_trajectories
        self._unfetched[claim.worker_id][claim.claim_id] = claim

    def has_resumed(self, worker_id: str) -> bool:
        """Whether `fetch_resumed` would return anything."""
        return worker_id in self._unfetched

    def fetch_resumed(self, worker_id: str) -> list[Claim]:
        """Claims of the worker that were resumed since the last call."""
        return list(self._unfetched.pop(worker_id, {}).values())

    def of_worker(self, worker_id: str) -> list[Claim]:
        """Current claims of a worker, oldest first."""
        return list(self._by_worker.get(worker_id, {}).values())

    def fence(self, worker_id: str) -> list[Claim]:
        """Refuse whatever the worker reports from now on, until `unfence`; returns its claims, oldest first."""
        self._fenced.add(worker_id)
        return self.of_worker(worker_id)

    def unfence(self, worker_id: str) -> bool:
        """The worker's claims are about to be given back. Whether it was fenced: one that stops was not."""
        is_lost = worker_id in self._fenced
        self._fenced.discard(worker_id)
        return is_lost

    def runs_suspect(self, worker_id: str) -> bool:
        """Whether one of the worker's ongoing prompts is a suspect."""
        # Not one that is deferred: it ends in a later round, and a round whose suspects wait for it would not end.
        return any(
            claim.claim_id in self.ongoing and self.ongoing[claim.claim_id].is_suspect
            for claim in self.of_worker(worker_id)
        )

    def oldest(self) -> dict[str, Any]:
        """The claim that has been ongoing for longest, as fields of QueueStatistics; empty without any claim."""
        entry = max(self.ongoing.values(), key=self._age_s, default=None)
        if entry is None or entry.claim is None:
            return {}
        age_s, claim = self._age_s(entry), entry.claim
        return {"oldest_ongoing_s": age_s, "oldest_ongoing_uid": claim.uid, "oldest_ongoing_worker": claim.worker_id}

    def take_long_running(self, limit_s: float) -> list[tuple[Claim, float]]:
        """Claims ongoing for more than `limit_s` that no call has returned yet, with their ages in seconds."""
        found: list[tuple[Claim, float]] = []
        for entry in self.ongoing.values():
            age_s = self._age_s(entry)
            if age_s > limit_s and not entry.was_called_long and entry.claim is not None:
                entry.was_called_long = True
                found.append((entry.claim, age_s))
        return found

    def entries(self) -> list[Entry]:
        """Prompts with a current claim."""
        return [*self.ongoing.values(), *self._deferred.values()]

    def whole(self) -> WholeClaims:
        """All of it but the entries."""
        return WholeClaims(
            next_id=self.next_id,
            version=self.ages.version,
            ongoing=[entry.meta.uid for entry in self.ongoing.values()],
            deferred=[entry.meta.uid for entry in self._deferred.values()],
            fenced=sorted(self._fenced),
            unfetched={worker: [claim.uid for claim in claims.values()] for worker, claims in self._unfetched.items()},
        )

    def load_whole(self, whole: WholeClaims, entries: Mapping[str, Entry]) -> None:
        """Become the claim book that `whole` was made of; `entries` by uid, in the order of their admission."""
        claims = {uid: entry.claim for uid, entry in entries.items() if entry.claim is not None}
        self.next_id, self.ages.version, self._fenced = whole.next_id, whole.version, set(whole.fenced)
        self.ongoing = {claims[uid].claim_id: entries[uid] for uid in whole.ongoing}
        self._deferred = {claims[uid].claim_id: entries[uid] for uid in whole.deferred}
        for claim in sorted(claims.values(), key=lambda claim: claim.claim_id):
            self._by_worker[claim.worker_id][claim.claim_id] = claim
        for worker, uids in whole.unfetched.items():
            self._unfetched[worker] = {claims[uid].claim_id: claims[uid] for uid in uids}
        self.num_trajectories = sum(entry.meta.num_trajectories for entry in self.ongoing.values())
        for entry in entries.values():
            if entry.begun is not None:
                self.ages.begin(entry.begun)

    def _age_s(self, entry: Entry) -> float:
        """Seconds of an ongoing prompt under its claim, with interruptions and without the time it was deferred."""
        return entry.ongoing_before_s + self._clock() - entry.ongoing_since_s

    def _forget_unfetched(self, claim: Claim) -> None:
        unfetched = self._unfetched.get(claim.worker_id, {})
        # An empty entry would count as something to fetch, and a long poll would return without a claim.
        if unfetched.pop(claim.claim_id, None) is not None and not unfetched:
            del self._unfetched[claim.worker_id]
