"""Engines that cannot be brought back: the same command starts training again from its last checkpoint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability import stages
from partial_rollout.observability.events import Fault, StageBegan, StepEnded
from partial_rollout.runtime import processes
from partial_rollout.train.restarts import MAX_RESTARTS_A_STEP
from tests.e2e.conftest import saved_step, times_trained
from tests.faults.conftest import TRAINING, blow_at, check_nothing_lost, options, strike
from tests.faults.dies_in import STEP

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

NUM_STEPS = 5
RESUME_S = 120.0
"""How long a relaunch may take."""
LIMIT_S = 900.0
NAMED = r"replica 0 .*pid \d+"
LOST = {
    "Stillborn": rf"engines were not started again \(.*no.* answer.*{NAMED}",
    "DiesAgainAndAgain": rf"engines died {MAX_RESTARTS_A_STEP + 1} times in step {STEP}; {NAMED}",
    "DiesInEachUpdate": rf"replica 0 has not taken weight version {STEP} \(1 were relaunched.*{NAMED}",
}


@pytest.mark.timeout(LIMIT_S + 300)
@pytest.mark.parametrize("scheduler", LOST)
def test_training_is_started_again_when_engines_cannot_be_brought_back(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any], scheduler: str
) -> None:
    settings = [
        f"trainer.total_training_steps={NUM_STEPS}", "trainer.save_freq=1",
        f"partial_rollout.timeouts.resume_s={RESUME_S}", "partial_rollout.weights.relaunches=1",
        "partial_rollout.tail.interrupt_mode=abort",  # the cache of the old weights is cleared after each update
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls=tests.faults.dying_schedulers.{scheduler}",
    ]  # fmt: skip
    blows = [blow_at(processes.ENGINE, STEP)] if scheduler == "Stillborn" else []
    struck = strike(task, tmp_path, *options(task, tmp_path), *settings, blows=blows, limit_s=LIMIT_S)
    job, faults = struck.job, struck.faults
    starts = [event for event in job.stream if isinstance(event, StageBegan) and event.name == stages.RAY]
    ended = [event for event in job.stream if isinstance(event, StepEnded)]
    report |= {"code": job.code, "starts": len(starts), "survivors": job.survivors}
    report |= {"faults": [(fault.role, fault.text[:300], fault.action) for fault in faults]}
    assert job.code == 0, job.output[-4000:]
    assert len(starts) == 2
    (lost,) = [fault for fault in faults if _says_lost(fault)]
    assert lost.role == processes.ENGINE.role
    assert re.search(LOST[scheduler], lost.text, re.DOTALL), lost.text
    # A step whose checkpoint is whole is not trained again, so nobody tells of its end.
    untold = {STEP} if scheduler == "DiesInEachUpdate" else set[int]()
    assert {event.step for event in ended} == set(range(1, NUM_STEPS + 1)) - untold
    assert len(times_trained(job.stream)) == 8 * NUM_STEPS
    assert saved_step(tmp_path) == NUM_STEPS
    check_nothing_lost(job, tmp_path, calm)


@pytest.mark.timeout(LIMIT_S + 300)
def test_training_is_started_again_after_each_death_of_an_engine_that_nobody_starts_again(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    settings = [
        f"trainer.total_training_steps={NUM_STEPS}", "trainer.save_freq=1",
        "partial_rollout.weights.backend=verl", "partial_rollout.tail.interrupt_mode=abort",
    ]  # fmt: skip
    blows = [blow_at(processes.ENGINE, 2), blow_at(processes.ENGINE, 4, TRAINING)]
    struck = strike(task, tmp_path, *options(task, tmp_path), *settings, blows=blows, limit_s=LIMIT_S)
    job = struck.job
    starts = [event for event in job.stream if isinstance(event, StageBegan) and event.name == stages.RAY]
    report |= {"code": job.code, "starts": len(starts), "survivors": job.survivors}
    report |= {"faults": [(fault.role, fault.text[:300], fault.action) for fault in struck.faults]}
    assert job.code == 0, job.output[-4000:]
    assert len(starts) == 3
    lost = [fault for fault in struck.faults if _says_lost(fault)]
    assert [fault.role for fault in lost] == [processes.ENGINE.role] * 2
    for fault, pid in zip(lost, struck.pids, strict=True):
        assert re.search(rf"replica 0 .*pid {pid}\b", fault.text), fault.text
    assert len(times_trained(job.stream)) == 8 * NUM_STEPS
    assert saved_step(tmp_path) == NUM_STEPS
    check_nothing_lost(job, tmp_path, calm)


def _says_lost(fault: Fault) -> bool:
    return fault.action.startswith("training is started again")
