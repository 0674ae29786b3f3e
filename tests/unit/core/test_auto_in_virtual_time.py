"""Slots and depth as the flag alone moves them, on three traces of response lengths, in the service's scheduling."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

import pytest

from partial_rollout.advise.predict import fit
from partial_rollout.advise.result import read_result
from partial_rollout.advise.scheduler import Group, Mode, Request, Rollout, Speed
from partial_rollout.advise.workload import lengths, workload
from partial_rollout.core import depth
from partial_rollout.core.depth import DepthController, StepLoad
from partial_rollout.core.engine_meter import EngineSpeed
from partial_rollout.core.slots import EngineLoad, SlotBounds, SlotController, first_look_s
from partial_rollout.settings.block import SlotsConfig

if TYPE_CHECKING:
    from pathlib import Path

CPU = Speed(0.008, 0.00025, 0.0, prefill_tokens_per_s=4000.0, interruption_s=0.2)
"""About what vLLM does on two cores with the benchmarks' small model."""
STEPS, SETTLED, PROMPT = 60, 20, 32
LEAST, MOST = 2.0, 3.0
INTERVAL_S = SlotsConfig().interval_s
"""Longer than a step of these traces."""


@dataclass
class Watched(Rollout):
    """Slots follow the load, which is looked at when the trainer does so: while it waits for a batch, and after it."""

    slots: SlotController | None = None
    waited_s: list[float] = field(default_factory=lambda: [math.inf])
    """Time of each step with open gates."""
    next_look_s: float = math.inf
    looks_in_middle: bool = True
    kv_tokens: float = math.inf
    """Room for KV. Where it ends, the newest request is preempted; its KV is computed again when there is room."""
    preempted: deque[tuple[int, Request]] = field(default_factory=deque[tuple[int, Request]])
    """Preempted requests, the next first, with the tokens that each has yet to get."""
    num_preemptions: int = 0
    measured: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    """Requests and seconds of the last decode step of each power of two of requests, as an engine's meter has them."""

    def step(self) -> dict[str, float]:
        step = super().step()
        self._look()
        self.waited_s[-1] = self.now_s - self.waited_s[-1]
        return step

    def _interrupt(self) -> tuple[int, int]:
        found = super()._interrupt()
        first_s = first_look_s(INTERVAL_S, self.waited_s[-1]) if self.looks_in_middle else INTERVAL_S
        self.next_look_s = self.now_s + first_s
        self.waited_s.append(self.now_s)
        if self.slots is not None:
            self.slots.begin(self._load())
        return found

    def _claim(self) -> None:
        """Preempted requests have slots."""
        slots = self.mode.slots
        self.mode = replace(self.mode, slots=slots - len(self.preempted))
        super()._claim()
        self.mode = replace(self.mode, slots=slots)

    def _enter(self) -> None:
        while self.preempted:
            left, request = self.preempted[0]
            tokens = request.length - left + self.prompt_tokens
            if self.running and self.kv + tokens + len(self.running) > self.kv_tokens:
                return
            self.preempted.popleft()
            heapq.heappush(self.running, (self.decoded + left, next(self.numbers), request))
            self.context += tokens
            self.now_s += tokens / self.speed.prefill_tokens_per_s
        if self.entering or not self.running:
            super()._enter()

    def _decode(self, until_s: float) -> None:
        while len(self.running) > 1 and self.kv + len(self.running) > self.kv_tokens:
            newest = max(self.running, key=lambda each: each[1])
            self.running.remove(newest)
            heapq.heapify(self.running)
            left, request = newest[0] - self.decoded, newest[2]
            self.context -= request.length - left + self.prompt_tokens
            self.preempted.appendleft((left, request))
            self.num_preemptions += 1
        if self.kv_tokens < math.inf:
            steps = max(1, int(self.kv_tokens - self.kv) // len(self.running))
            until_s = min(until_s, self.now_s + self.speed.decode_s(steps, len(self.running), self.kv))
        running = len(self.running)
        self.measured[running.bit_length()] = (running, self.speed.decode_s(1, running, self.kv))
        super()._decode(until_s)

    def _proceed(self, until_s: float = math.inf) -> None:
        super()._proceed(min(until_s, self.next_look_s))
        if self.now_s >= self.next_look_s:
            self.next_look_s += INTERVAL_S
            self._look()

    def _look(self) -> None:
        if self.slots is not None:
            in_use = len(self.running) + len(self.entering) + len(self.preempted)
            speeds = [EngineSpeed(tuple(sorted(self.measured.values())))]
            self.mode = replace(self.mode, slots=self.slots.observe(self._load(), in_use, speeds).after)

    def _load(self) -> EngineLoad:
        usage = min(1.0, self.kv / self.kv_tokens)
        return EngineLoad(len(self.running), 0, usage, self.num_preemptions, num_tokens=self.decoded)


@dataclass
class Run:
    """Whole steps of one mode; `moves` let slots and depth follow what is seen."""

    trace: str
    prefetch: float = LEAST
    retains_kv: bool = True
    moves_slots: bool = False
    moves_depth: bool = False
    looks_in_middle: bool = True
    seed: int = 0
    skip: int = SETTLED
    kv_tokens: float = math.inf
    least: float = 0.5
    """Fewest slots of an adaptive number, by those at the start; `auto` takes half."""
    speed: Speed = CPU
    shape: str = "small"
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    prompt_tokens: int = PROMPT

    def steps(self) -> list[dict[str, float]]:
        load = workload(self.shape, self.trace, seed=self.seed, **self.sizes)
        slots = load.batch * load.group
        prompts = (Group([int(each) for each in row]) for row in lengths(load, load.batch * (STEPS + 4)))
        mode = Mode(self.trace, slots, self.prefetch, retains_kv=self.retains_kv)
        number = SlotController(slots, SlotBounds(int(self.least * slots), int(MOST) * slots, load.group))
        moved = number if self.moves_slots else None
        more = {"looks_in_middle": self.looks_in_middle, "kv_tokens": self.kv_tokens}
        rollout = Watched(mode, self.speed, load, self.prompt_tokens, prompts, slots=moved, **more)
        controller = DepthController(LEAST, MOST)
        found = []
        for _ in range(STEPS):
            before = rollout.mode
            step = rollout.step()
            had = {"depth": before.prefetch, "slots": before.slots, "preempted": rollout.num_preemptions}
            found.append(step | had | {"in_use": step["slot_s"] / step["seconds"] / slots})
            if self.moves_depth:
                running = step["slot_s"] / rollout.waited_s[-1] / slots
                full = number.was_full_with_few
                seen = StepLoad(running, rollout.queue.statistics().pending, is_kv_full=full, waited=1.0)
                rollout.mode = replace(rollout.mode, prefetch=controller.observe(seen).after)
        return found[self.skip :]


def rate(steps: list[dict[str, float]]) -> float:
    """Response tokens of the batches for each second of rollout."""
    return sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps)


def in_use(steps: list[dict[str, float]]) -> float:
    """Mean share of the slots to start with that ran."""
    return sum(step["in_use"] * step["seconds"] for step in steps) / sum(step["seconds"] for step in steps)


def auto(trace: str, seed: int = 0) -> list[dict[str, float]]:
    return Run(trace, moves_slots=True, moves_depth=True, seed=seed).steps()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("trace", ["long_tail", "heavy_tail"])
def test_slots_are_in_use_where_two_batches_leave_them_idle(trace: str, seed: int):
    base = Run(trace, seed=seed).steps()
    steps = auto(trace, seed)
    assert in_use(base) < 0.65
    assert in_use(steps) >= 0.85
    assert steps[-1]["depth"] == MOST
    assert rate(steps) > 1.2 * rate(base)
    assert rate(steps) > 1.5 * rate(Run(trace, retains_kv=False, seed=seed).steps())


def test_looks_at_the_end_of_short_waits_alone_find_slots_free_that_were_short_before():
    """At the end no prompt is pending, so slots come free and the number stays where it is."""
    steps = Run("heavy_tail", moves_slots=True, moves_depth=True, looks_in_middle=False, seed=2).steps()
    assert steps[-1]["depth"] == MOST
    assert steps[-1]["slots"] == steps[0]["slots"] == 32
    assert in_use(steps) < 0.8


def test_equal_lengths_stay_at_two_batches_and_are_not_slower():
    steps = auto("uniform")
    assert {step["depth"] for step in steps} == {LEAST}
    assert rate(steps) > rate(Run("uniform", prefetch=1.0).steps()) / 1.03


@pytest.mark.parametrize("trace", ["long_tail", "heavy_tail", "uniform"])
def test_adaptive_slots_gain_nothing_where_contexts_are_computed_again(trace: str):
    """So `auto` takes them with retained KV only."""
    fixed = Run(trace, retains_kv=False).steps()
    adaptive = Run(trace, retains_kv=False, moves_slots=True).steps()
    assert rate(adaptive) < 1.02 * rate(fixed)


@pytest.mark.parametrize("seed", range(3))
def test_a_whole_batch_at_once_fills_the_slots_sooner_than_two_halves(seed: int, monkeypatch: pytest.MonkeyPatch):
    """From the second to the 33rd step, in which it reaches the same depth five steps or more before."""

    def first_steps() -> list[dict[str, float]]:
        return Run("long_tail", moves_slots=True, moves_depth=True, seed=seed, skip=1).steps()[:32]

    whole = first_steps()
    monkeypatch.setattr(depth, "RISE", depth.CHANGE)
    halves = first_steps()
    assert (whole[4]["depth"], halves[4]["depth"], whole[-1]["depth"], halves[-1]["depth"]) == (3.0, 2.5, 3.0, 3.0)
    assert rate(whole) > 1.015 * rate(halves)


@pytest.mark.parametrize("mode", ["flag", "flag_released"])
def test_a_stored_job_of_a_gpu_rose_first_when_the_controller_does(
    repository: Path, mode: str, monkeypatch: pytest.MonkeyPatch
):
    """The steps' slots and queue, given to the controller step by step, make the depths that the job had.

    The job added half a batch at a time. Its KV cache was never full.
    """
    monkeypatch.setattr(depth, "RISE", depth.CHANGE)
    stored = read_result(repository / "benchmarks/results/gpu/jobs_8b_four_h200.json")["jobs"]
    (job,) = (job for job in stored if job["mode"] == mode)
    steps, controller = job["first_steps"] + job["steps"], DepthController(LEAST, MOST)
    loads = [
        StepLoad(
            step["partial_rollout/slots_taken"],
            int(step["partial_rollout/queue/pending"]),
            is_kv_full=False,
            waited=step["partial_rollout/waited"],
        )
        for step in steps
    ]
    found = [controller.depth, *(controller.observe(seen).after for seen in loads[:-1])]
    assert found == [step["partial_rollout/depth"] for step in steps]
    assert (found[0], found[5], found[10], found[-1]) == (LEAST, 2.5, MOST, MOST)
    monkeypatch.undo()
    controller = DepthController(LEAST, MOST)
    assert [controller.observe(seen).after for seen in loads] == [LEAST] * 4 + [MOST] * (len(loads) - 4)


def with_kv(repository: Path, least: float, kv_tokens: int, seed: int) -> list[dict[str, float]]:
    """8B with the sizes of a stored job, `jobs_8b_released_together_h200.json`, but for the KV cache."""
    curve = read_result(repository / "benchmarks/results/gpu/engine_8b_h200.json")["curve"]
    run = Run("long_tail", moves_slots=True, moves_depth=True, seed=seed, skip=1, kv_tokens=kv_tokens, least=least)
    return replace(run, speed=fit(curve), shape="8b", sizes={"batch": 20, "group": 8}, prompt_tokens=256).steps()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kv_tokens", [200_000, 257_700])
def test_where_the_kv_cache_is_full_fewer_slots_take_less_time_than_fewer_batches(
    repository: Path, kv_tokens: int, seed: int
):
    by_slots, by_batches = (with_kv(repository, least, kv_tokens, seed) for least in (0.5, 1.0))
    assert by_batches[-1]["preempted"] > 0
    assert min(step["slots"] for step in by_batches) == 160 > min(step["slots"] for step in by_slots) >= 80
    depths = [fmean(step["depth"] for step in steps) for steps in (by_batches, by_slots)]
    assert depths[0] + 0.25 < depths[1]
    assert rate(by_slots) > 1.02 * rate(by_batches)


@pytest.mark.parametrize("seed", range(3))
def test_slots_that_a_full_cache_took_come_back_though_more_requests_were_slow_then(repository: Path, seed: int):
    """With 120 slots, as in a stored job, a quarter fewer requests run and the cache is two thirds full."""
    steps = with_kv(repository, 0.5, 257_700, seed)[SETTLED // 2 :]
    assert min(step["slots"] for step in steps) < 160
    assert fmean(step["slots"] for step in steps) > 140


def test_a_kv_cache_with_room_for_all_leaves_the_slots_of_a_batch(repository: Path):
    by_slots, by_batches = (with_kv(repository, least, 320_000, 0) for least in (0.5, 1.0))
    assert by_slots == by_batches
    assert min(step["slots"] for step in by_slots) >= 160
    assert by_slots[-1]["preempted"] == 0
