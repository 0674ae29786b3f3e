"""Processes that training cannot go on without: the same command starts training again from the last checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability.events import StepEnded
from partial_rollout.runtime import processes
from tests.faults.conftest import GENERATING, TRAINING, Blow, check_nothing_lost, check_same_texts, options, strike

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

LIMIT_S = 1800.0
"""Limit of a job that starts three times again."""
FIRST = 2
"""The step in which the first process dies; the others follow in a step each."""
ROLES = [kind.role for kind in processes.SURVIVED if kind.then is processes.Then.STARTS_AGAIN]
RAYS_OWN = {processes.RAYLET.role, processes.GCS.role}


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("phase", [GENERATING, TRAINING])
@pytest.mark.parametrize("roles", [ROLES[0::2], ROLES[1::2]], ids=["some", "others"])
def test_a_run_starts_again_after_the_death_of_any_process_that_it_needs(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any], phase: str, roles: list[str]
) -> None:
    num_steps = FIRST + len(roles)
    blows = [Blow(role, FIRST + number, phase) for number, role in enumerate(roles)]
    steps = [f"trainer.total_training_steps={num_steps}", "trainer.save_freq=1", "partial_rollout.prefetch_factor=1"]
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows, limit_s=LIMIT_S)
    job, faults = struck.job, struck.faults
    ended = [event for event in job.stream if isinstance(event, StepEnded)]
    assert job.code == 0, job.output[-4000:]
    # Processes that end with Ray's own may be told of as well; in each run it is the last one to die.
    *before_ray, last = roles
    assert last in RAYS_OWN
    assert [fault.role for fault in faults if fault.t < struck.at_s[-1]] == before_ray
    known_s = [
        round(next(fault.t for fault in faults if fault.role == role and fault.t > at_s) - at_s, 1)
        for role, at_s in zip(roles, struck.at_s, strict=True)
    ]
    report |= {"roles": roles, "while": phase, "known_s": known_s, "step_done_s": struck.step_done_s}
    assert max(known_s) < processes.NOTICED_S
    assert [event.step for event in ended] == list(range(1, num_steps + 1))
    check_nothing_lost(job, tmp_path, calm)


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_new_start_that_fails_by_something_that_passes_is_followed_by_another_one(
    task: Path, tmp_path: Path, calm: Texts
) -> None:
    failing = ("path=pkg://tests.faults.fails_to_load", "name=FailingDataset")
    steps = ["trainer.total_training_steps=3", "trainer.save_freq=1", *(f"data.custom_cls.{key}" for key in failing)]
    blows = [Blow(processes.TRAINING_RANK.role, 2)]
    job = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows, limit_s=LIMIT_S).job
    assert job.code == 0, job.output[-4000:]
    assert "the data cannot be read just now" in job.output
    assert "training is started again from its last checkpoint (new start 2 of 3)" in job.output
    assert [event.step for event in job.stream if isinstance(event, StepEnded)] == [1, 2, 3]
    assert job.survivors == []
    check_same_texts(tmp_path, calm)
