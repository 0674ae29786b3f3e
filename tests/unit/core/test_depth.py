"""The queue gets deeper while slots idle for want of prompts, and goes back when the KV cache is full."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from partial_rollout.core.depth import PATIENCE, DepthController, StepLoad

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
IDLE = StepLoad(taken=0.6, pending=0, is_kv_full=False, waited=0.5)
BUSY = replace(IDLE, taken=0.9)
PENDING = replace(IDLE, pending=1)
FULL = replace(IDLE, taken=0.95, is_kv_full=True)


def depths(steps: list[StepLoad], least: float = 2.0, most: float = 3.0) -> list[float]:
    controller = DepthController(least, most)
    return [controller.observe(step).after for step in steps]


def test_five_idle_steps_make_the_queue_a_whole_batch_deeper_up_to_its_bound():
    assert depths([IDLE] * 20) == [2.0] * 4 + [3.0] * 16
    assert depths([IDLE] * 20, most=4.0) == [2.0] * 4 + [3.0] * 5 + [4.0] * 11


def test_a_step_with_pending_prompts_begins_the_count_again():
    assert depths([IDLE] * 4 + [PENDING] + [IDLE] * 4) == [2.0] * 9
    assert depths([IDLE] * 4 + [PENDING] + [IDLE] * 5)[-2:] == [2.0, 3.0]


def test_the_mean_of_five_steps_counts_and_not_a_single_one():
    high = replace(IDLE, taken=1.5)
    assert depths([IDLE, BUSY] * 3) == [2.0] * 4 + [3.0] * 2
    assert set(depths([IDLE, high] * 10)) == {2.0}
    assert depths([high] * 30 + [IDLE] * 4)[-2:] == [2.0, 3.0]


def test_slots_that_are_in_use_leave_the_depth_as_it_is():
    assert set(depths([BUSY] * 50)) == {2.0}


@pytest.mark.parametrize(("waited", "last"), [(0.0, 2.0), (0.04, 2.0), (0.06, 3.0), (1.0, 3.0)])
def test_a_trainer_that_hardly_waits_wants_no_prompts(waited: float, last: float):
    """Engines with devices of their own are idle then because the trainer is slower."""
    assert depths([replace(IDLE, waited=waited)] * 20)[-1] == last


def test_steps_that_hardly_wait_are_outvoted_but_a_first_step_that_waits_long_decides_nothing():
    """A step that also validates or saves waits for a small share of its time."""
    validates = replace(IDLE, waited=0.01)
    assert depths([validates, IDLE] * 20)[-1] == 3.0
    assert set(depths([replace(IDLE, waited=0.95), *[validates] * 20])) == {2.0}


def stored(name: str, mode: str) -> tuple[list[StepLoad], list[float]]:
    """What a stored job has seen in each step, and its batches in flight.

    Of a job that has not stored which slots its trajectories took, those with requests in the engines count.
    """
    with gzip.open(RESULTS / f"{name}.raw.json.gz") as file:
        jobs = json.load(file)["jobs"]
    (job,) = (job for job in jobs if job["mode"] == mode)
    steps = [*job["first_steps"], *job["steps"]]
    loads = [
        StepLoad(
            taken=step.get("partial_rollout/slots_taken", step["partial_rollout/slot_utilisation"]),
            pending=step["partial_rollout/queue/pending"],
            is_kv_full=False,
            waited=step.get("partial_rollout/waited", step["timing_s/gen"] / step["timing_s/step"]),
        )
        for step in steps
    ]
    return loads, [step["partial_rollout/depth"] for step in steps]


@pytest.mark.parametrize("trace", ["long_tail", "heavy_tail"])
def test_jobs_with_a_tail_rise_in_the_step_in_which_they_did(trace: str):
    """A step's depth is the one that it began with."""
    steps, seen = stored(f"jobs_cpu_{trace}", "flag")
    assert seen == [2.0] * 5 + [3.0] * 25
    assert depths(steps)[:-1] == seen[1:]


def test_a_job_whose_engines_waited_for_training_would_have_stayed_at_two_batches():
    """The job went to three by its idle slots, and gained nothing (docs/design/0015-separate.md).

    Three steps would be too few to tell: in two of three it waits for a twentieth of the step by chance.
    """
    steps, _ = stored("gpu/jobs_0.6b_separate_h100", "separate")
    assert len(steps) == 17
    assert set(depths(steps)) == {2.0}
    assert depths([replace(step, waited=1.0) for step in steps])[-1] == 3.0


def test_a_bound_on_staleness_is_kept():
    assert set(depths([IDLE] * 50, most=2.0)) == {2.0}
    assert max(depths([IDLE] * 50, most=2.25)) == 2.25


def test_a_full_cache_takes_back_what_was_added_and_never_more():
    assert depths([IDLE] * 10 + [FULL] * 4)[9:] == [3.0, 2.5, 2.0, 2.0, 2.0]
    assert depths([IDLE] * 5 + [FULL], most=2.25)[-1] == 2.0


def test_after_a_full_cache_the_queue_gets_deeper_by_half_a_batch():
    assert depths([IDLE] * 5 + [FULL] + [IDLE] * 10)[4:] == [3.0] + [2.5] * 10 + [3.0]
    assert depths([IDLE] * 5 + [FULL] * 2 + [IDLE] * 40)[4:] == [3.0, 2.5] + [2.0] * 20 + [2.5] * 20 + [3.0]
    assert depths([FULL] + [IDLE] * 5)[-1] == 3.0  # with no more than two batches: nothing was taken away


def test_the_way_up_takes_longer_after_each_way_back():
    """Otherwise the depth would swing between two values for the whole run."""
    controller, rises = DepthController(2.0, 3.0), []
    for step in range(400):
        decision = controller.observe(FULL if controller.depth > 2.0 else IDLE)
        if decision.after > decision.before:
            rises.append(step)
    waits = [later - earlier for earlier, later in zip([-1, *rises], rises, strict=False)]
    # The first rise was a whole batch, which two steps take back.
    assert waits[:4] == [PATIENCE, 4 * PATIENCE + 2, 8 * PATIENCE + 1, 16 * PATIENCE + 1]


def test_a_decision_says_what_was_seen():
    controller = DepthController(2.0, 3.0)
    last = [controller.observe(IDLE) for _ in range(5)][-1]
    assert (
        last.reason
        == "trajectories took 60% of the slots over 5 steps, no prompt pending, the trainer waited 50% of a step"
    )
    assert controller.observe(FULL).reason == "the KV cache is full"
    assert controller.observe(PENDING).reason == "prompts pending: 1"
