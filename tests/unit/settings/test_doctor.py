"""`python -m partial_rollout.doctor`: what it prints for a command line, and what it does not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from partial_rollout.doctor import diagnose
from partial_rollout.errors import ConfigError, VersionError
from partial_rollout.settings.by_hand import ByHand
from partial_rollout.settings.compose import CommandLine, compose_line, resolve
from partial_rollout.settings.prepare import prepare

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

VLLM = ["actor_rollout_ref.rollout.name=vllm"]
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
    return diagnose(words).blocked


def test_a_refusal_is_told_with_its_reason_and_a_way_out(paths: list[str]):
    lines = diagnose([*paths, "actor_rollout_ref.rollout.name=sglang"]).lines
    assert lines[:3] == [
        ("blocked", "actor_rollout_ref.rollout.name=sglang"),
        ("because", "gate, drain and weight channel are built on vLLM"),
        ("instead", "must be vllm"),
    ]
    lines = diagnose([*paths, *VLLM, "trainer.v1.trainer_mode=colocate_async"]).lines
    assert [heading for heading, _ in lines[:3]] == ["blocked", "because", "instead"]
    assert lines[1] == ("because", "the flag brings a trainer of its own")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.save_freq='8'", "trainer.save_freq='8' is not allowed: must be a number without quotes"),
        ("trainer.val_before_train='true'", "'true' is not allowed: must be True or False without quotes"),
    ],
)
def test_a_number_in_quotes_is_told_by_doctor_and_by_the_start(paths: list[str], override: str, told: str):
    words = [*paths, *VLLM, override]
    (text,) = blocked(words)
    assert told in text
    with pytest.raises(ConfigError, match="without quotes"):
        prepare(compose_line(resolve(CommandLine.parse(words))), ByHand.read(words))


def test_memory_is_counted_and_what_would_be_faster_is_proposed(paths: list[str], tmp_path: Path):
    sizes = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    model = {"model_type": "qwen3", "hidden_size": 4096, "vocab_size": 151_936, "dtype": "bfloat16", **sizes}
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.truncate(16_400_000_000)  # sparse
    words = [*paths, *VLLM, "trainer.n_gpus_per_node=8", "algorithm.adv_estimator=grpo"]
    told = dict(diagnose(words).lines)
    assert "weights: 7.6 GiB of each GPU of an engine" in told["memory"]  # tensor parallel 2, verl's default
    assert "256 responses x 1,024 tokens x 147,456 bytes" in told["memory"]
    assert told["faster with"] == "partial_rollout.tail.keep_engine_memory=True"
    assert "both need a GPU of" in told["  takes"]
    (tmp_path / "model" / "config.json").unlink()
    told = dict(diagnose(words).lines)
    assert told["memory"].startswith("not known: the folder of the model")
    assert "faster with" not in told


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


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        (["algorithm.rollout_correction.rollout_is=null"], True),
        (["algorithm.rollout_correction.rollout_is=null", "algorithm.rollout_correction.rollout_rs=token_k1"], False),
        (["algorithm.rollout_correction.rollout_is=null", "partial_rollout.tail.policy=wait"], False),
        ([], False),
    ],
)
def test_a_run_without_a_correction_is_told_before_it_starts(paths: list[str], overrides: list[str], *, is_told: bool):
    told = [text for heading, text in diagnose([*paths, *VLLM, *overrides]).lines if heading == "look at"]
    why = "no correction: tokens of older weights are trained as they are (algorithm.rollout_correction.rollout_is)"
    assert (why in told) == is_told


def looked_at(words: list[str]) -> list[str]:
    return [text for heading, text in diagnose(words).lines if heading == "look at"]


@pytest.mark.parametrize(("mode", "is_told"), [("auto", True), ("disable", False)])
def test_a_checkpoint_that_the_run_would_go_on_from_is_told(
    paths: list[str], tmp_path: Path, mode: str, *, is_told: bool
):
    words = [*paths, "actor_rollout_ref.rollout.name=vllm", f"trainer.default_local_dir={tmp_path}"]
    words.append(f"trainer.resume_mode={mode}")
    assert looked_at(words) == []
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    told = f"{tmp_path} has a checkpoint of step 12: the run goes on from it; a new run needs another"
    assert [text.startswith(told) for text in looked_at(words)] == [True] * is_told


@pytest.mark.parametrize(("most", "told"), [(16, "16 requests wait inside the engines"), (32, None)])
def test_engines_that_run_fewer_requests_than_there_are_slots_are_told(paths: list[str], most: int, told: str | None):
    sizes = ["data.train_batch_size=8", "actor_rollout_ref.rollout.n=4", "trainer.n_gpus_per_node=1"]
    sizes += ["actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    words = [*paths, *sizes, "actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.rollout.max_num_seqs={most}"]
    found = looked_at(words)
    assert len(found) == (told is not None)
    assert told is None or told in found[0]
    assert told is None or found[0].endswith("raise it to 32")


def test_the_number_for_each_engine_is_told(paths: list[str]):
    sizes = ["data.train_batch_size=9", "actor_rollout_ref.rollout.n=4", "trainer.n_gpus_per_node=4"]
    sizes += ["actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=9"]
    words = [*paths, *sizes, "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.max_num_seqs=8"]
    assert [text.partition("; ")[2] for text in looked_at(words)] == ["raise it to 9, with which 4 engines run 36"]


@pytest.mark.parametrize(
    "command",
    [
        "python3 -m verl.trainer.main_ppo data.train_batch_size=8",
        "CUDA_VISIBLE_DEVICES=0 python3 -m verl.trainer.main_ppo trainer.save_freq=2",
        "python verl/trainer/main_ppo.py",
    ],
)
def test_a_whole_command_in_quotes_is_told(command: str):
    assert [text.partition(": ")[2] for text in blocked([command])] == ["leave out the quotes around the command"]


def test_a_limit_of_generated_batches_that_is_ignored_is_told(paths: list[str]):
    filtering = [f"algorithm.filter_groups.{key}" for key in ("enable=True", "metric=acc", "max_num_gen_batches=3")]
    words = [*paths, "actor_rollout_ref.rollout.name=vllm", *filtering]
    (found,) = looked_at(words)
    assert found.startswith("algorithm.filter_groups.max_num_gen_batches=3 is ignored: ")
    assert looked_at(words[:-1]) == []


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


def test_what_is_used_is_told_with_the_part_of_the_job_that_it_is(paths: list[str]):
    told = " ".join(text for heading, text in diagnose([*paths, *VLLM]).lines if heading == "works")
    assert "reward: functions, rule-based or your own" in told
    assert "agent loop: single turn" in told


def test_two_engines_on_devices_of_their_own_are_told_without_a_number_of_nodes(paths: list[str]):
    """`rollout.nnodes` is verl's 0 until the start has set it."""
    sizes = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]
    report = diagnose([*paths, *VLLM, *sizes, "partial_rollout.placement=separate"])
    assert not report.is_blocked, str(report)
    told = " ".join(text for heading, text in report.lines if heading == "works")
    assert "engine: several replicas (" in told
    assert "engine: engines on GPUs of their own (" in told


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


def test_versions_that_the_start_refuses_are_told(paths: list[str], monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise VersionError("found vllm 0.1, this release needs vllm 0.24")

    monkeypatch.setattr("partial_rollout.doctor.check_versions", refuse)
    assert blocked([*paths, *VLLM]) == ["found vllm 0.1, this release needs vllm 0.24"]


def test_a_reader_that_goes_away_is_no_fault(paths: list[str]):
    read, write = os.pipe()
    os.close(read)
    doctor = [sys.executable, "-m", "partial_rollout.doctor", *paths, *VLLM]
    with os.fdopen(write, "wb") as gone:
        done = subprocess.run(doctor, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=120, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
