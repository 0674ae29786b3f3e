"""The short form of the fault suite (tests/faults): workers, an engine and a training rank die in one job."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from partial_rollout.observability.events import CheckpointSaved, StepEnded
from partial_rollout.rollout.progress_watch import ROLE as ENGINE
from partial_rollout.runtime import processes
from tests.e2e.conftest import is_conserved
from tests.faults.conftest import CORE, Blow, options, strike

if TYPE_CHECKING:
    from pathlib import Path

BLOWS = [
    Blow(processes.AGENT_LOOP_WORKER.role, 2),
    Blow(processes.REWARD_WORKER.role, 3),
    Blow(ENGINE, 4, name=CORE),
    Blow(processes.TRAINING_RANK.role, 5),
]
"""Each after a completed step, while the next one generates."""
NUM_STEPS = 5


def test_a_job_survives_an_agent_loop_worker_a_reward_worker_an_engine_and_a_rank(task: Path, tmp_path: Path) -> None:
    # One batch in flight: it is never complete when an engine dies at its beginning.
    # A checkpoint by time after each step, of which one is kept.
    steps = [
        f"trainer.total_training_steps={NUM_STEPS}", "partial_rollout.prefetch_factor=1", "trainer.save_freq=-1",
        "partial_rollout.save_minutes=0.001",
    ]  # fmt: skip
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=BLOWS)
    job = struck.job
    assert job.code == 0, job.output[-4000:]
    assert [fault.role for fault in struck.faults] == [blow.role for blow in BLOWS]
    # The engine and the agent-loop worker did not restart training: the metrics file of the last start begins with the
    # step of the dead rank.
    assert [step["training/global_step"] for step in job.steps] == [NUM_STEPS]
    steps = [event for event in job.stream if isinstance(event, StepEnded)]
    assert [event.step for event in steps] == list(range(1, NUM_STEPS + 1))
    assert all(is_conserved(event.metrics) for event in steps)
    assert steps[-1].metrics["partial_rollout/queue/num_dropped"] == 0
    assert sum(event.metrics["partial_rollout/engine_relaunches"] or 0 for event in steps) == 1
    uids = Counter(uid for event in job.events for uid in event["uids"])
    assert set(uids.values()) == {1}
    saved = [event.step for event in job.stream if isinstance(event, CheckpointSaved)]
    assert saved == list(range(1, NUM_STEPS + 1))
    assert [path.name for path in (tmp_path / "checkpoints").glob("global_step_*")] == [f"global_step_{NUM_STEPS}"]
    assert job.survivors == []
