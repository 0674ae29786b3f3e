"""Processes die where engines have devices of their own and generate while the model trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.observability import stages
from partial_rollout.observability.events import StageBegan, StepEnded
from partial_rollout.runtime import processes
from tests.faults.conftest import GENERATING, TRAINING, blow_at, check_nothing_lost, options, strike

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import Texts

LIMIT_S = 1200.0
"""Limit of a job that starts training three times again."""
BLOWS = (
    (processes.ENGINE, TRAINING),
    (processes.ENGINE_SERVER, TRAINING),
    (processes.ENGINE, GENERATING),
    (processes.ENGINE_PLACE, TRAINING),
    (processes.ENGINE_PLACE, GENERATING),
    (processes.TRAINING_RANK, TRAINING),
)
FIRST = 2
"""The step in which the first process dies; a further one dies in each step that follows."""
NUM_STEPS = FIRST + len(BLOWS)


@pytest.mark.timeout(LIMIT_S + 300)
def test_a_run_with_engines_of_their_own_ends_with_all_its_steps(
    task: Path, tmp_path: Path, calm: Texts, report: dict[str, Any]
) -> None:
    """The engine's deaths cost no new start of training; those of its place and of a rank do."""
    blows = [blow_at(kind, step, phase) for step, (kind, phase) in enumerate(BLOWS, start=FIRST)]
    separate = ["partial_rollout.placement=separate", "ray_kwargs.ray_init.num_gpus=2"]
    steps = [f"trainer.total_training_steps={NUM_STEPS}", "trainer.save_freq=1", "partial_rollout.prefetch_factor=1"]
    struck = strike(task, tmp_path, *options(task, tmp_path), *separate, *steps, blows=blows, limit_s=LIMIT_S)
    job, faults = struck.job, struck.faults
    ended = [event for event in job.stream if isinstance(event, StepEnded)]
    report |= {"step_done_s": struck.step_done_s, "faults": [(fault.role, fault.action) for fault in faults]}
    assert job.code == 0, job.output[-4000:]
    assert [event.step for event in ended] == list(range(1, NUM_STEPS + 1))
    assert {kind.role for kind, _ in BLOWS} <= {fault.role for fault in faults}
    starts = [event for event in job.stream if isinstance(event, StageBegan) and event.name == stages.RAY]
    assert len(starts) == 4
    check_nothing_lost(job, tmp_path, calm)
