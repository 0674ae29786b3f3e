"""Real verl, real vLLM, real Ray, on rows that are no quickstart's: one job for four tests."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from partial_rollout.run.data import gsm8k
from tests.e2e.conftest import FLAG, Job, is_conserved, run_job

if TYPE_CHECKING:
    from pathlib import Path

TOO_LONG = 5
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def killed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job on the GSM8K script's files whose engine is killed in step 1, and again in step 4 with its model.

    Both times no request is in it. One of 17 prompts has more characters than the model allows. With policy=wait, which
    feeds a batch at a time, three batches of 8 take every row of the first epoch.
    """
    folder = tmp_path_factory.mktemp("killed")
    rows = [{"question": f"Tom has {i} bats and buys 2 more. How many?", "answer": f"#### {i + 2}"} for i in range(17)]
    rows[TOO_LONG]["question"] = "A long story. " * 50
    (folder / "source").mkdir()
    for split in ("train", "test"):
        (folder / f"source/{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    gsm8k.make(folder, str(folder / "source"), tool=False)
    shutil.copytree(task / "model", folder / "model")
    options = [
        f"actor_rollout_ref.model.path={folder / 'model'}", "trainer.total_training_steps=5",
        "actor_rollout_ref.model.external_lib=tests.e2e.killing_loss",
        "actor_rollout_ref.actor.policy_loss.loss_mode=killing",
        f"data.train_files={folder / 'train.parquet'}", f"data.val_files={folder / 'test.parquet'}",
        "data.filter_overlong_prompts=False", "data.max_prompt_length=256", "data.max_response_length=32",
        "actor_rollout_ref.rollout.max_model_len=288", "partial_rollout.tail.policy=wait", "partial_rollout.restarts=0",
    ]  # fmt: skip
    return run_job(task, folder, FLAG, *options)


def test_gsm8k_files_are_trained_on(killed: Job) -> None:
    """With verl's own scoring of the answers; the model cannot know any."""
    assert [step["training/global_step"] for step in killed.steps] == [1, 2, 3], killed.output[-4000:]
    assert all(is_conserved(step) for step in killed.steps)
    assert {step["critic/score/mean"] for step in killed.steps} == {0.0}


def test_no_prompt_is_begun_before_the_batch_in_hand_is_trained(killed: Job) -> None:
    names = ("pending", "ongoing", "deferred", "done")
    assert {step[f"partial_rollout/queue/{name}"] for step in killed.steps for name in names} == {0}
    assert {step["partial_rollout/interrupted"] for step in killed.steps} == {0}


def test_a_prompt_that_is_too_long_is_dropped_and_counted(killed: Job) -> None:
    trained = {int(index) for event in killed.events for index in event["source_index"]}
    assert trained == set(range(17)) - {TOO_LONG}
    assert killed.steps[2]["partial_rollout/queue/num_dropped"] >= 1


def test_an_engine_killed_before_an_update_is_relaunched_and_one_that_does_not_start_again_ends_the_run(
    killed: Job,
) -> None:
    assert [step["partial_rollout/engine_relaunches"] for step in killed.steps] == [1, 0, 0]
    assert killed.code == 1
    assert "error: training failed: EnginesLost: engines were not started again (replica 0" in killed.output
    assert "did not start again" in killed.output
    assert "(version 4) failed" in killed.output
    assert killed.survivors == []
