"""Real verl, real vLLM, real Ray: ten steps, a stop and a restart, and mistakes that must be told early."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import run_job

if TYPE_CHECKING:
    from pathlib import Path

FLAG = "+async_training.partial_rollout=True"
pytestmark = pytest.mark.e2e


def _conserved(step: dict) -> bool:
    queue = {name: step[f"partial_rollout/queue/{name}"] for name in ("admitted", "taken", "num_dropped")}
    in_flight = sum(step[f"partial_rollout/queue/{name}"] for name in ("pending", "ongoing", "done"))
    return queue["admitted"] == in_flight + queue["taken"] + queue["num_dropped"]


def test_ten_steps_resume_trajectories_and_end_cleanly(task: Path, tmp_path: Path) -> None:
    job = run_job(task, tmp_path, FLAG, "trainer.total_training_steps=10", "trainer.test_freq=4")
    assert job.code == 0, job.output[-4000:]
    assert "Traceback" not in job.output
    assert job.survivors == []
    assert [step["training/global_step"] for step in job.steps] == list(range(1, 11))
    assert all(_conserved(step) for step in job.steps)
    resumed = sum(step["partial_rollout/resumed_trajectories"] for step in job.steps)
    trained = sum(step["partial_rollout/trajectories"] for step in job.steps)
    assert resumed >= 0.1 * trained
    assert any(key.startswith("val-core/") for step in job.steps for key in step)


def test_a_restart_loses_no_prompt_and_trains_none_twice(task: Path, tmp_path: Path) -> None:
    """64 prompts, batch 8: an epoch is 8 steps, stopped after 3. What was trained and what is left in the queue at the
    end must together be exactly what the dataloader gave out: every row once, and 16 prefetched rows a second time."""
    options = [FLAG, "data.train_max_samples=64", "trainer.save_freq=1"]
    for last_step in (3, 8):
        job = run_job(task, tmp_path, *options, f"trainer.total_training_steps={last_step}")
        assert job.code == 0, job.output[-4000:]
    assert [event["step"] for event in job.events] == list(range(1, 9))
    trained = Counter(uid for event in job.events for uid in event["uids"])
    assert set(trained.values()) == {1}
    queue = json.loads((tmp_path / "checkpoints/global_step_8/partial_rollout/queue.json").read_text())
    left = [prompt for state in ("pending", "ongoing", "done") for prompt in queue[state]]
    assert not trained.keys() & {prompt["uid"] for prompt in left}
    rows = Counter(index for event in job.events for index in event["source_index"])
    rows.update(prompt["source_index"] for prompt in left)
    assert len(rows) == 64
    assert rows.total() == 80


def test_without_the_flag_verls_sync_trainer_runs(task: Path, tmp_path: Path) -> None:
    job = run_job(task, tmp_path, "trainer.total_training_steps=2")
    assert job.code == 0, job.output[-4000:]
    assert [step["training/global_step"] for step in job.steps] == [1, 2]
    assert not any(key.startswith("partial_rollout/") for key in job.steps[0])
    assert job.survivors == []


def test_a_mistake_is_told_before_anything_starts(task: Path, tmp_path: Path) -> None:
    job = run_job(task, tmp_path, FLAG, "data.train_files=/nowhere/train.parquet")
    assert job.code == 2
    assert "data.train_files=/nowhere/train.parquet does not exist" in job.output
    assert "Traceback" not in job.output


def test_missing_resources_are_named(task: Path, tmp_path: Path) -> None:
    job = run_job(task, tmp_path, FLAG, "ray_kwargs.ray_init.num_cpus=2", "partial_rollout.timeouts.resources_s=3.0")
    assert job.code == 1
    assert "the Ray cluster lacks CPU" in job.output
    assert job.survivors == []
