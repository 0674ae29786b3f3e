"""Real verl, real vLLM, real Ray: ten steps, a stop and a restart, and mistakes that must be told early."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import pytest

from partial_rollout.observability.events import (
    GateMoved,
    SegmentEnded,
    StepEnded,
    TrajectoryEnded,
    WeightsUpdated,
)
from partial_rollout.runtime.termination import INTERRUPTED_CODE
from tests.e2e.conftest import FLAG, LONG, SHORT, Job, is_conserved, run_job, run_job_and_signal, with_lengths

if TYPE_CHECKING:
    from pathlib import Path

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
REUSING_KV = [
    "partial_rollout.tail.interrupt_mode=reuse_kv",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
]
"""With blocks that most responses fill."""
BOUNDED = ["partial_rollout.tail.max_staleness=1", "partial_rollout.tail.past_staleness=finish"]
pytestmark = pytest.mark.e2e


def test_ten_steps_then_a_restart(task: Path, tmp_path: Path) -> None:
    """64 prompts, batch 8, 10 steps, and 5 more that reuse KV, with packed rows: 120 trained and 8 queued, two epochs.

    What was trained and what is left must together be exactly what the dataloader gave out: every row twice. Every
    third group is long, so that steps end with requests in the engine whatever the machine does beside; the short ones
    differ, and must be padded where rows are.
    """
    lengths = [LONG if row % 3 == 2 else SHORT + row % 5 for row in range(64)]
    rows = with_lengths(task, tmp_path, lengths)
    options = [FLAG, *rows, "trainer.save_freq=5", "trainer.test_freq=4"]
    first = run_job(task, tmp_path, *options, "trainer.total_training_steps=10")
    _check_ended_cleanly(first, steps=range(1, 11))
    _check_validation_left_nothing(tmp_path / "checkpoints/global_step_10")
    resumed = sum(step["partial_rollout/resumed_trajectories"] for step in first.steps)
    trained = sum(step["partial_rollout/trajectories"] for step in first.steps)
    assert resumed >= 0.1 * trained
    validated = [step for step in first.steps if any(key.startswith("val-core/") for key in step)]
    assert any(step["partial_rollout/interrupted"] > 0 for step in validated)  # validation met parked trajectories
    assert all(0 < step["packing/padding_share"] < 1 for step in first.steps)
    assert all(step["actor/packing_rows"] == step["packing/micro_batches"] for step in first.steps)

    _check_the_event_stream_tells_the_same(first)

    options += [*PACKED, *REUSING_KV, *BOUNDED]
    second = run_job(task, tmp_path, *options, "trainer.total_training_steps=15")
    _check_ended_cleanly(second, steps=range(11, 16))
    assert all(step["partial_rollout/old_kv_token_share"] == 0 for step in first.steps)
    assert any(step["partial_rollout/old_kv_token_share"] > 0 for step in second.steps)
    # What the checkpoint had may be older; it is trained first.
    assert max(step["partial_rollout/staleness_steps/max"] for step in second.steps[1:]) == 1
    assert all(step["packing/padding_share"] == 0 for step in second.steps)
    assert all(step["packing/micro_batches"] > 2 for step in second.steps)
    # A mean over mini-batches, which have different numbers of rows.
    assert all(step["actor/packing_rows"] * 2 == step["packing/micro_batches"] for step in second.steps)
    _check_validation_left_nothing(tmp_path / "checkpoints/global_step_15")
    _check_saved_tokens_were_trained(second, tmp_path / "checkpoints/global_step_10")
    _check_every_row_was_given_out_twice(second.events, tmp_path / "checkpoints/global_step_15")


def _check_the_event_stream_tells_the_same(job: Job) -> None:
    """Steps as in verl's logger, two moves of the gate and an update a step, and no token without its segment."""
    steps = [event for event in job.stream if isinstance(event, StepEnded)]
    assert [(event.step, event.total) for event in steps] == [(step["training/global_step"], 10) for step in job.steps]
    assert [event.metrics["critic/score/mean"] for event in steps] == [step["critic/score/mean"] for step in job.steps]
    moves = [event for event in job.stream if isinstance(event, GateMoved)]
    assert [(move.step, move.is_open) for move in moves] == [(n, is_open) for n in range(1, 11) for is_open in (0, 1)]
    interrupted = [move.interrupted for move in moves if not move.is_open]
    assert interrupted == [step["partial_rollout/interrupted"] for step in job.steps]
    updates = [event.version for event in job.stream if isinstance(event, WeightsUpdated)]
    assert updates == list(range(11))
    tokens = Counter()
    for event in job.stream:
        if isinstance(event, SegmentEnded):
            tokens[event.uid, event.session] += event.tokens
    ended = {(e.uid, e.session): e.tokens for e in job.stream if isinstance(e, TrajectoryEnded)}
    assert len(ended) >= 10 * 8 * 4
    assert {key: tokens[key] for key in ended} == ended


def _check_ended_cleanly(job: Job, *, steps: range) -> None:
    assert job.code == 0, job.output[-4000:]
    assert "Traceback" not in job.output
    assert job.survivors == []
    assert [step["training/global_step"] for step in job.steps] == list(steps)
    assert all(is_conserved(step) for step in job.steps)


def _check_saved_tokens_were_trained(job: Job, checkpoint: Path) -> None:
    """In the first batch after a restart, the tokens of older weights are those that the checkpoint has."""
    queue = json.loads((checkpoint / "partial_rollout/queue.json").read_text())
    saved = msgspec.msgpack.decode((checkpoint / "partial_rollout/tokens.msgpack").read_bytes())
    uids = set(job.events[10]["uids"])
    waiting = [trajectory for group in queue["done"] if group["uid"] in uids for trajectory in group["trajectories"]]
    done = sum(span["num_tokens"] for trajectory in waiting for span in trajectory["version_spans"])
    replayed = sum(
        len(call["token_ids"]) for key, calls in saved.items() if key.rsplit("_", 1)[0] in uids for call in calls
    )
    assert replayed > 0
    assert job.steps[0]["partial_rollout/stale_tokens"] == done + replayed


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


def test_an_engine_killed_before_an_update_is_relaunched_and_one_that_does_not_start_again_ends_the_run(
    task: Path, tmp_path: Path
) -> None:
    """Killed in step 1, when no request is in it, and again in step 3, with the model it would start from."""
    shutil.copytree(task / "model", tmp_path / "model")
    options = [
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        "actor_rollout_ref.model.external_lib=tests.e2e.killing_loss",
        "actor_rollout_ref.actor.policy_loss.loss_mode=killing",
        "trainer.total_training_steps=4",
    ]
    job = run_job(task, tmp_path, FLAG, *options)
    assert [step["training/global_step"] for step in job.steps] == [1, 2], job.output[-4000:]
    assert [step["partial_rollout/engine_relaunches"] for step in job.steps] == [1, 0]
    assert all(is_conserved(step) for step in job.steps)
    assert job.code == 1
    assert "error: training failed: EngineDead: replica 0" in job.output
    assert "did not start again" in job.output
    assert "(version 3) failed" in job.output
    assert job.survivors == []


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
    assert "local Ray instance" not in job.output


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


def test_ctrl_c_ends_the_run_and_leaves_nothing(task: Path, tmp_path: Path) -> None:
    driver = {"process": "partial_rollout.main_ppo", "number": signal.SIGINT}
    job = run_job_and_signal(task, tmp_path, FLAG, after="all initialize finished", **driver)
    assert job.code == INTERRUPTED_CODE
    assert "error: interrupted" in job.output
    assert job.survivors == []
