"""Processes that freeze while training starts: each is named within its time; a first start ends, a new one is followed
by another one."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability.events import StepEnded
from partial_rollout.runtime import processes
from tests.faults.conftest import GENERATING, STARTING, Blow, check_same_texts, options, strike

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

CLAIM_S = 10.0
MARGIN_S = 20.0
"""Looking, killing it, and saying so, beside other jobs."""
TO_END_S = 90.0
LIMIT_S = 1200.0
"""Limit of a job that starts four times again."""
FROZEN = [processes.TRAINING_RANK.role, processes.ENGINE_SERVER.role, processes.TASK_RUNNER.role]


@pytest.mark.parametrize("role", [processes.TRANSFER_QUEUE_CONTROLLER.role, processes.TRAINING_RANK.role])
def test_a_first_start_in_which_a_process_freezes_ends_and_names_it(
    task: Path, tmp_path: Path, report: dict[str, Any], role: str
) -> None:
    steps = ["trainer.total_training_steps=2", f"partial_rollout.timeouts.claim_s={CLAIM_S}"]
    blow = Blow(role, 1, STARTING, signal.SIGSTOP)
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=[blow])
    job = struck.job
    report |= {"role": role, "while": STARTING, "code": job.code, "faults": [(f.role, f.text) for f in struck.faults]}
    report |= {"known_s": round(struck.seconds_to_notice(), 1), "ended_s": round(struck.seconds_to_end, 1)}
    assert job.code == 1
    assert struck.faults[0].role == role
    assert struck.faults[0].pid
    assert struck.seconds_to_notice() < CLAIM_S + MARGIN_S
    assert struck.seconds_to_end < CLAIM_S + TO_END_S
    assert f"error: training failed: ActorLost: {role}" in job.output
    assert "was stopped for 1" in job.output
    assert job.survivors == []


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_new_start_in_which_a_process_freezes_is_followed_by_another_one(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    roles = [processes.TRAINING_RANK.role, *FROZEN]
    blows = [Blow(roles[0], 2, GENERATING)]
    blows += [Blow(role, 2 + number, STARTING, signal.SIGSTOP) for number, role in enumerate(FROZEN)]
    steps = [
        "trainer.total_training_steps=3", "trainer.save_freq=1", "partial_rollout.restarts=4",
        f"partial_rollout.timeouts.claim_s={CLAIM_S}",
    ]  # fmt: skip
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=blows, limit_s=LIMIT_S)
    job, faults = struck.job, struck.faults
    report |= {"roles": roles, "while": STARTING, "code": job.code, "faults": [(f.role, f.text) for f in faults]}
    known_s = [round(fault.t - at_s, 1) for fault, at_s in zip(faults, struck.at_s, strict=False)]
    report |= {"known_s": known_s}
    assert job.code == 0, job.output[-4000:]
    assert [fault.role for fault in faults] == roles
    assert max(known_s) < CLAIM_S + MARGIN_S
    assert [event.step for event in job.stream if isinstance(event, StepEnded)] == [1, 2, 3]
    assert job.survivors == []
    check_same_texts(tmp_path, calm)
