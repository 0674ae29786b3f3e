"""Processes that run and do not go on: each is named with what it does, killed, and training starts again."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability.events import StepEnded, Warned
from partial_rollout.runtime import processes
from tests.e2e.conftest import is_conserved, times_trained
from tests.e2e.hangs_in import QUEUE_IN, RANK_IN
from tests.faults.conftest import TRAINING, check_same_texts, options, strike
from tests.faults.measured import NEVER_S, cost_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

HANGS = "hangs"
"""Stands for a signal."""
TRAIN_S = 15.0
"""A first phase may take four times as long, which is enough for a step of the job beside others."""
NUM_STEPS = 4
LIMIT_S = 1200.0
"""Limit of a job that starts twice again."""


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_run_survives_a_loss_that_hangs_and_a_transfer_queue_that_does_not_answer(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    steps = [
        f"trainer.total_training_steps={NUM_STEPS}", "trainer.save_freq=1", "partial_rollout.prefetch_factor=1",
        f"partial_rollout.timeouts.train_s={TRAIN_S}",
        "actor_rollout_ref.model.external_lib=tests.e2e.hanging_loss",
        "actor_rollout_ref.actor.policy_loss.loss_mode=hanging",
    ]  # fmt: skip
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=[], limit_s=LIMIT_S)
    job, faults = struck.job, struck.faults
    ended = [event for event in job.stream if isinstance(event, StepEnded)]
    hung_s = [(tmp_path / f"hung-{step}").stat().st_mtime for step in (RANK_IN, QUEUE_IN)]
    roles = [processes.TRAINING_RANK.role, processes.TRANSFER_QUEUE_CONTROLLER.role]
    report |= {"code": job.code, "faults": [fault.text for fault in faults]}
    report["blows"] = [
        {"role": role, "while": TRAINING, "step": step, "signal": HANGS, **asdict(cost_of(job.stream, at_s, until_s))}
        for role, step, at_s, until_s in zip(roles, (RANK_IN, QUEUE_IN), hung_s, [*hung_s[1:], NEVER_S], strict=True)
    ]
    assert job.code == 0, job.output[-4000:]
    rank, queue = faults
    assert (rank.role, rank.step) == (processes.TRAINING_RANK.role, RANK_IN)
    assert "the trainer had trained step 2 for" in rank.text
    assert "hanging (" in rank.text  # where it stood
    assert queue.role == processes.TRANSFER_QUEUE_CONTROLLER.role
    assert "and waited for TransferQueue's answer" in queue.text
    assert rank.pid
    assert queue.pid
    warned = [event.text for event in job.stream if isinstance(event, Warned)]
    assert any("has trained step 2 for" in text and "_update_actor" in text and "actor-0" in text for text in warned)
    assert [event.step for event in ended] == list(range(1, NUM_STEPS + 1))
    assert all(is_conserved(event.metrics) for event in ended)
    assert set(times_trained(job.stream).values()) == {1}
    assert job.survivors == []
    check_same_texts(tmp_path, calm)
