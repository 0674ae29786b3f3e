"""`python -m partial_rollout.doctor`: what it prints for a command line, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from partial_rollout.doctor import diagnose

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = ("ray", "torch", "vllm", "verl", "transformers", "numpy")


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Overrides with paths that are there."""
    (tmp_path / "model").mkdir()
    (tmp_path / "train.parquet").touch()
    data = [f"{key}={tmp_path / 'train.parquet'}" for key in ("data.train_files", "data.val_files")]
    sizes = "actor_rollout_ref.actor.use_dynamic_bsz=True"
    return [*data, f"actor_rollout_ref.model.path={tmp_path / 'model'}", sizes]


def test_a_whole_command_is_looked_at_without_anything_heavy(paths: list[str]):
    code = (
        "import runpy, sys\n"
        "try:\n"
        "    runpy.run_module('partial_rollout.doctor', run_name='__main__')\n"
        "finally:\n"
        f"    print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    words = ["python3", "-m", "verl.trainer.main_ppo", "--config-path=config", "--config-name=ppo_trainer.yaml"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words, *paths, "actor_rollout_ref.rollout.name=vllm"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "changed      trainer.v1.trainer_mode: sync -> partial_rollout" in done.stdout


def test_all_that_is_in_the_way_is_told_at_once(paths: list[str]):
    report = diagnose([*paths, "actor_rollout_ref.rollout.name=sglang", "trainer.v1.trainer_mode=colocate_async"])
    assert report.is_blocked
    blocked = [text for heading, text in report.lines if heading == "blocked"]
    assert [text.partition(" ")[0] for text in blocked] == [
        "actor_rollout_ref.rollout.name=sglang",
        "trainer.v1.trainer_mode=colocate_async",
    ]


def blocked(words: list[str]) -> list[str]:
    return [text for heading, text in diagnose(words).lines if heading == "blocked"]


def test_sizes_of_micro_batches_that_verl_refuses_are_told(paths: list[str]):
    words = [*paths, "actor_rollout_ref.rollout.name=vllm", "algorithm.adv_estimator=grpo"]
    assert blocked(words) == []
    words.append("actor_rollout_ref.actor.use_dynamic_bsz=False")
    (text,) = blocked(words)
    assert text.startswith("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null with ")
    words.append("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4")
    assert [text.partition("=")[0] for text in blocked(words)] == [
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    ]
    words.append("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4")
    assert blocked(words) == []


@pytest.mark.parametrize("flag", ["+async_training.partial_rollout=False", "+async_training={partial_rollout: false}"])
def test_a_flag_that_is_off_is_told_and_taken_as_set(paths: list[str], flag: str):
    report = diagnose([*paths, "actor_rollout_ref.rollout.name=vllm", flag])
    assert not report.is_blocked
    assert (
        "look at",
        "the command line turns async_training.partial_rollout off; this is what it would do with True",
    ) in (report.lines)
    assert any(
        heading == "changed" and "trainer_mode: sync -> partial_rollout" in text for heading, text in report.lines
    )


def test_a_flag_in_a_block_is_a_flag(paths: list[str]):
    report = diagnose([*paths, "actor_rollout_ref.rollout.name=vllm", "+async_training={partial_rollout: true}"])
    assert not report.is_blocked
    assert "look at" not in [heading for heading, _ in report.lines]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.n_gpus_per_node='8'", "trainer.n_gpus_per_node='8' is not allowed: must be a whole number"),
        ("trainer.nnodes=[", "no viable alternative at input"),
    ],
)
def test_what_cannot_be_read_is_a_refusal(paths: list[str], override: str, told: str):
    text = " ".join(blocked([*paths, "actor_rollout_ref.rollout.name=vllm", override]))
    assert told in text


def test_another_program_is_told():
    report = diagnose(["python3", "-m", "verl.trainer.sft_trainer", "data.train_files=a"])
    assert report.is_blocked
    assert "does not start one of verl.trainer.main_ppo, partial_rollout.main_ppo" in report.lines[0][1]
