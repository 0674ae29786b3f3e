"""The short form of the fault suite (tests/faults): workers, prompt manager, an engine and a rank die in one job."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from partial_rollout.observability.events import CheckpointSaved, StepEnded
from partial_rollout.rollout.progress_watch import ROLE as ENGINE
from partial_rollout.runtime import processes
from tests.e2e.conftest import is_conserved
from tests.faults.conftest import CORE, TRAINING, Blow, options, strike, texts_of

if TYPE_CHECKING:
    from pathlib import Path

BLOWS = [
    Blow(processes.AGENT_LOOP_WORKER.role, 2),
    Blow(processes.REWARD_WORKER.role, 3),
    Blow(processes.PROMPT_MANAGER.role, 3, TRAINING),
    Blow(ENGINE, 4, name=CORE),
    Blow(processes.TRAINING_RANK.role, 5),
]
"""Deaths, each after a completed step, while the next one generates; the prompt manager dies while the model trains."""
NUM_STEPS = 5


def test_a_job_survives_the_deaths_of_its_processes(task: Path, tmp_path: Path) -> None:
    # One batch in flight: it is never complete when an engine dies at its beginning.
    # Checkpoints by time, as often as their share of the time allows, of which one is kept.
    steps = [
        f"trainer.total_training_steps={NUM_STEPS}", "partial_rollout.prefetch_factor=1", "trainer.save_freq=-1",
        "partial_rollout.save_minutes=0.001",
    ]  # fmt: skip
    struck = strike(task, tmp_path, *options(task, tmp_path), *steps, blows=BLOWS)
    job = struck.job
    assert job.code == 0, job.output[-4000:]
    # Told when they are there again: the reward worker takes longer than the prompt manager.
    assert Counter(fault.role for fault in struck.faults) == Counter(blow.role for blow in BLOWS)
    steps = [event for event in job.stream if isinstance(event, StepEnded)]
    saved = [event for event in job.stream if isinstance(event, CheckpointSaved)]
    # A slow save puts off the next one, so the rank's death may cost a step that had ended.
    died_s = struck.faults[-1].t
    begins = max(event.step for event in saved if event.t < died_s) + 1
    # Only the rank's death started training again: the metrics file of the last start begins after its checkpoint.
    assert [step["training/global_step"] for step in job.steps] == list(range(begins, NUM_STEPS + 1))
    assert [event.step for event in steps if event.t < died_s] == list(range(1, NUM_STEPS))
    assert [event.step for event in steps if event.t > died_s] == list(range(begins, NUM_STEPS + 1))
    assert all(is_conserved(event.metrics) for event in steps)
    assert steps[-1].metrics["partial_rollout/queue/num_dropped"] == 0
    assert sum(event.metrics["partial_rollout/engine_relaunches"] or 0 for event in steps if event.t < died_s) == 1
    batches = {event["step"]: event["uids"] for event in job.events}  # of a step that was trained again the last one
    assert set(Counter(uid for uids in batches.values() for uid in uids).values()) == {1}
    assert (saved[0].step, saved[-1].step) == (1, NUM_STEPS)
    assert [path.name for path in (tmp_path / "checkpoints").glob("global_step_*")] == [f"global_step_{NUM_STEPS}"]
    assert job.survivors == []
    assert all(len(answers) == 1 for answers in texts_of(tmp_path).values())  # greedy: one response, whoever died
