"""Groups with tokens past the bound lose them, in two real jobs: they are dropped, or begin again.

After the steps that show it, one job meets an agent loop that always fails, the other loses its engine.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import (
    FLAG,
    LONG,
    SHORT,
    Job,
    is_conserved,
    run_job,
    run_job_and_signal,
    saved_step,
    with_lengths,
)

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 4
BATCH = 8
pytestmark = pytest.mark.e2e


def _options(past: str) -> list[str]:
    # With one batch in flight, as `auto` takes it for this bound, nothing would ever be too old.
    deep = "partial_rollout.prefetch_factor=2"
    return [FLAG, deep, "partial_rollout.tail.max_staleness=0", f"partial_rollout.tail.past_staleness={past}"]


def _lengths(num_rows: int) -> list[int]:
    """Every second group is long, and 16 are in flight: long ones are interrupted when a batch is full."""
    return [LONG if row % 2 else SHORT for row in range(num_rows)]


def _check(job: Job) -> None:
    """The first steps; what ends the job comes after them."""
    steps, events = job.steps[:STEPS], job.events[:STEPS]
    assert [step["training/global_step"] for step in steps] == list(range(1, STEPS + 1)), job.output[-4000:]
    assert all(is_conserved(step) for step in steps)
    assert [event["step"] for event in events] == list(range(1, STEPS + 1))
    uids = Counter(uid for event in events for uid in event["uids"])
    assert len(uids) == sum(uids.values()) == STEPS * BATCH
    # No token that the bound forbids is trained, nor masked: those groups never get into a batch.
    assert [step["partial_rollout/staleness_steps/max"] for step in steps] == [0] * STEPS
    assert [step["partial_rollout/old_kv_token_share"] for step in steps] == [0] * STEPS
    assert job.survivors == []


def _rows(job: Job) -> list[list[int]]:
    return [[int(index) for index in event["source_index"]] for event in job.events[:STEPS]]


def test_groups_past_the_bound_are_dropped_and_an_agent_loop_that_always_fails_ends_the_run_which_saves_its_steps(
    task: Path, tmp_path: Path
) -> None:
    """All rows after the first 80 have that agent loop."""
    rows = with_lengths(task, tmp_path, _lengths(240), agent={"broken_agent": range(80, 240)})
    job = run_job(task, tmp_path, *_options("drop"), *rows, "trainer.total_training_steps=30")
    _check(job)
    rows = [row for rows in _rows(job) for row in rows]
    assert len(set(rows)) == len(rows)
    last = job.steps[STEPS - 1]
    dropped = last["partial_rollout/queue/num_dropped"]
    assert dropped == last["partial_rollout/dropped/too_stale"] >= BATCH
    # One that had no token yet when it was interrupted is no older than a fresh one.
    assert sum(row % 2 for row in rows) < dropped
    assert last["partial_rollout/queue/restarted"] == 0

    assert job.code == 2
    assert "prompts were dropped and replaced during the wait for one batch" in job.output
    assert "RuntimeError: the tool server is down" in job.output
    assert saved_step(tmp_path) == job.steps[-1]["training/global_step"]


def test_groups_past_the_bound_begin_again_and_the_end_of_a_run_without_restarts_names_the_engine_that_was_killed(
    task: Path, tmp_path: Path
) -> None:
    rows = with_lengths(task, tmp_path, _lengths(64))
    never = ["partial_rollout.weights.relaunches=0", "partial_rollout.restarts=0"]
    options = [*_options("restart"), *rows, "trainer.total_training_steps=30", *never]
    engine = {"process": "VLLM::EngineCore", "number": signal.SIGKILL}
    job = run_job_and_signal(task, tmp_path, *options, after=f"step:{STEPS} ", **engine)
    _check(job)
    again = [row for rows in _rows(job)[1:] for row in rows if row % 2 == 1 and row < 2 * BATCH]
    assert again  # they had begun with the first batch's, and lost what they had by its end
    assert LONG in {step["response_length/max"] for step in job.steps[1:STEPS]}
    assert job.steps[STEPS - 1]["partial_rollout/queue/restarted"] >= BATCH // 2

    assert job.code == 1
    # The kill may meet the engine while it generates, or while it takes new weights.
    named = re.search(
        r"error: training failed: .*(EngineDead|EnginesLost): replica 0 .*engine \(pid \d+", job.output, re.DOTALL
    )
    assert named, job.output[-4000:]
