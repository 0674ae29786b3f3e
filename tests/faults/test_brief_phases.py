"""Processes die while a checkpoint is saved, before the gates open, and while weights are on their way."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability.events import StepEnded
from partial_rollout.runtime import processes
from tests.e2e.conftest import saved_step, times_trained
from tests.faults.conftest import (
    CORE,
    SAVING,
    SENDING,
    SHUT,
    Blow,
    blow_at,
    check_all_trained_once,
    check_nothing_lost,
    check_same_texts,
    options,
    strike,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

LIMIT_S = 1200.0
"""Limit of a job that starts training twice again."""
FIRST = 2
"""The step in which the first process dies; a further one dies in each step that follows."""
KINDS = (
    processes.TRAINING_RANK,
    processes.AGENT_LOOP_WORKER,
    processes.TRANSFER_QUEUE_CONTROLLER,
    processes.PROMPT_MANAGER,
    processes.ENGINE,
)
NUM_STEPS = FIRST + len(KINDS)


@pytest.mark.timeout(LIMIT_S + 300)
@pytest.mark.parametrize("phase", [SAVING, SENDING])
def test_a_run_survives_deaths_while_it_saves_or_sends_weights(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any], phase: str
) -> None:
    blows = [blow_at(kind, step, phase) for step, kind in enumerate(KINDS, start=FIRST)]
    steps = [f"trainer.total_training_steps={NUM_STEPS}", "trainer.save_freq=1"]
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows, limit_s=LIMIT_S)
    job = struck.job
    ended = [event for event in job.stream if isinstance(event, StepEnded)]
    report |= {"code": job.code, "faults": [(fault.role, fault.action) for fault in struck.faults]}
    assert job.code == 0, job.output[-4000:]
    assert {fault.role for fault in struck.faults} == {blow.role for blow in blows}
    # A step whose checkpoint is whole is not trained again, so nobody tells of its end where training starts again.
    untold = {blow.step for blow, kind in zip(blows, KINDS, strict=True) if kind.then is processes.Then.STARTS_AGAIN}
    wanted = set(range(1, NUM_STEPS + 1)) - (untold if phase == SENDING else set())
    assert {event.step for event in ended} >= wanted
    assert len(times_trained(job.stream)) == 8 * NUM_STEPS
    assert saved_step(tmp_path) == NUM_STEPS
    check_nothing_lost(job, tmp_path, calm)


ON_THE_WAY_S = 1.0
"""After the step's checkpoint, which is followed by the update at once."""


def test_an_engine_server_dies_while_weights_are_on_the_way_to_its_engine(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    """The engine is frozen before, and takes no more than fits into the buffers: the update waits for it."""
    role = processes.ENGINE_SERVER.role
    blows = [
        Blow(processes.ENGINE.role, 2, SHUT, signal.SIGSTOP, name=CORE),
        Blow(role, 2, SENDING, delay_s=ON_THE_WAY_S),
    ]
    steps = ["trainer.total_training_steps=4", "trainer.save_freq=1"]
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows)
    report |= {"code": struck.job.code, "faults": [(f.role, f.text[:200], f.action) for f in struck.faults]}
    assert struck.job.code == 0, struck.job.output[-4000:]
    assert role in {fault.role for fault in struck.faults}
    assert struck.seconds_to_notice(1) < processes.REPLACED_S
    check_all_trained_once(struck.job, 4)
    check_same_texts(tmp_path, calm)
    assert sum(step["partial_rollout/engine_relaunches"] for step in struck.job.steps) == 1
