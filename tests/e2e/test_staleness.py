"""Groups with tokens past the bound lose them, in a real job: they are dropped, or begin again."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import FLAG, LONG, Job, is_conserved, run_job, traced

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 4
BATCH = 8
pytestmark = pytest.mark.e2e


def _run(task: Path, folder: Path, past: str) -> Job:
    """Every second group is long, and 16 are in flight: long ones are interrupted when a batch is full."""
    job = run_job(
        task, folder, FLAG, *traced(task, folder, num_rows=64, every=2), f"trainer.total_training_steps={STEPS}",
        "partial_rollout.tail.max_staleness=0", f"partial_rollout.tail.past_staleness={past}",
    )  # fmt: skip
    assert job.code == 0, job.output[-4000:]
    assert "Traceback" not in job.output
    assert job.survivors == []
    assert all(is_conserved(step) for step in job.steps)
    assert [event["step"] for event in job.events] == list(range(1, STEPS + 1))
    uids = Counter(uid for event in job.events for uid in event["uids"])
    assert len(uids) == sum(uids.values()) == STEPS * BATCH
    # No token that the bound forbids is trained, nor masked: those groups never get into a batch.
    assert [step["partial_rollout/staleness_steps/max"] for step in job.steps] == [0] * STEPS
    return job


def _rows(job: Job) -> list[list[int]]:
    return [[int(index) for index in event["source_index"]] for event in job.events]


def test_groups_past_the_bound_are_dropped_and_fresh_ones_replace_them(task: Path, tmp_path: Path) -> None:
    job = _run(task, tmp_path, "drop")
    rows = [row for rows in _rows(job) for row in rows]
    assert len(set(rows)) == len(rows)
    dropped = job.steps[-1]["partial_rollout/queue/num_dropped"]
    assert dropped == job.steps[-1]["partial_rollout/dropped/too_stale"] >= BATCH
    # One that had no token yet when it was interrupted is no older than a fresh one.
    assert sum(row % 2 for row in rows) < dropped
    assert job.steps[-1]["partial_rollout/queue/restarted"] == 0


def test_groups_past_the_bound_begin_again_and_are_trained_whole(task: Path, tmp_path: Path) -> None:
    job = _run(task, tmp_path, "restart")
    again = [row for rows in _rows(job)[1:] for row in rows if row % 2 == 1 and row < 2 * BATCH]
    assert again  # they had begun with the first batch's, and lost what they had by its end
    assert LONG in {step["response_length/max"] for step in job.steps[1:]}
    assert job.steps[-1]["partial_rollout/queue/restarted"] >= BATCH // 2
