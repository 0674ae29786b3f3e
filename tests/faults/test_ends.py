"""With `partial_rollout.restarts=0` a run ends soon when a process dies that it needs, and names it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.runtime import processes
from tests.faults.conftest import GENERATING, TRAINING, Blow, check_same_texts, options, strike

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

TO_END_S = 90.0
ROLES = {
    GENERATING: processes.TRAINING_RANK.role,
    TRAINING: processes.TRANSFER_QUEUE_CONTROLLER.role,
}
"""One of them waits for the others in its own code, the other one is waited for in verl's."""


@pytest.mark.parametrize("phase", ROLES)
def test_a_dead_process_ends_the_run_and_is_named(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any], phase: str
) -> None:
    role, steps = ROLES[phase], ["trainer.total_training_steps=4", "partial_rollout.restarts=0"]
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=[Blow(role, 2, phase)])
    report |= {"role": role, "while": phase, "code": struck.job.code, "steps": len(struck.job.steps)}
    report |= {"noticed_s": round(struck.seconds_to_notice(), 1), "ended_s": round(struck.seconds_to_end, 1)}
    fault = struck.faults[0]
    assert fault.role == role
    assert fault.pid
    assert struck.seconds_to_notice() < processes.NOTICED_S
    assert struck.seconds_to_end < TO_END_S
    assert struck.job.code == 1
    assert f"error: training failed: ActorLost: {role}" in struck.job.output
    assert struck.job.survivors == []
    check_same_texts(tmp_path, calm)
