"""Slots and depth as the flag alone moves them, on three traces of response lengths, in the service's scheduling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from partial_rollout.advise.result import read_result
from partial_rollout.advise.scheduler import Group, Mode, Rollout, Speed
from partial_rollout.advise.workload import lengths, workload
from partial_rollout.core.depth import DepthController, StepLoad
from partial_rollout.core.slots import EngineLoad, SlotBounds, SlotController

if TYPE_CHECKING:
    from pathlib import Path

CPU = Speed(0.008, 0.00025, 0.0, prefill_tokens_per_s=4000.0, interruption_s=0.2)
"""About what vLLM does on two cores with the benchmarks' small model."""
STEPS, SETTLED, PROMPT = 60, 20, 32
LEAST, MOST = 2.0, 3.0


@dataclass
class Run:
    """Whole steps of one mode; `move` lets slots and depth follow what is seen at the end of each step."""

    trace: str
    prefetch: float = LEAST
    retains_kv: bool = True
    moves_slots: bool = False
    moves_depth: bool = False

    def steps(self) -> list[dict[str, float]]:
        load = workload("small", self.trace)
        slots = load.batch * load.group
        prompts = (Group([int(each) for each in row]) for row in lengths(load, load.batch * (STEPS + 4)))
        mode = Mode(self.trace, slots, self.prefetch, retains_kv=self.retains_kv)
        rollout = Rollout(mode, CPU, load, PROMPT, prompts)
        depth = DepthController(LEAST, MOST)
        number = SlotController(slots, SlotBounds(slots, int(MOST) * slots, load.group))
        found = []
        for tokens in range(1, STEPS + 1):
            step = rollout.step()
            found.append(step | {"in_use": step["slot_s"] / step["seconds"] / slots, "depth": rollout.mode.prefetch})
            if self.moves_depth:
                after = depth.observe(
                    StepLoad(found[-1]["in_use"], rollout.queue.statistics().pending, is_kv_full=False)
                ).after
                rollout.mode = replace(rollout.mode, prefetch=after)
            if self.moves_slots:
                # Looked at when the step's requests run, as the trainer does while it waits for a batch.
                in_use = min(rollout.mode.slots, int(rollout.mode.prefetch * slots))
                look = number.observe(EngineLoad(running=in_use, kv_usage=0.3, num_tokens=tokens), in_use)
                rollout.mode = replace(rollout.mode, slots=look.after)
        return found[SETTLED:]


def rate(steps: list[dict[str, float]]) -> float:
    """Response tokens of the batches for each second of rollout."""
    return sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps)


def in_use(steps: list[dict[str, float]]) -> float:
    """Mean share of the slots to start with that ran."""
    return sum(step["in_use"] * step["seconds"] for step in steps) / sum(step["seconds"] for step in steps)


def auto(trace: str) -> list[dict[str, float]]:
    return Run(trace, moves_slots=True, moves_depth=True).steps()


@pytest.mark.parametrize("trace", ["long_tail", "heavy_tail"])
def test_slots_are_in_use_where_two_batches_leave_them_idle(trace: str):
    base = Run(trace).steps()
    steps = auto(trace)
    assert in_use(base) < 0.65
    assert in_use(steps) >= 0.85
    assert steps[-1]["depth"] == MOST
    assert rate(steps) > 1.2 * rate(base)
    assert rate(steps) > 1.5 * rate(Run(trace, retains_kv=False).steps())


def test_equal_lengths_stay_at_two_batches_and_are_not_slower():
    steps = auto("uniform")
    assert {step["depth"] for step in steps} == {LEAST}
    assert rate(steps) > rate(Run("uniform", prefetch=1.0).steps()) / 1.03


@pytest.mark.parametrize("trace", ["long_tail", "heavy_tail"])
def test_adaptive_slots_gain_nothing_where_contexts_are_computed_again(trace: str):
    """So `auto` takes them with retained KV only."""
    fixed = Run(trace, retains_kv=False).steps()
    adaptive = Run(trace, retains_kv=False, moves_slots=True).steps()
    assert rate(adaptive) < 1.02 * rate(fixed)


def test_a_stored_job_of_a_gpu_moved_its_depth_as_the_controller_does(repository: Path):
    """The steps' slots and queue, given to the controller step by step, make the depths that the job had.

    Its KV cache was never full.
    """
    job = read_result(repository / "benchmarks/results/gpu/jobs_8b_flag_h200.json")["jobs"][0]
    steps, controller, slots = job["first_steps"] + job["steps"], DepthController(LEAST, MOST), 256
    found = [controller.depth]
    for step in steps[:-1]:
        running, pending = step["partial_rollout/mean_running"], int(step["partial_rollout/queue/pending"])
        found.append(controller.observe(StepLoad(running / slots, pending, is_kv_full=False)).after)
    assert found == [step["partial_rollout/depth"] for step in steps]
    assert (found[0], found[5], found[10], found[-1]) == (LEAST, 2.5, MOST, MOST)
