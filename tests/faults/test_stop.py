"""A run that is told to end saves what it has trained, soon, and the same command goes on from it."""

from __future__ import annotations

import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.runtime import processes
from partial_rollout.runtime.termination import INTERRUPTED_CODE
from tests.e2e.conftest import run_job
from tests.faults.conftest import DRIVER, GENERATING, STARTING_AGAIN, TRAINING, Blow, check_same_texts, options, strike

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

STOP_S = 60.0
MARGIN_S = 20.0
"""For the end of Ray itself, beside other jobs."""


@pytest.mark.parametrize(
    ("phase", "saved", "number"),
    [(GENERATING, 2, signal.SIGTERM), (TRAINING, 3, signal.SIGTERM), (GENERATING, 2, signal.SIGINT)],
)
def test_a_run_that_is_told_to_end_loses_no_step(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any], phase: str, saved: int, number: signal.Signals
) -> None:
    """`phase` is that of step 3. A step that trains ends first; one that generates does not."""
    steps = [*options(task, tmp_path), "trainer.save_freq=-1", "trainer.total_training_steps=5"]
    blow = Blow(DRIVER, 3, phase, number)
    struck = strike(task, tmp_path, *steps, blows=[blow])
    job = struck.job
    report |= {"signal": number.name, "while": phase, "code": job.code, "ended_s": round(struck.seconds_to_end, 1)}
    assert job.code == INTERRUPTED_CODE, job.output[-4000:]
    assert struck.seconds_to_end < STOP_S + MARGIN_S
    assert f"step {saved} is saved" in job.output
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == str(saved)
    assert job.survivors == []
    check_same_texts(tmp_path, calm)
    if phase == TRAINING:
        return
    again = run_job(task, tmp_path, *steps)
    assert again.code == 0, again.output[-4000:]
    assert [step["training/global_step"] for step in again.steps] == list(range(saved + 1, 6))
    uids = Counter(uid for event in again.events for uid in event["uids"])
    assert set(uids.values()) == {1}
    check_same_texts(tmp_path, calm)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_starts_again_can_be_ended(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any], number: signal.Signals
) -> None:
    steps = [*options(task, tmp_path), "trainer.save_freq=1", "trainer.total_training_steps=5"]
    blows = [Blow(processes.TRAINING_RANK.role, 2), Blow(DRIVER, 2, STARTING_AGAIN, number)]
    struck = strike(task, tmp_path, *steps, blows=blows)
    job = struck.job
    report |= {
        "signal": number.name,
        "while": STARTING_AGAIN,
        "code": job.code,
        "ended_s": round(struck.seconds_to_end, 1),
    }
    assert job.code == INTERRUPTED_CODE, job.output[-4000:]
    assert struck.seconds_to_end < STOP_S + MARGIN_S
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "1"
    assert job.survivors == []
    check_same_texts(tmp_path, calm)
