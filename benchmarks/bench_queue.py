"""How many transitions a second the prompt manager carries, and what is written beside it: events, log of rollouts.

    python -m benchmarks.bench_queue --json benchmarks/results/bench_queue.json
    python -m benchmarks.bench_queue --rows events --json benchmarks/results/bench_events.json
    python -m benchmarks.bench_queue --rows replicas --json OUT

A transition is one prompt admitted, claimed, finished or taken. The rows (`replicas` runs only if it is named):

- `single`: through the actor; each client claims, then reports each group with a call of its own, all at once;
- `batched`: the same, with `finish_many` of `--batch` groups;
- `events`: what the event stream costs a worker in CPU time, and which share of a step that is. One process writes all
  events of a step of 256 trajectories, each interrupted once, and the queue's of each second;
- `log`: what the log of rollouts costs workers in such a step, half of each response unfinished once, and how fast a
  run that is started again reads it. Steps with and without the log alternate; the difference is the cost. `loop_ms` is
  what the worker's event loop waits, `cpu_ms` what the process takes, the log's thread and the kernel included;
- `replicas`: a million prompts on each number of `--replicas`, in virtual time, once with all groups trained and once
  with `--filtered` of them dropped, as `algorithm.filter_groups` drops groups without spread, and replaced at once.
  `manager_us` is the manager's time for a transition, on this machine, with asyncio's and without the calls' transport.

In the others the driver is the trainer: it takes `--batch` groups and admits as many. Every client always has a call
under way, so latencies are those of a saturated actor. Where clients run on the same cores as the actor, its rate by
the clock is too low: `per_actor_cpu_s` is that by its CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray

from benchmarks.virtual_replicas import measure_replicas, num_transitions
from partial_rollout.advise.result import circumstances, read_result, store
from partial_rollout.core.interrupt import FRESH, Context
from partial_rollout.core.queue.tail import Partial
from partial_rollout.core.resume import ABORTED, ResumableGeneration, Segment
from partial_rollout.observability.events import (
    AnyEvent,
    EventWriter,
    PhaseBegan,
    QueueMoved,
    RequestSent,
    SegmentEnded,
    TrajectoryEnded,
)
from partial_rollout.observability.metrics import ManagerMetrics
from partial_rollout.runtime.prompt_manager import ACTOR_OPTIONS, RolloutPromptManager, journal_place, ray_call_id
from partial_rollout.types import Claim, PromptMeta, TrajectorySummary, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    from partial_rollout.agent_loop.rollout_log import WorkerLog

USUAL = ("single", "batched", "events", "log")
ROWS = (*USUAL, "replicas")
SHORT_STEPS = Path(__file__).parent / "results/gpu/smollm2_h200.json"
STEP_TRAJECTORIES = 256
"""Trajectories of a step of the job in `SHORT_STEPS`."""
CALL_TIMEOUT_S = 120.0
MEBIBYTE = 2**20
PERCENTILES = (50, 95, 99)
LOG_GROUP, LOG_PROMPT_TOKENS, VOCABULARY = 8, 200, 150_000
CLOSE_S = 600.0


class MeasuredManager(RolloutPromptManager):
    """The manager, able to say what its process uses."""

    async def usage(self) -> dict[str, float]:
        """Resident bytes and CPU seconds so far."""
        return {"rss_bytes": psutil.Process().memory_info().rss, "cpu_s": time.process_time()}


@dataclass
class Latencies:
    """Milliseconds per call, by method."""

    samples: dict[str, list[float]] = field(default_factory=dict)

    async def timed(self, method: str, ref: Any) -> Any:
        """Await `ref` and record how long it took."""
        started = time.perf_counter()
        result = await ref
        self.samples.setdefault(method, []).append((time.perf_counter() - started) * 1e3)
        return result


def make_prompts(first: int, num: int, group: int) -> list[PromptMeta]:
    """Prompts with uids of a uuid's length."""
    return [PromptMeta(f"{index:036d}", group, 1, source_index=str(index)) for index in range(first, first + num)]


def summaries(claim: Claim) -> list[TrajectorySummary]:
    """A group that was interrupted once."""
    spans = (VersionSpan(3, 500), VersionSpan(4, 200))
    return [
        TrajectorySummary(f"{claim.uid}_{session}_0", 200, 700, 3, 4, 1, 700, spans)
        for session in range(claim.num_trajectories)
    ]


class Client:
    """One agent-loop worker that generates in no time."""

    def __init__(self, manager: Any, worker_id: str, options: dict[str, int]) -> None:
        self._manager, self._worker_id, self._options = manager, worker_id, options
        self._latencies = Latencies()

    async def ping(self) -> None:
        """Answer once the process is up."""

    async def run(self, batched: bool) -> dict[str, list[float]]:
        """Claim and finish until the manager is closed; returns the latencies."""
        while claims := await self._claim(self._options["batch"] * self._options["group"]):
            await (self._finish_batched(claims) if batched else self._finish_each(claims))
        return self._latencies.samples

    async def _claim(self, free_slots: int) -> list[Claim]:
        return await self._latencies.timed(
            "claim", self._manager.claim.remote(self._worker_id, free_slots, CALL_TIMEOUT_S)
        )

    async def _finish_batched(self, claims: list[Claim]) -> None:
        groups = [(claim, summaries(claim)) for claim in claims]
        await self._latencies.timed("finish_many", self._manager.finish_many.remote(groups))

    async def _finish_each(self, claims: list[Claim]) -> None:
        calls = [self._manager.finish_many.remote([(claim, summaries(claim))]) for claim in claims]
        await asyncio.gather(*(self._latencies.timed("finish", call) for call in calls))


async def train(manager: Any, options: argparse.Namespace, seconds: float) -> dict[str, list[float]]:
    """Take and admit as the trainer does, keeping `options.prompts` in flight."""
    latencies, admitted, deadline = Latencies(), options.prompts, time.monotonic() + seconds
    while time.monotonic() < deadline:
        result = await latencies.timed("take_batch", manager.take_batch.remote(options.take, CALL_TIMEOUT_S))
        fresh = make_prompts(admitted, len(result.groups), options.group)
        await latencies.timed("admit", manager.admit.remote(fresh))
        admitted += len(fresh)
    return latencies.samples


async def measure(options: argparse.Namespace, batched: bool) -> dict[str, Any]:
    """One run through a fresh actor."""
    actor_class: Any = ray.remote(MeasuredManager).options(**ACTOR_OPTIONS)
    journal = {"journal": partial(journal_place, uuid.uuid4().hex), "call_id": ray_call_id} if options.journal else {}
    manager = actor_class.remote(Partial(options.prompts), 2, metrics=ManagerMetrics, **journal)
    shape = {"batch": options.batch, "group": options.group}
    client_class: Any = ray.remote(Client).options(num_cpus=0)
    clients = [client_class.remote(manager, f"w{index}", shape) for index in range(options.clients)]
    empty = await manager.usage.remote()
    await manager.admit.remote(make_prompts(0, options.prompts, options.group))
    await asyncio.gather(*(client.ping.remote() for client in clients))
    before, usage_before, started = await manager.statistics.remote(), await manager.usage.remote(), time.monotonic()
    running = [client.run.remote(batched) for client in clients]
    samples = [await train(manager, options, options.seconds)]
    elapsed_s = time.monotonic() - started
    after, usage = await manager.statistics.remote(), await manager.usage.remote()
    # Only now: a trainer whose workers stop before it does would wait for its last batch.
    await manager.close.remote("measured")
    samples += await asyncio.gather(*running)
    count, cpu_s = num_transitions(after) - num_transitions(before), usage["cpu_s"] - usage_before["cpu_s"]
    for actor in (manager, *clients):
        ray.kill(actor)
    return {
        "transitions_per_s": round(count / elapsed_s), "per_actor_cpu_s": round(count / cpu_s),
        "actor_cpu_share": round(cpu_s / elapsed_s, 2), "latency_ms": percentiles(samples),
        "conserved": after.conserved, "in_flight": after.in_flight, "retired_uids": after.taken,
        "rss_mib": round(usage["rss_bytes"] / MEBIBYTE),
        "rss_over_empty_mib": round((usage["rss_bytes"] - empty["rss_bytes"]) / MEBIBYTE),
    }  # fmt: skip


def percentiles(samples: list[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """p50, p95, p99 and count per method over all clients."""
    merged: dict[str, list[float]] = {}
    for part in samples:
        for method, values in part.items():
            merged.setdefault(method, []).extend(values)
    return {method: _percentiles(sorted(values)) for method, values in sorted(merged.items())}


def _percentiles(values: list[float]) -> dict[str, float]:
    rank = {f"p{p}": round(values[min(len(values) - 1, len(values) * p // 100)], 2) for p in PERCENTILES}
    return {**rank, "calls": len(values)}


def trajectory_events(index: int) -> list[AnyEvent]:
    """What a worker writes for a trajectory of one response that was interrupted once."""
    uid, session = f"{index:036d}", index % 8
    phases = [
        PhaseBegan(uid=uid, session=session, phase=phase, response=1, row=str(index))
        for phase in ("agent", "engine", "tool", "reward")
    ]
    segment = SegmentEnded(
        uid=uid, session=session, server=uid, version=3, seconds=1.25, prompt_tokens=500, tokens=200, reason="aborted"
    )
    sent = RequestSent(uid=uid, session=session, server=uid)
    ended = TrajectoryEnded(uid=uid, session=session, seconds=9.5, engine_seconds=9.25, tokens=400, interruptions=1)
    return [*phases, sent, segment, sent, segment, ended]


def short_step_s() -> float:
    """Seconds of the shortest stored step of a real model."""
    return min(row["step, s"] for row in read_result(SHORT_STEPS)["summary"])


def measure_events(options: argparse.Namespace) -> dict[str, float]:
    """Write the events of whole steps, and compare their time with that of a stored job's step."""
    step_s = short_step_s()
    events = [event for index in range(STEP_TRAJECTORIES) for event in trajectory_events(index)]
    counts = {"pending": 12, "ongoing": 64, "deferred": 0, "done": 12, "taken": 4096}
    events += [QueueMoved(step=3, slots_in_use=256, slots_total=256, **counts)] * math.ceil(step_s)
    num_steps, started, cpu = 0, time.perf_counter(), time.thread_time()
    with tempfile.TemporaryDirectory() as folder:
        writer = EventWriter(Path(folder), "worker")
        while num_steps == 0 or time.perf_counter() - started < options.seconds / 2:
            for event in events:
                writer.write(event)
            num_steps += 1
        elapsed_s, cpu_s = time.perf_counter() - started, time.thread_time() - cpu
        writer.close()
    count = num_steps * len(events)
    return {
        "us_per_event": round(elapsed_s / count * 1e6, 1), "cpu_us_per_event": round(cpu_s / count * 1e6, 1),
        "events_per_step": len(events), "step_s": step_s,
        "cpu_percent_of_step": round(100 * cpu_s / num_steps / step_s, 3),
        "percent_of_step": round(100 * elapsed_s / num_steps / step_s, 3),
    }  # fmt: skip


def make_output(num_tokens: int, rng: random.Random) -> AgentLoopOutput:
    """An output with its score, as verl's agent loops return it."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    output = AgentLoopOutput(
        prompt_ids=[rng.randrange(VOCABULARY) for _ in range(LOG_PROMPT_TOKENS)],
        response_ids=[rng.randrange(VOCABULARY) for _ in range(num_tokens)],
        response_mask=[1] * num_tokens,
        response_logprobs=[-rng.random() for _ in range(num_tokens)],
        metrics=AgentLoopMetrics(),
        num_turns=2,
        extra_fields={"min_global_steps": 3, "max_global_steps": 4, "reward_extra_info": {"acc": 1.0}},
    )
    output.reward_score = 1.0
    return output


def end_all(outputs: list[AgentLoopOutput], number: int, log: WorkerLog) -> dict[str, list[tuple[str, int]]]:
    """Interrupt and end a step's trajectories one after the other; key and checksum of each, by prompt.

    The log may be off.
    """
    from partial_rollout.agent_loop.trajectory import Trajectory
    from partial_rollout.agent_loop.worker import summaries as summaries_of

    groups: dict[str, list[tuple[str, int]]] = {}
    for index, output in enumerate(outputs):
        claim = Claim(f"{number}-{index // LOG_GROUP:04d}", index, "worker-0", LOG_GROUP, number, 1)
        trajectory, half = Trajectory(claim, index % LOG_GROUP), len(output.response_ids) // 2
        trajectory.record(call := ResumableGeneration(output.prompt_ids, 2 * half + 1))
        tokens, log_probs = output.response_ids[:half], (output.response_logprobs or [])[:half]
        call.add(Segment(tokens, log_probs, ABORTED, number, number, Context(number, FRESH)))
        log.write_interrupted(trajectory)
        (summary,) = log.write(trajectory, [output], summaries_of(trajectory, [output]))
        groups.setdefault(claim.uid, []).append((summary.key, summary.log_checksum))
    return groups


def measure_log(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Alternating steps with and without the log, then a new start."""
    from partial_rollout.agent_loop.rollout_log import LogFolder, WorkerLog
    from partial_rollout.core.rollout_log import Admitted, Group, Taken, encode
    from partial_rollout.runtime.log_writer import LogWriter
    from partial_rollout.train.rollout_log import read_history

    rng = random.Random(0)
    outputs = [make_output(options.tokens, rng) for _ in range(STEP_TRAJECTORIES)]
    place = LogFolder(str(folder / "after_step_0"), 1, 0)
    trainer, off, on = LogWriter("trainer"), WorkerLog("off", CLOSE_S), WorkerLog("worker_0", CLOSE_S)
    trainer.open(place.file("trainer"))
    trainer.append(place.opened("trainer", world={}, holds_through=0))
    on.begin(place, [])
    spent: dict[str, dict[str, list[float]]] = {kind: {"off": [], "on": []} for kind in ("loop", "cpu")}
    for number in range(1, options.steps + 1):
        groups: dict[str, list[tuple[str, int]]] = {}
        for name, log in (("off", off), ("on", on)):
            cpu, started = time.process_time(), time.perf_counter()
            groups = end_all(outputs, number, log)
            spent["loop"][name].append(1000 * (time.perf_counter() - started))
            time.sleep(options.pause_s)  # the thread writes
            spent["cpu"][name].append(1000 * (time.process_time() - cpu))
        trainer.append(encode(Taken(step=number, groups=[Group(uid, keys) for uid, keys in groups.items()])))
        trainer.append(encode(Admitted(first=(number - 1) * len(groups), uids=list(groups), prompts=list(groups))))
    trainer.close(CLOSE_S)
    on.close(CLOSE_S)
    num_bytes, started = place.file("worker_0").stat().st_size, time.perf_counter()
    plan = read_history(Path(place.path), 0, {})[0].plan(0, first=0, unfinished=[], done=[])
    read_s = time.perf_counter() - started
    medians = {kind: {name: statistics.median(ms) for name, ms in each.items()} for kind, each in spent.items()}
    cost, step_s = {kind: each["on"] - each["off"] for kind, each in medians.items()}, short_step_s()
    return {
        **{f"{kind}_ms": {name: round(ms, 2) for name, ms in each.items()} for kind, each in medians.items()},
        "step_s": step_s,
        **{f"{kind}_percent_of_step": round(ms / 10 / step_s, 3) for kind, ms in cost.items()},
        "loop_us_a_trajectory": round(1000 * cost["loop"] / STEP_TRAJECTORIES, 1),
        "bytes_a_token": round(num_bytes / options.steps / STEP_TRAJECTORIES / options.tokens, 2),
        "mb_a_step": round(num_bytes / options.steps / MEBIBYTE, 2),
        "steps_replayed": plan.through,
        "read_mb_per_s": round(num_bytes / MEBIBYTE / read_s),
    }


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10_000, help="prompts in flight (default: %(default)s)")
    parser.add_argument("--group", type=int, default=8, help="trajectories per prompt (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=2, help="worker processes (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="prompts per claim or finish_many (default: %(default)s)")
    parser.add_argument("--take", type=int, default=256, help="groups per training batch (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each row (default: %(default)s)")
    journal = "whether the actor writes its journal, as that of a run does (default: %(default)s)"
    parser.add_argument("--journal", action=argparse.BooleanOptionalAction, default=True, help=journal)
    parser.add_argument("--rows", nargs="+", default=list(USUAL), choices=ROWS, help="what is measured (%(default)s)")
    log = parser.add_argument_group("the log of rollouts")
    log.add_argument("--steps", type=int, default=20, help="of each kind (default: %(default)s)")
    log.add_argument("--tokens", type=int, default=1500, help="of a response (default: %(default)s)")
    log.add_argument("--pause-s", type=float, default=0.3, help="between two steps (default: %(default)s)")
    log.add_argument("--folder", type=Path, help="of the log, on the disk in question (default: a temporary one)")
    many = parser.add_argument_group("many replicas")
    many.add_argument("--replicas", type=int, nargs="+", default=[100, 300, 1000], help="one row each (%(default)s)")
    many.add_argument("--replica-prompts", type=int, default=1_000_000, help="of the largest row (%(default)s)")
    many.add_argument("--slots", type=int, default=64, help="trajectories of a replica (default: %(default)s)")
    many.add_argument("--prefetch", type=float, default=3.0, help="prompts in flight, in batches (%(default)s)")
    many.add_argument("--token-s", type=float, default=0.02, help="seconds of a token (default: %(default)s)")
    many.add_argument("--filtered", type=float, default=0.3, help="share of groups without spread (%(default)s)")
    many.add_argument("--seed", type=int, default=0, help="of the lengths (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result here")
    return parser.parse_args()


def main() -> None:
    """Run all rows and print them."""
    options = parse()
    pairs = itertools.product(options.replicas, (0.0, options.filtered))
    rows: dict[str, Callable[[], Any]] = {
        "single": lambda: asyncio.run(measure(options, batched=False)),
        "batched": lambda: asyncio.run(measure(options, batched=True)),
        "events": lambda: measure_events(options),
        "log": lambda: measure_log(options, Path(folder)),
        "replicas": lambda: [measure_replicas(options, *pair) for pair in pairs],
    }
    if {"single", "batched"} & set(options.rows):
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = {**circumstances(options), **{name: rows[name]() for name in options.rows}}
    ray.shutdown()
    print(json.dumps(result, indent=2))
    store(result, options.json)


if __name__ == "__main__":
    main()
