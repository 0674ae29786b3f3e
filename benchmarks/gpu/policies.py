"""Blocks of steps with each tail policy and interrupt mode, interleaved on one engine."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ray.exceptions import RayError

from benchmarks.gpu.session import BlockPlan
from benchmarks.gpu.trainer import RolloutTrainer, UninterruptedTrainer
from partial_rollout.errors import PartialRolloutError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.bench_rollout import Workload
    from benchmarks.gpu.session import ReadyBlock, Session
    from benchmarks.gpu.trainer import Record
    from partial_rollout.rollout.statistics import RolloutStatistics

SAMPLE_INTERVAL_S = 1.0
"""Reading vLLM's statistics takes the engine's front end some milliseconds."""
TINY_INTERVAL_S = 0.25
PRIMER = 1
"""Steps of short responses at a block's start."""
SETTLE = 1.2
"""A step may take so many times as long as the longest one before it."""
WIDE = 1.5
"""Slots of the `wide` modes, as a multiple of a batch's trajectories."""
WIDE_PREFETCH, DEEP_PREFETCH = 3, 6
"""Batches of prompts in flight of the `wide` and `deep` modes: with 3, slots run out of prompts within a step."""
OURS = "partial_rollout"
KEPT = (
    "interrupted",
    "resumed_share",
    "reprefilled_tokens",
    "staleness_steps/mean",
    "staleness_steps/max",
    "stale_token_share",
    "old_kv_token_share",
    "slot_utilisation",
    "slots/num",
    "slots/kv_usage_max",
    "slots/preemptions",
)
"""Of our own metrics; those of a feature that is off are missing."""


@dataclass(frozen=True)
class Policy:
    """What a block is run with."""

    settings: dict[str, Any]
    warmup: int = 3
    """Steps that are stored and not summed up: that of the primer, and those in which contexts grow to their size."""
    trainer: type[RolloutTrainer] = RolloutTrainer
    is_wide: bool = False
    prefetch: int = WIDE_PREFETCH
    """Of a wide one."""

    def overrides(self, load: Workload, most_slots: int) -> dict[str, Any]:
        """The block's settings for a load on an engine with so many sequences."""
        if not self.is_wide:
            return self.settings
        slots = min(most_slots, int(WIDE * load.batch) * load.group)
        if self.settings.get("partial_rollout.slots.adaptive"):
            wide = {"partial_rollout.slots.most": most_slots}
        else:
            wide = {"partial_rollout.num_slots": slots}
        return {**self.settings, **wide, "partial_rollout.prefetch_factor": self.prefetch}


def _tail(policy: str, interrupt_mode: str = "abort", **others: Any) -> dict[str, Any]:
    named = {"policy": policy, "interrupt_mode": interrupt_mode, **others}
    return {f"partial_rollout.tail.{name}": value for name, value in named.items()}


ADAPTIVE = {"partial_rollout.slots.adaptive": True}
POLICIES: dict[str, Policy] = {
    "sync": Policy(_tail("wait"), warmup=PRIMER),
    "partial_abort": Policy(_tail("partial")),
    "partial_reuse_kv": Policy(_tail("partial", "reuse_kv")),
    "partial_keep_kv": Policy(_tail("partial", "keep_kv")),
    "partial_abort_adaptive": Policy(_tail("partial") | ADAPTIVE, is_wide=True),
    "partial_reuse_kv_adaptive": Policy(_tail("partial", "reuse_kv") | ADAPTIVE, is_wide=True),
    "partial_reuse_kv_deep": Policy(_tail("partial", "reuse_kv") | ADAPTIVE, is_wide=True, prefetch=DEEP_PREFETCH),
    "partial_reuse_kv_wide": Policy(_tail("partial", "reuse_kv"), is_wide=True),
    "reorder": Policy(_tail("reorder")),
    "reorder_reuse_kv": Policy(_tail("reorder", "reuse_kv")),
    "uninterrupted": Policy(
        _tail("partial") | {"partial_rollout.prefetch_factor": DEEP_PREFETCH}, trainer=UninterruptedTrainer
    ),
}
"""`sync` carries nothing from step to step; `uninterrupted` is the bound: slots always full, nothing interrupted."""


class Budget:
    """Seconds that a run may take."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start to count now."""
        self._clock, self._until = clock, clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; negative when they are used up."""
        return self._until - self._clock()

    def less(self, seconds: float) -> Budget:
        """The same one, ending so much earlier."""
        return Budget(self.left_s - seconds, self._clock)


class Sampler:
    """Asks the engine how it is, at intervals, beside the steps; a context manager."""

    def __init__(self, ask: Callable[[], RolloutStatistics], interval_s: float) -> None:
        """`ask` is called on a thread of its own."""
        self._ask, self._interval_s = ask, interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-samples", daemon=True)
        self.started_s = time.monotonic()
        self.failure: Exception | None = None
        self.rows: list[list[float]] = []
        """[seconds, requests admitted, in the engine's batch, waiting there, share of the KV cache, tokens so far]."""

    def __enter__(self) -> Sampler:
        """Start."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                now = self._ask()
            except Exception as error:  # noqa: BLE001 - kept, and stored with the block
                self.failure = error
                return
            load = now.load
            counts = [now.running, load.running, load.waiting, round(load.kv_usage, 4), now.num_generated_tokens]
            self.rows.append([round(time.monotonic() - self.started_s, 2), *counts])


class Wanted(NamedTuple):
    """A block to run."""

    mode: str
    steps: int
    """Measured ones."""
    trace: str

    @classmethod
    def of(cls, word: str, steps: int, trace: str) -> Wanted:
        """From MODE, MODE:STEPS, MODE@TRACE or MODE:STEPS@TRACE."""
        named, _, other = word.partition("@")
        mode, _, number = named.partition(":")
        return cls(mode, int(number or steps), other or trace)


@dataclass
class Block:
    """Steps of one policy from an empty queue, as they are stored."""

    mode: str
    trace: str
    round: int
    slots: int
    steps: list[dict[str, float]] = field(default_factory=list)
    samples: list[list[float]] = field(default_factory=list)
    ended: str = "cut off"
    """Why it has ended."""


class Recorder:
    """Takes in the steps of a block, and says when it is enough."""

    def __init__(
        self, block: Block, num_steps: int, budget: Budget, session: Session, add: Callable[[Block], None]
    ) -> None:
        """Ends after the warm-up and `num_steps` measured steps, or when the budget is too small for another one."""
        self.clock: Callable[[], float] = time.monotonic
        self.block, self.add = block, add
        self._warmup = POLICIES[block.mode].warmup
        self.most_steps = self._warmup + num_steps
        self._budget, self._session = budget, session
        self._since_s: float | None = None

    def begin(self, started_s: float) -> None:
        """The block starts; times are counted from `started_s`, as its samples' are."""
        self._started_s, self._before = started_s, self._session.statistics()

    def __call__(self, number: int, record: Record) -> bool:
        """Whether there is to be another step."""
        started_s, self._since_s = self._since_s, self.clock()
        # What is between two steps is time in which requests run, so it counts; before the first, none does.
        wall_s = record["timing_s/step"] if started_s is None else self._since_s - started_s
        numbers = {"ended_s": self._since_s - self._started_s, "wall_s": wall_s, **self._numbers(record)}
        rounded = {name: round(float(value), 4) for name, value in numbers.items()}
        self.block.steps.append({"step": number, "warmup": number <= self._warmup, **rounded})
        longest_s = max(step["wall_s"] for step in self.block.steps)
        has_time = self._budget.left_s > SETTLE * longest_s
        self.block.ended = (
            "done" if number >= self.most_steps else "running" if has_time else "no time for another step"
        )
        self.add(self.block)
        return self.block.ended == "running"

    def _numbers(self, record: Record) -> dict[str, float]:
        before, self._before = self._before, self._session.statistics()
        now = self._before
        numbers = {
            "gen_s": record["timing_s/gen"],
            "drain_ms": 1000 * record.get("timing_s/drain", 0.0),
            "update_ms": 1000 * record.get("timing_s/update_weights", 0.0),
            "resume_ms": 1000 * record.get("timing_s/resume", 0.0),
            "useful_tokens": record[f"{OURS}/response_tokens"],
            "generated_tokens": now.num_generated_tokens - before.num_generated_tokens,
            "reprefilled_in_engine": now.num_reprefilled_tokens - before.num_reprefilled_tokens,
        }
        return numbers | {name: record[f"{OURS}/{name}"] for name in KEPT if f"{OURS}/{name}" in record}


def plan_of(session: Session, recorder: Recorder, load: Workload, *, num_prompts: int, batch_s: float) -> BlockPlan:
    """What the session needs to make a block ready; blocks of a round and trace have the same `num_prompts` prompts."""
    block, policy = recorder.block, POLICIES[recorder.block.mode]
    load = replace(load, seed=load.seed + block.round)
    return BlockPlan(
        policy.trainer,
        policy.overrides(load, session.options.slots),
        prompts=session.prompts(load, num_prompts, f"{block.mode}-{block.trace}-{block.round}"),
        batch_s=batch_s,
        on_step=recorder,
    )


def run_block(session: Session, ready: ReadyBlock, recorder: Recorder) -> None:
    """One block, stored after every step. An error of ours or Ray's ends the block, not the run."""
    block = recorder.block
    with Sampler(session.statistics, TINY_INTERVAL_S if session.options.is_tiny else SAMPLE_INTERVAL_S) as sampler:
        recorder.begin(sampler.started_s)
        block.samples = sampler.rows
        try:
            session.run(ready)
        except (PartialRolloutError, RayError) as error:
            block.ended = f"{type(error).__name__}: {error}"
    if sampler.failure is not None:
        block.ended += f"; samples ended: {sampler.failure!r}"
    recorder.add(block)


def run_policies(
    session: Session,
    wanted: Sequence[Wanted],
    loads: Mapping[str, Workload],
    *,
    rounds: int,
    budget: Budget,
    add: Callable[[Block], None],
) -> None:
    """All blocks in their order, `rounds` times or until the budget is used up; `loads` by the names of traces.

    `add` is given each block after every step, again and again.
    """
    walls_s: list[float] = []
    for round in range(rounds):
        if all(budget.left_s <= least_s(each.mode, walls_s) for each in wanted):
            return
        slots = session.load.batch * session.load.group
        recorders = [
            Recorder(Block(each.mode, each.trace, round, slots), each.steps, budget, session, add) for each in wanted
        ]
        # Lengths depend on how many are drawn, so all blocks have as many prompts as the longest needs.
        num_prompts = session.load.batch * (max(each.most_steps for each in recorders) + DEEP_PREFETCH)
        batch_s = max(1.0, budget.left_s)
        plans = [
            plan_of(session, each, loads[each.block.trace], num_prompts=num_prompts, batch_s=batch_s)
            for each in recorders
        ]
        blocks = session.ready(plans)
        for recorder, block in zip(recorders, blocks, strict=True):
            if budget.left_s > least_s(recorder.block.mode, walls_s):
                run_block(session, block, recorder)
                walls_s += [step["wall_s"] for step in recorder.block.steps[PRIMER:]]
            else:
                session.discard(block)


def least_s(mode: str, walls_s: Sequence[float]) -> float:
    """Seconds that a block needs for one measured step, when others took `walls_s`; the primer takes hardly any."""
    num_steps = POLICIES[mode].warmup - PRIMER + 1
    return num_steps * statistics.median(walls_s) if walls_s else 0.0
