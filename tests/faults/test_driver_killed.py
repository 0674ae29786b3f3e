"""Only the command itself is killed, and typed again at once, while what it has started may still run."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from partial_rollout.observability import stages
from partial_rollout.observability.events import (
    BatchTaken,
    CheckpointSaved,
    EventReader,
    ProcessFound,
    StageBegan,
    StepEnded,
)
from partial_rollout.runtime.run_restarts import runs
from tests.e2e.conftest import JOB_TIMEOUT_S, Job, _command, is_conserved, run_job, times_trained
from tests.faults.conftest import (
    DRIVER,
    GENERATING,
    TRAINING,
    Blow,
    check_same_texts,
    options,
    strike_command,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

NUM_STEPS, STRUCK_IN = 5, 3
LIMIT_S = 900.0
"""Limit of a command whose processes import everything by themselves."""


@pytest.mark.timeout(LIMIT_S + JOB_TIMEOUT_S + 300)
@pytest.mark.parametrize(("phase", "is_by_itself"), [(TRAINING, False), (GENERATING, True)])
def test_a_command_that_was_killed_alone_goes_on_when_it_is_typed_again_at_once(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any], phase: str, is_by_itself: bool
) -> None:
    """What the first one has started ends by itself, and is in nobody's way."""
    words = *options(task, tmp_path), f"trainer.total_training_steps={NUM_STEPS}", "trainer.save_freq=1"
    again: list[Job] = []

    def type_again() -> None:
        report["alive"] = sorted(_alive(tmp_path))
        began_s = time.monotonic()
        again.append(run_job(task, tmp_path, *words))
        report["again_s"] = round(time.monotonic() - began_s)

    blow = Blow(DRIVER, STRUCK_IN, phase)
    command = _command(task, tmp_path, words)
    if is_by_itself:  # in interpreters of its own; engines that are forks of the nursery end with its raylet
        command = [sys.executable, *(word for word in command[1:] if "py_executable" not in word)]
    struck = strike_command(command, tmp_path, blows=[blow], limit_s=LIMIT_S, at_once=type_again)
    (job,) = again
    report |= {"code": job.code, "left": struck.job.survivors}
    assert report["alive"]  # or nothing was there to be in the way
    assert job.code == 0, job.output[-4000:]
    assert struck.job.survivors == job.survivors == []

    check_same_texts(tmp_path, calm)
    ended = {event.step: event for event in job.stream if isinstance(event, StepEnded)}
    assert sorted(ended) == list(range(1, NUM_STEPS + 1))
    assert all(is_conserved(event.metrics) for event in ended.values())
    assert ended[NUM_STEPS].metrics["partial_rollout/queue/num_dropped"] == 0
    assert set(times_trained(job.stream).values()) == {1}
    batches = {event.step: event for event in job.stream if isinstance(event, BatchTaken)}
    assert set(Counter(row for batch in batches.values() for row in batch.source_index).values()) == {1}
    # What was killed alone may have saved another step before the rest of it had ended.
    began_s = max(event.t for event in job.stream if isinstance(event, StageBegan) and event.name == stages.RAY)
    saved = [e.step for e in job.stream if isinstance(e, CheckpointSaved) and e.t < began_s]
    assert next(e.step for e in job.stream if isinstance(e, BatchTaken) and e.t > began_s) == saved[-1] + 1
    assert saved[-1] in (STRUCK_IN - 1, STRUCK_IN)


def _alive(folder: Path) -> set[str]:
    """Names of the processes that the run has found and that are there."""
    found = [event for event in EventReader(folder / "events").read() if isinstance(event, ProcessFound) and event.pid]
    return {event.name for event in found if psutil.pid_exists(event.pid) and runs(psutil.Process(event.pid))}
