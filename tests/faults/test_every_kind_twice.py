"""One run in which a process of every kind dies, and then once more: it ends with all its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability.events import StepEnded
from tests.faults.conftest import check_all_told, check_nothing_lost, options, strike, twice_each

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

LIMIT_S = 3000.0
"""Limit of a job that starts training twelve times again."""
FIRST = 2
"""The step in which the first process dies; a further one dies in each step that follows."""
BLOWS = twice_each(FIRST)
NUM_STEPS = FIRST + len(BLOWS)


@pytest.mark.timeout(LIMIT_S + 300)
def test_a_run_ends_with_all_its_steps_though_every_kind_of_process_dies_twice(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    # One batch in flight: it is never complete when a process dies at its beginning.
    steps = [f"trainer.total_training_steps={NUM_STEPS}", "trainer.save_freq=1", "partial_rollout.prefetch_factor=1"]
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=BLOWS, limit_s=LIMIT_S)
    job = struck.job
    ended = [event for event in job.stream if isinstance(event, StepEnded)]
    report |= {"roles": [blow.role for blow in BLOWS], "code": job.code, "step_done_s": struck.step_done_s}
    report |= {
        "seconds": round(struck.ended_s - job.stream[0].t),
        "faults": [(f.role, f.action) for f in struck.faults],
    }
    assert job.code == 0, job.output[-4000:]
    assert [event.step for event in ended] == list(range(1, NUM_STEPS + 1))
    check_all_told(struck)
    check_nothing_lost(job, tmp_path, calm)
