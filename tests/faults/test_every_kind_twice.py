"""One run in which a process of every kind dies, and then once more: it ends with all its steps."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability.events import StepEnded
from partial_rollout.runtime import processes
from tests.e2e.conftest import is_conserved, times_trained
from tests.faults.conftest import blow_at, check_same_texts, options, strike

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

LIMIT_S = 3000.0
"""Limit of a job that starts training twelve times again."""
FIRST = 2
"""The step in which the first process dies; a further one dies in each step that follows."""
KINDS = [kind for _ in range(2) for kind in processes.SURVIVED]
NUM_STEPS = FIRST + len(KINDS)


@pytest.mark.timeout(LIMIT_S + 300)
def test_a_run_ends_with_all_its_steps_though_every_kind_of_process_dies_twice(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    blows = [blow_at(kind, step) for step, kind in enumerate(KINDS, start=FIRST)]
    # One batch in flight: it is never complete when a process dies at its beginning.
    steps = [f"trainer.total_training_steps={NUM_STEPS}", "trainer.save_freq=1", "partial_rollout.prefetch_factor=1"]
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows, limit_s=LIMIT_S)
    job = struck.job
    ended = [event for event in job.stream if isinstance(event, StepEnded)]
    report |= {"roles": [kind.role for kind in KINDS], "code": job.code, "step_done_s": struck.step_done_s}
    report |= {
        "seconds": round(struck.ended_s - job.stream[0].t),
        "faults": [(f.role, f.action) for f in struck.faults],
    }
    assert job.code == 0, job.output[-4000:]
    assert [event.step for event in ended] == list(range(1, NUM_STEPS + 1))
    assert all(is_conserved(event.metrics) for event in ended)
    assert ended[-1].metrics["partial_rollout/queue/num_dropped"] == 0
    assert Counter(fault.role for fault in struck.faults) >= Counter(
        blow.role for blow in blows if blow.role != processes.WITNESS.role
    )
    assert set(times_trained(job.stream).values()) == {1}
    assert job.survivors == []
    check_same_texts(tmp_path, calm)
