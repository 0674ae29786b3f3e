"""A whole run's books under injected failures, many times over: nothing is lost, nothing is trained twice.

Each schedule draws its events from its own seed: workers claim, write rows and report; reports travel, and arrive late
and in any order; workers die, and their successors begin; steps, interruptions, checkpoints and restarts from them come
in between. In some schedules prompts kill the workers that generate them. Rows stand for TransferQueue: a row holds the
claim that wrote it. After every event all prompts are accounted for; at the end every prompt can be trained or dropped.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from partial_rollout.core.queue.lifecycle import MAX_LOSSES
from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.staleness import UNBOUNDED, StalenessBound
from partial_rollout.core.queue.tail import FewAtATime, Partial, Reorder, Wait
from partial_rollout.errors import StaleClaim
from partial_rollout.types import Claim, PromptMeta, TrajectorySummary
from tests.unit.core.queue.queues import GROUP, ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from partial_rollout.core.queue.tail import TailPolicy
    from partial_rollout.types import QueueSnapshot

SCHEDULES = 10_000
EVENTS = 40
SCHEDULES_OF_LOSSES = 100
MANY_DEATHS = 12
"""Deaths among the 34 events of a draw; with the usual two, hardly a prompt loses more than two workers."""
NOBODY = frozenset[str]()
BATCH = 2
WORKERS = 3
ROUNDS_TO_END = 60
POLICIES: dict[str, tuple[TailPolicy, StalenessBound]] = {
    "partial": (Partial(3 * BATCH), UNBOUNDED),
    "partial, drop": (Partial(3 * BATCH), StalenessBound(0, "drop")),
    "partial, restart": (Partial(3 * BATCH), StalenessBound(0, "restart")),
    "partial, finish": (Partial(2 * BATCH), StalenessBound(1, "finish")),
    "wait": (Wait(BATCH), UNBOUNDED),
    "reorder": (Reorder(BATCH, BATCH + 1, max_deferrals=2), UNBOUNDED),
    "reorder, few": (FewAtATime(BATCH, BATCH + 1, max_deferrals=2, max_joining=1), UNBOUNDED),
}

IN_THE_LOOP = ("partial, restart", "reorder, few")
"""What `make test-unit` runs too; the others are in `make test`."""


@dataclass
class Worker:
    name: str
    begun: dict[int, tuple[Claim, int]] = field(default_factory=dict)
    """Claims by id, with the weight version at which they began."""
    held: set[int] = field(default_factory=set)


@dataclass
class Checkpoint:
    queue: QueueSnapshot
    trained: list[str]
    version: int
    rows: dict[str, int] | None = None
    """Saved after the queue; until then the checkpoint is not whole."""


class Run:
    """The parts of a run around its queue."""

    def __init__(self, seed: int, policy: TailPolicy, bound: StalenessBound, killers: frozenset[str] = NOBODY) -> None:
        """`killers`: prompts that kill each worker that generates them."""
        self.draw, self.killers = random.Random(seed), killers
        self.policy, self.bound = policy, bound
        self.queue = PromptQueue(policy, 2, ManualClock(), bound)
        self.rows: dict[str, int] = {}
        """The claim that has written a row, by key; 0: a prompt's own row."""
        self.workers: list[Worker] = []
        self.mail: list[tuple[Claim, list[TrajectorySummary], str]] = []
        """Reports on their way; those of dead workers too."""
        self.trained: list[str] = []
        self.owners: dict[str, int] = {}
        """The claim whose report made a prompt done."""
        self.version = self.num_admitted = self.num_workers = 0
        self.dying: tuple[str, list[str]] | None = None
        """A worker whose rows are being cleared, and its prompts."""
        self.losses: Counter[str] = Counter()
        """Workers that were lost with a prompt since the run began, as if no checkpoint was ever gone back to."""
        self.lost: list[str] = []
        """Prompts that were dropped with their worker."""
        self.checkpoint: Checkpoint | None = None
        self.saving: Checkpoint | None = None
        self.log: list[str] = []
        for _ in range(WORKERS):
            self.start_worker()
        self.begin_step()

    # ---- the trainer ----

    def begin_step(self) -> None:
        self.admit(self.queue.begin_round().num_fresh)

    def admit(self, number: int) -> None:
        uids = [f"p{self.num_admitted + i}" for i in range(number)]
        self.num_admitted += number
        self.rows |= dict.fromkeys(uids, 0)
        self.queue.admit([PromptMeta(uid, GROUP, global_step=self.version) for uid in uids])

    def step(self) -> None:
        """Take a batch, train it, update the weights; without a batch admit what is missing, as the trainer does."""
        if self.saving is not None or not self.queue.can_take(BATCH):
            return
        result = self.queue.take(BATCH)
        if not result.groups:
            self.admit(result.num_missing)
            return
        for group in result.groups:
            self.require_rows(group.uid, [each.key for each in group.trajectories])
            self.trained.append(group.uid)
            self.clear([group.uid, *(each.key for each in group.trajectories)])
        for claim in result.deferred:
            for worker in self.workers:
                worker.held |= {claim.claim_id} & worker.begun.keys()
        self.clear([each.key for group in result.expired for each in group.trajectories])
        self.clear(self.queue.discard_expired())
        self.version += 1
        self.queue.version = self.version
        self.begin_step()

    def save(self) -> None:
        """A checkpoint is saved in two steps, and workers go on in between."""
        if self.saving is None:
            self.saving = Checkpoint(self.queue.snapshot(), list(self.trained), self.version)
        else:
            self.saving.rows = dict(self.rows)
            self.checkpoint, self.saving = self.saving, None

    def restart(self) -> None:
        """Everything dies; the run goes on from its last whole checkpoint, in new processes."""
        saved = self.checkpoint
        if saved is None or saved.rows is None:
            return
        lost = {prompt.uid for prompt in saved.queue.unfinished} - saved.rows.keys()
        snapshot = saved.queue.without(lost, "dropped_after_snapshot")
        missing = snapshot.owned_keys() - saved.rows.keys()
        assert not missing, f"a finished group has lost its rows {missing}"
        self.rows = {key: saved.rows[key] for key in snapshot.owned_keys()}
        self.queue = PromptQueue.restore(snapshot, self.policy, 2, ManualClock(), self.bound)
        self.trained, self.version = list(saved.trained), saved.version
        self.queue.version = self.version
        self.mail, self.workers, self.dying, self.saving = [], [], None, None
        for _ in range(WORKERS):
            self.start_worker()
        self.begin_step()

    # ---- the workers ----

    def start_worker(self) -> None:
        self.num_workers += 1
        self.workers.append(Worker(f"w{self.num_workers}"))

    def claim(self) -> None:
        worker = self.draw.choice(self.workers)
        claims = self.queue.claim(worker.name, free_slots=self.draw.choice([0, GROUP, 2 * GROUP]))
        self.require_lonely_suspects(worker.name, claims)
        for claim in claims:
            worker.held.discard(claim.claim_id)
            worker.begun.setdefault(claim.claim_id, (claim, self.version))

    def generate(self) -> None:
        """A trajectory is stored, or the group's report is sent."""
        worker = self.draw.choice(self.workers)
        running = [entry for entry in worker.begun.values() if entry[0].claim_id not in worker.held]
        if not running:
            return
        claim, version = self.draw.choice(running)
        if claim.uid in self.killers:
            if self.dying is None:
                self.die(worker)
            return
        keys = [f"{claim.uid}_{session}_0" for session in range(GROUP)]
        left = [key for key in keys if self.rows.get(key) != claim.claim_id]
        if left:
            self.rows[left[0]] = claim.claim_id
            return
        del worker.begun[claim.claim_id]
        outcome = self.draw.choice(["finish"] * 8 + ["fail", "give back", "drop", "no spread"])
        if outcome not in ("finish", "no spread"):
            self.clear(keys)  # before anybody else may write them
        metric = 1.0 if outcome == "no spread" else None
        summary = TrajectorySummary("", 1, 1, min_version=version, max_version=self.version, metric=metric)
        self.mail.append((claim, [replace(summary, key=key) for key in keys], outcome))

    def deliver(self) -> None:
        if not self.mail:
            return
        claim, trajectories, outcome = self.mail.pop(self.draw.randrange(len(self.mail)))
        try:
            self.report(claim, trajectories, outcome)
        except StaleClaim:
            self.log.append(f"refused {outcome} of claim {claim.claim_id}")

    def report(self, claim: Claim, trajectories: list[TrajectorySummary], outcome: str) -> None:
        keys = [claim.uid, *(each.key for each in trajectories)]
        if outcome in ("finish", "no spread"):
            if self.queue.finish(claim, trajectories):
                self.owners[claim.uid] = claim.claim_id
            else:
                self.clear(keys)
        elif outcome == "fail":
            if not self.queue.fail(claim):
                self.clear([claim.uid])
        elif outcome == "drop":
            self.queue.drop(claim, "bad_data")
            self.clear([claim.uid])
        else:
            self.queue.give_back(claim)

    def die(self, worker: Worker | None = None) -> None:
        """A worker dies. First its reports are refused, then its rows are cleared, then its prompts are given back."""
        if self.dying is None:
            worker = worker or self.draw.choice(self.workers)
            self.workers.remove(worker)
            self.dying = (worker.name, [claim.uid for claim in self.queue.fence_worker(worker.name)])
            return
        name, uids = self.dying
        self.clear([key for key in self.rows if key.rpartition("_")[0].rpartition("_")[0] in uids])
        if self.draw.random() < 0.5:
            return  # clearing takes its time, and repeating it is allowed
        begun = self.queue.snapshot().begun
        going_on = [uid for uid in uids if self.draw.random() < 0.5]
        result = self.queue.release_worker(name, going_on)
        dropped = [claim.uid for claim in result.dropped]
        self.losses.update(uids)
        assert len(dropped) <= 1, f"nobody can tell which of {dropped} has killed {name}"
        assert all(self.losses[uid] >= MAX_LOSSES for uid in dropped)
        assert sorted([*result.given_back, *dropped]) == sorted(uids)
        self.lost += dropped
        self.clear(dropped)
        after = self.queue.snapshot().begun
        going_on = [uid for uid in going_on if uid not in dropped]
        assert {uid: after.get(uid) for uid in uids} == {uid: begun[uid] if uid in going_on else None for uid in uids}
        self.start_worker()
        self.dying = None

    # ---- what must hold ----

    def require_lonely_suspects(self, worker_id: str, claims: list[Claim]) -> None:
        """A worker that has been given a suspect runs no other one, but those that were held back and go on."""
        losses, ongoing = self.queue.snapshot().losses, self.queue._claims.ongoing
        suspects = [uid for uid, num_losses in losses.items() if num_losses == MAX_LOSSES - 1]
        assert max(losses.values(), default=0) < MAX_LOSSES
        begun = {claim.uid for worker in self.workers for claim, _ in worker.begun.values()}
        if any(claim.uid in suspects and claim.uid not in begun for claim in claims):
            mine = [claim.uid for claim in self.queue._claims.of_worker(worker_id) if claim.claim_id in ongoing]
            assert len(set(mine) & set(suspects)) == 1, f"{worker_id} has suspects {mine}"

    def clear(self, keys: list[str]) -> None:
        for key in keys:
            self.rows.pop(key, None)

    def require_rows(self, uid: str, keys: list[str]) -> None:
        """A trained row was written under the claim that was reported."""
        writers = {self.rows.get(key) for key in keys}
        assert writers == {self.owners[uid]}, f"{uid} is trained on rows of claims {writers}"

    def require_conserved(self) -> None:
        self.queue.require_conserved()
        now, snapshot = self.queue.statistics(), self.queue.snapshot()
        assert now.conserved, now
        assert self.queue._claims.ages._begun == Counter(snapshot.begun.values())
        alive = [meta.uid for meta in snapshot.unfinished] + [group.uid for group in snapshot.done]
        assert len(alive) == len(set(alive)) == now.in_flight, f"in flight: {alive}, counted: {now}"
        assert len(self.trained) == len(set(self.trained)) == now.taken, f"trained: {self.trained}, counted: {now}"
        assert not set(alive) & set(self.trained), "a prompt that was trained is in flight again"
        assert set(alive) <= self.rows.keys(), f"prompts without a row: {set(alive) - self.rows.keys()}"
        for group in snapshot.done:
            self.require_rows(group.uid, [each.key for each in group.trajectories])

    def end(self) -> None:
        """Without further failures every prompt of now is trained or dropped."""
        while self.dying is not None:
            self.die()
        left = {meta.uid for meta in self.queue.snapshot().unfinished}
        for _ in range(ROUNDS_TO_END):
            for _ in range(2 * EVENTS):
                for happen in (self.claim, self.generate, self.deliver):
                    happen()
                if self.dying is not None:
                    self.die()
            if self.saving is not None:
                self.save()
            self.step()
            self.require_conserved()
            left &= {meta.uid for meta in self.queue.snapshot().unfinished}
            if not left:
                return
        raise AssertionError(f"never trained and never dropped: {left}")


def play(
    seed: int, policy: TailPolicy, bound: StalenessBound, *, num_deaths: int = 2, killers: frozenset[str] = NOBODY
) -> Run:
    """One schedule; its events are told when it fails."""
    run = Run(seed, policy, bound, killers)
    events: list[Callable[[], None]] = [run.claim] * 4 + [run.generate] * 8 + [run.deliver] * 4 + [run.step] * 3
    events += [run.die] * num_deaths + [run.save] * 2 + [run.restart]
    try:
        for _ in range(EVENTS):
            happen = run.draw.choice(events)
            run.log.append(happen.__name__)
            happen()
            run.require_conserved()
        if seed % 10 == 0 or killers:
            run.end()
    except Exception as error:
        raise AssertionError(f"play({seed}, {policy}, {bound}): {error!r} after {', '.join(run.log)}") from error
    return run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_THE_LOOP else pytest.mark.slow) for name in POLICIES]
)
def test_no_schedule_of_failures_loses_a_prompt_or_trains_one_twice(name: str) -> None:
    for seed in range(SCHEDULES // len(POLICIES) + 1):
        play(seed, *POLICIES[name])


@pytest.mark.parametrize("name", POLICIES)
def test_a_prompt_that_kills_its_workers_is_dropped_and_no_other_with_it(name: str) -> None:
    """No other worker dies. So whoever else was dropped with a worker would have had no part in its death."""
    for seed in range(SCHEDULES_OF_LOSSES):
        run = play(seed, *POLICIES[name], num_deaths=0, killers=frozenset({"p1"}))
        assert set(run.lost) == {"p1"}, seed


@pytest.mark.parametrize("name", POLICIES)
def test_schedules_of_many_deaths_and_of_prompts_that_kill_their_workers_end(name: str) -> None:
    num_lost = 0
    for seed in range(SCHEDULES_OF_LOSSES):
        killers = frozenset(f"p{number}" for number in range(seed % 4))
        num_lost += len(play(seed, *POLICIES[name], num_deaths=MANY_DEATHS, killers=killers).lost)
    assert num_lost > SCHEDULES_OF_LOSSES
