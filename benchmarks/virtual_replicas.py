"""`bench_queue --rows replicas`: the production prompt manager with many replicas, in virtual time.

The manager is `RolloutPromptManager` without Ray, with its queue, long polls and waits. Engines are a clock: each
trajectory takes its length times `--token-s`, and a worker for each replica has `--slots` places for trajectories. Time
stands still while the model trains, since no engine generates then.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import selectors
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from partial_rollout.advise.workload import Workload, lengths
from partial_rollout.core.queue.tail import Partial
from partial_rollout.runtime.prompt_manager import RolloutPromptManager
from partial_rollout.types import Claim, PromptMeta, TrajectorySummary

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from partial_rollout.types import FinishResult, QueueStatistics

FOREVER_S = 1e9
TICK_REPLICA_S = 100.0
"""Virtual seconds whose events are told together, times replicas: about as many events in each row."""
POOL = Workload(group=1, median=450, sigma=0.8, longest=4096, long_share=0.1)
"""Lengths: 12 % are as long as they may be, as in the 8B result."""
POOL_SIZE = 1 << 16


def num_transitions(now: QueueStatistics) -> int:
    """Transitions since the start of a run whose prompts were not tried again."""
    return now.admitted + (now.admitted - now.pending) + (now.done + now.taken + now.num_dropped) + now.taken


class Jumping(selectors.DefaultSelector):
    """Lets an event loop's time jump to the next timer, when nobody has anything else to do."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Let `timeout` seconds pass at once; the loop always has a timer."""
        self.now_s += max(0.0, timeout or 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self._jumping = Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now_s


@dataclass
class Claimed:
    """A claimed prompt: what a worker knows of it."""

    claim: Claim
    version: int
    left: int


@dataclass
class Worker:
    """An agent-loop worker with the slots of one replica."""

    name: str
    free: int
    finished: list[Claimed] = field(default_factory=list[Claimed])
    poll: asyncio.Task[list[Claim]] | None = None


class Run:
    """A run of many replicas around a production manager, in virtual time."""

    def __init__(self, options: argparse.Namespace, replicas: int, filtered: float) -> None:
        self.options, self.filtered = options, filtered
        self.batch = max(1, replicas * options.slots // options.group)
        """Groups that all slots together hold."""
        self.tick_s = TICK_REPLICA_S / replicas
        self.num_prompts = max(self.batch, options.replica_prompts * replicas // max(options.replicas))
        clock = asyncio.get_running_loop().time
        self.manager = RolloutPromptManager(Partial(int(options.prefetch * self.batch)), 2, clock)
        self.workers = [Worker(f"w{number}", options.slots) for number in range(replicas)]
        self.draw = random.Random(options.seed)
        self.lengths: list[int] = lengths(replace(POOL, seed=options.seed), POOL_SIZE)[:, 0].tolist()
        self.ends: list[tuple[float, int, Worker, Claimed]] = []
        """A heap of trajectories that run, by the time of their end."""
        self.numbers: Iterator[int] = itertools.count()
        self.reports: list[asyncio.Task[FinishResult]] = []
        self.now_s = self.used_slot_s = self.manager_s = 0.0
        self.version = self.num_admitted = self.num_taken = 0
        self.ages: list[int] = []

    async def measure(self) -> dict[str, Any]:
        """Train all prompts."""
        started_s = time.perf_counter()
        training = asyncio.create_task(self._train(), name="trainer")
        self._poll(self.workers)
        while not training.done():
            lap_s = time.thread_time()
            await asyncio.sleep(self.tick_s)  # until nobody has anything to do
            self.manager_s += time.thread_time() - lap_s
            await asyncio.gather(*self.reports)  # all of them have ended; one that has failed is raised here
            self.reports.clear()
            self._poll([*self._begin_claimed(), *self._end_due()])
        await training
        now = await self.manager.statistics()
        await self.manager.close("measured")
        await asyncio.gather(*(worker.poll for worker in self.workers if worker.poll is not None))
        transitions = num_transitions(now)
        return {
            "replicas": len(self.workers), "slots": len(self.workers) * self.options.slots, "batch": self.batch,
            "filtered": self.filtered, "prompts_trained": now.taken, "prompts_dropped": now.num_dropped,
            "conserved": now.conserved, "steps": self.version,
            "staleness_mean": round(statistics.fmean(self.ages), 2), "staleness_max": max(self.ages),
            "idle_share": round(1 - self.used_slot_s / (self.now_s * len(self.workers) * self.options.slots), 3),
            "transitions": transitions, "transitions_per_s": round(transitions / self.manager_s),
            "transitions_per_virtual_s": round(transitions / self.now_s),
            "manager_us": round(self.manager_s / transitions * 1e6, 1),
            "wall_s": round(time.perf_counter() - started_s, 1),
        }  # fmt: skip

    async def _train(self) -> None:
        while self.num_taken < self.num_prompts:
            plan = await self.manager.begin_round()
            await self._admit(plan.num_fresh)
            while not (taken := await self.manager.take_batch(self.batch, FOREVER_S)).groups:
                await self._admit(taken.num_missing)
            self.num_taken += len(taken.groups)
            self.ages += [self.version - group.min_version for group in taken.groups]
            self.version += 1
            await self.manager.report_step(self.version, self.version, "open")

    async def _admit(self, number: int) -> None:
        uids = range(self.num_admitted, self.num_admitted + number)
        self.num_admitted += number
        await self.manager.admit([PromptMeta(f"{uid:036d}", self.options.group, self.version) for uid in uids])

    def _poll(self, workers: list[Worker]) -> None:
        """Let workers report what is finished, and ask for prompts when a group fits."""
        for worker in workers:
            if worker.finished:
                groups = [(group.claim, self._summaries(group)) for group in worker.finished]
                worker.finished.clear()
                self.reports.append(asyncio.ensure_future(self.manager.finish_many(groups)))
            if worker.poll is None and worker.free >= self.options.group:
                worker.poll = asyncio.ensure_future(self.manager.claim(worker.name, worker.free, FOREVER_S))

    def _begin_claimed(self) -> list[Worker]:
        """Start what workers have claimed."""
        answered = [worker for worker in self.workers if worker.poll is not None and worker.poll.done()]
        for worker in answered:
            claims, worker.poll = worker.poll.result() if worker.poll else [], None
            for claim in claims:
                worker.free -= claim.num_trajectories
                group = Claimed(claim, self.version, claim.num_trajectories)
                for _ in range(claim.num_trajectories):
                    seconds = self.draw.choice(self.lengths) * self.options.token_s
                    self.used_slot_s += seconds
                    heapq.heappush(self.ends, (self.now_s + seconds, next(self.numbers), worker, group))
        return answered

    def _end_due(self) -> list[Worker]:
        """Let the next trajectories end."""
        touched: dict[str, Worker] = {}
        self.now_s += self.tick_s
        while self.ends and self.ends[0][0] <= self.now_s:
            _, _, worker, group = heapq.heappop(self.ends)
            worker.free += 1
            group.left -= 1
            if not group.left:
                worker.finished.append(group)
            touched[worker.name] = worker
        return list(touched.values())

    def _summaries(self, group: Claimed) -> list[TrajectorySummary]:
        shared = self.filtered and self.draw.random() < self.filtered
        sessions, versions = range(group.claim.num_trajectories), (group.version, self.version)
        names = [(f"{group.claim.uid}_{session}_0", 0.0 if shared else float(session)) for session in sessions]
        return [TrajectorySummary(name, 200, 700, *versions, metric=metric) for name, metric in names]


def measure_replicas(options: argparse.Namespace, replicas: int, filtered: float) -> dict[str, Any]:
    """One number of replicas, with batches and prompts in proportion."""
    loop = VirtualLoop()

    async def run() -> dict[str, Any]:
        return await Run(options, replicas, filtered).measure()

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()
