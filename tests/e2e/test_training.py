"""Real verl, real vLLM, real Ray: ten steps, a stop and a restart, and mistakes that must be told early."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from partial_rollout.run.data import gsm8k
from tests.e2e.conftest import ROOT, Job, run_job, run_job_and_kill

if TYPE_CHECKING:
    from pathlib import Path

FLAG = "+async_training.partial_rollout=True"
WITHOUT_PADDING = [
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.model.override_config.attn_implementation=varlen_sdpa",
]
PACKED = [
    *WITHOUT_PADDING,
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "partial_rollout.packing.token_budget=400",
]
"""Rows without padding, two mini-batches, and a budget that a mini-batch needs several micro-batches for."""
TOO_LONG = 5
pytestmark = pytest.mark.e2e


def _conserved(step: dict) -> bool:
    queue = {name: step[f"partial_rollout/queue/{name}"] for name in ("admitted", "taken", "num_dropped")}
    in_flight = sum(step[f"partial_rollout/queue/{name}"] for name in ("pending", "ongoing", "done"))
    return queue["admitted"] == in_flight + queue["taken"] + queue["num_dropped"]


def test_ten_steps_then_a_restart(task: Path, tmp_path: Path) -> None:
    """64 prompts, batch 8, 10 steps and 5 more with packed rows: 120 prompts trained and 8 in the queue are two epochs.

    What was trained and what is left must together be exactly what the dataloader gave out: every row twice.
    """
    options = [FLAG, "data.train_max_samples=64", "trainer.save_freq=5", "trainer.test_freq=4"]
    first = run_job(task, tmp_path, *options, "trainer.total_training_steps=10")
    _check_ended_cleanly(first, steps=range(1, 11))
    _check_validation_left_nothing(tmp_path / "checkpoints/global_step_10")
    resumed = sum(step["partial_rollout/resumed_trajectories"] for step in first.steps)
    trained = sum(step["partial_rollout/trajectories"] for step in first.steps)
    assert resumed >= 0.1 * trained
    assert any(key.startswith("val-core/") for step in first.steps for key in step)
    assert all(0 < step["packing/padding_share"] < 1 for step in first.steps)
    assert all(step["actor/packing_rows"] == step["packing/micro_batches"] for step in first.steps)

    second = run_job(task, tmp_path, *options, *PACKED, "trainer.total_training_steps=15")
    _check_ended_cleanly(second, steps=range(11, 16))
    assert all(step["packing/padding_share"] == 0 for step in second.steps)
    assert all(step["packing/micro_batches"] > 2 for step in second.steps)
    # A mean over mini-batches, which have different numbers of rows.
    assert all(step["actor/packing_rows"] * 2 == step["packing/micro_batches"] for step in second.steps)
    _check_validation_left_nothing(tmp_path / "checkpoints/global_step_15")
    _check_every_row_was_given_out_twice(second.events, tmp_path / "checkpoints/global_step_15")


def _check_ended_cleanly(job: Job, *, steps: range) -> None:
    assert job.code == 0, job.output[-4000:]
    assert "Traceback" not in job.output
    assert job.survivors == []
    assert [step["training/global_step"] for step in job.steps] == list(steps)
    assert all(_conserved(step) for step in job.steps)


def _check_every_row_was_given_out_twice(events: list[dict], checkpoint: Path) -> None:
    assert [event["step"] for event in events] == list(range(1, 16))
    uids = Counter(uid for event in events for uid in event["uids"])
    assert set(uids.values()) == {1}
    queue = json.loads((checkpoint / "partial_rollout/queue.json").read_text())
    left = [prompt for state in ("pending", "ongoing", "done") for prompt in queue[state]]
    assert not uids.keys() & {prompt["uid"] for prompt in left}
    rows = Counter(index for event in events for index in event["source_index"])
    rows.update(prompt["source_index"] for prompt in left)
    assert (len(rows), set(rows.values())) == (64, {2})


def _check_validation_left_nothing(checkpoint: Path) -> None:
    """Saved after the validations of steps 8 and 12; of "train" there is the queue and the trained batch."""
    partitions = pickle.loads((checkpoint / "transfer_queue/controller_state.pkl").read_bytes())["partitions"]
    left = {name: len(partition.keys_mapping) for name, partition in partitions.items()}
    assert left.pop("train") > 0
    assert left.pop("val") == 0
    assert left == {}


@pytest.fixture(scope="module")
def killed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job on the GSM8K script's files whose engine is killed after three steps.

    One of 17 prompts has more characters than the model allows. With prefetch_factor=1 three batches of 8 take every
    row of the first epoch.
    """
    folder = tmp_path_factory.mktemp("killed")
    rows = [{"question": f"Tom has {i} bats and buys 2 more. How many?", "answer": f"#### {i + 2}"} for i in range(17)]
    rows[TOO_LONG]["question"] = "A long story. " * 50
    (folder / "source").mkdir()
    for split in ("train", "test"):
        (folder / f"source/{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    gsm8k.make(folder, str(folder / "source"), tool=False)
    options = [
        f"data.train_files={folder / 'train.parquet'}", f"data.val_files={folder / 'test.parquet'}",
        "data.filter_overlong_prompts=False", "data.max_prompt_length=256", "data.max_response_length=32",
        "actor_rollout_ref.rollout.max_model_len=288", "partial_rollout.prefetch_factor=1",
    ]  # fmt: skip
    return run_job_and_kill(task, folder, FLAG, *options, after="step:3 ", process="VLLM::EngineCore")


def test_gsm8k_files_are_trained_on(killed: Job) -> None:
    """With verl's own scoring of the answers; the model cannot know any."""
    assert [step["training/global_step"] for step in killed.steps[:3]] == [1, 2, 3], killed.output[-4000:]
    assert all(_conserved(step) for step in killed.steps)
    assert {step["critic/score/mean"] for step in killed.steps} == {0.0}


def test_a_prompt_that_is_too_long_is_dropped_and_counted(killed: Job) -> None:
    trained = {int(index) for event in killed.events for index in event["source_index"]}
    assert trained == set(range(17)) - {TOO_LONG}
    assert killed.steps[2]["partial_rollout/queue/num_dropped"] >= 1


def test_a_killed_engine_ends_the_run_with_its_name(killed: Job) -> None:
    assert killed.code == 1
    assert "error: training failed: EngineDead" in killed.output
    assert killed.survivors == []


def test_without_the_flag_verls_sync_trainer_runs(task: Path, tmp_path: Path) -> None:
    """Ours is the attention only, which verl must find by itself."""
    job = run_job(task, tmp_path, *WITHOUT_PADDING, "trainer.total_training_steps=2")
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
    job = run_job(task, tmp_path, FLAG, "ray_kwargs.ray_init.num_cpus=0", "partial_rollout.timeouts.resources_s=3.0")
    assert job.code == 1
    assert "the Ray cluster lacks CPU" in job.output
    assert job.survivors == []


def test_fewer_rows_than_a_batch_are_told_before_an_engine_starts(task: Path, tmp_path: Path) -> None:
    job = run_job(task, tmp_path, FLAG, "data.train_max_samples=3")
    assert job.code == 2
    assert "data.train_files has 3 rows" in job.output
    assert "EngineCore" not in job.output
    assert job.survivors == []


def test_a_failure_between_the_first_engine_and_the_first_step_leaves_nothing(task: Path, tmp_path: Path) -> None:
    tools = "actor_rollout_ref.rollout.multi_turn.tool_config_path=/nowhere/tools.yaml"
    job = run_job(task, tmp_path, FLAG, tools)
    assert job.code == 1
    assert "/nowhere/tools.yaml" in job.output
    assert "error: training failed" in job.output
    assert job.survivors == []


def test_an_agent_loop_that_always_fails_ends_the_run(task: Path, tmp_path: Path) -> None:
    agents = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={ROOT / 'tests/e2e/broken_agent.yaml'}"
    default = "actor_rollout_ref.rollout.agent.default_agent_loop=broken_agent"
    job = run_job(task, tmp_path, FLAG, agents, default)
    assert job.code == 2
    assert "prompts were dropped and replaced while one batch was waited for" in job.output
    assert "RuntimeError: the tool server is down" in job.output
    assert job.survivors == []
