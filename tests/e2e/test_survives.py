"""The short form of the fault suite (tests/faults): processes of every kind that others replace die in one job."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

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
]
"""Each after a completed step, while the next one generates."""
NUM_STEPS = 5


def test_a_job_survives_an_agent_loop_worker_a_reward_worker_and_an_engine(task: Path, tmp_path: Path) -> None:
    # One batch in flight: it is never complete when an engine dies at its beginning.
    steps = [f"trainer.total_training_steps={NUM_STEPS}", "partial_rollout.prefetch_factor=1"]
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=BLOWS)
    job = struck.job
    assert job.code == 0, job.output[-4000:]
    assert [fault.role for fault in struck.faults] == [blow.role for blow in BLOWS]
    assert [step["training/global_step"] for step in job.steps] == list(range(1, NUM_STEPS + 1))
    assert all(is_conserved(step) for step in job.steps)
    assert job.steps[-1]["partial_rollout/queue/num_dropped"] == 0
    assert sum(step["partial_rollout/engine_relaunches"] for step in job.steps) == 1
    uids = Counter(uid for event in job.events for uid in event["uids"])
    assert set(uids.values()) == {1}
    assert job.survivors == []
