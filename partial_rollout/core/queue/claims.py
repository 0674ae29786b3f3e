"""Claims: who may report on which prompt."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from partial_rollout.core.queue.lifecycle import Entry, Event, State
from partial_rollout.core.queue.staleness import Ages
from partial_rollout.errors import StaleClaim
from partial_rollout.types import Claim

if TYPE_CHECKING:
    from collections.abc import Callable


class ClaimBook:
    """Current claims, of ongoing prompts and of deferred ones whose tokens a worker keeps.

    start -> ongoing --defer_all--> deferred --resume--> ongoing; end, from both

    A claim is current until its prompt is done, dropped or given back; a report on any other raises StaleClaim. With it
    end the tokens of an unfinished prompt, so it is here that their age is kept.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self.next_id = 1
        self.ages = Ages()
        self.num_trajectories = 0
        """Trajectories of ongoing prompts."""
        self.ongoing: dict[int, Entry] = {}
        self._deferred: dict[int, Entry] = {}
        self._by_worker: defaultdict[str, dict[int, Claim]] = defaultdict(dict)
        self._resumed: defaultdict[str, dict[int, Claim]] = defaultdict(dict)
        self._clock = clock

    @property
    def num_resumed(self) -> int:
        """Workers that have resumed claims to fetch."""
        return len(self._resumed)

    def start(self, entry: Entry, worker_id: str) -> Claim:
        """Claim a pending prompt for `worker_id`."""
        entry.move(Event.CLAIM)
        entry.ongoing_since, entry.ongoing_before_s, entry.is_long_running = self._clock(), 0.0, False
        goes_on = entry.begun is not None
        if entry.begun is None:
            entry.begun = self.ages.begin(None)
        meta, attempt = entry.meta, 1 + entry.failures + entry.restarts + entry.losses
        claim = Claim(meta.uid, self.next_id, worker_id, meta.num_trajectories, meta.global_step, attempt, goes_on)
        self.next_id += 1
        entry.claim = claim
        self.ongoing[claim.claim_id] = entry
        self._by_worker[worker_id][claim.claim_id] = claim
        self.num_trajectories += claim.num_trajectories
        return claim

    def entry(self, claim: Claim) -> Entry:
        """The claimed prompt; raises StaleClaim."""
        entry = self.ongoing.get(claim.claim_id) or self._deferred.get(claim.claim_id)
        if entry is None or entry.claim != claim:
            raise StaleClaim(f"claim {claim.claim_id} of worker {claim.worker_id!r} on prompt {claim.uid!r} has ended")
        return entry

    def end(self, claim: Claim, event: Event) -> Entry:
        """Let the claim end by `event`; raises StaleClaim or IllegalTransition."""
        entry = self.entry(claim)
        self._forget(claim, entry.state)
        entry.move(event)
        entry.claim = None
        if entry.begun is not None:
            self.ages.end(entry.begun)
            entry.begun = None
        del self._by_worker[claim.worker_id][claim.claim_id]
        return entry

    def oldest(self) -> dict[str, Any]:
        """The claim that is ongoing for longest, as fields of QueueStatistics; empty without any."""
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
            if age_s > limit_s and not entry.is_long_running and entry.claim is not None:
                entry.is_long_running = True
                found.append((entry.claim, age_s))
        return found

    def defer_all(self) -> list[Entry]:
        """Every ongoing prompt is held back, and its claim stays with its worker; returns them oldest claim first."""
        left_behind = list(self.ongoing.values())
        for entry in left_behind:
            entry.ongoing_before_s = self._age_s(entry)
            entry.move(Event.DEFER)
        self._deferred |= self.ongoing
        self.ongoing.clear()
        self._resumed.clear()
        self.num_trajectories = 0
        return left_behind

    def resume(self, claim: Claim) -> None:
        """The prompt goes on; its worker is told by its next `take_resumed`."""
        entry = self._deferred.pop(claim.claim_id)
        entry.move(Event.RESUME)
        entry.ongoing_since = self._clock()
        self.ongoing[claim.claim_id] = entry
        self.num_trajectories += claim.num_trajectories
        self._resumed[claim.worker_id][claim.claim_id] = claim

    def has_resumed(self, worker_id: str) -> bool:
        """Whether `take_resumed` would return anything."""
        return worker_id in self._resumed

    def take_resumed(self, worker_id: str) -> list[Claim]:
        """Claims of the worker that were resumed since the last call."""
        return list(self._resumed.pop(worker_id, {}).values())

    def of_worker(self, worker_id: str) -> list[Claim]:
        """Current claims of a worker, oldest first."""
        return list(self._by_worker.get(worker_id, {}).values())

    def _age_s(self, entry: Entry) -> float:
        """Seconds that an ongoing prompt has been so under its claim: interruptions count, time held back does not."""
        return entry.ongoing_before_s + self._clock() - entry.ongoing_since

    def _forget(self, claim: Claim, state: State) -> None:
        if state is State.DEFERRED:
            del self._deferred[claim.claim_id]
            return
        del self.ongoing[claim.claim_id]
        self.num_trajectories -= claim.num_trajectories
        resumed = self._resumed.get(claim.worker_id, {})
        if resumed.pop(claim.claim_id, None) is not None and not resumed:
            del self._resumed[claim.worker_id]
