"""Slots and depth as the flag alone moves them, on three traces of response lengths, in the service's scheduling."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from partial_rollout.advise.result import read_result
from partial_rollout.advise.scheduler import Group, Mode, Rollout, Speed
from partial_rollout.advise.workload import lengths, workload
from partial_rollout.core import depth
from partial_rollout.core.depth import DepthController, StepLoad
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
        return found

    def _proceed(self, until_s: float = math.inf) -> None:
        super()._proceed(min(until_s, self.next_look_s))
        if self.now_s >= self.next_look_s:
            self.next_look_s += INTERVAL_S
            self._look()

    def _look(self) -> None:
        if self.slots is not None:
            in_use = len(self.running) + len(self.entering)
            seen = EngineLoad(running=in_use, kv_usage=0.3, num_tokens=self.decoded)
            self.mode = replace(self.mode, slots=self.slots.observe(seen, in_use).after)


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

    def steps(self) -> list[dict[str, float]]:
        load = workload("small", self.trace, seed=self.seed)
        slots = load.batch * load.group
        prompts = (Group([int(each) for each in row]) for row in lengths(load, load.batch * (STEPS + 4)))
        mode = Mode(self.trace, slots, self.prefetch, retains_kv=self.retains_kv)
        number = SlotController(slots, SlotBounds(slots, int(MOST) * slots, load.group))
        moved = number if self.moves_slots else None
        rollout = Watched(mode, CPU, load, PROMPT, prompts, slots=moved, looks_in_middle=self.looks_in_middle)
        controller = DepthController(LEAST, MOST)
        found = []
        for _ in range(STEPS):
            before = rollout.mode
            step = rollout.step()
            had = {"depth": before.prefetch, "slots": before.slots}
            found.append(step | had | {"in_use": step["slot_s"] / step["seconds"] / slots})
            if self.moves_depth:
                running = step["slot_s"] / rollout.waited_s[-1] / slots
                seen = StepLoad(running, rollout.queue.statistics().pending, is_kv_full=False, waited=1.0)
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
