"""Mistyped keys of verl are told with the key that was meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from partial_rollout.doctor import diagnose
from partial_rollout.settings.mistyped import added_by_mistake, guess, known_keys, unknown_key

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("data.train_btach_size", "data.train_batch_size"),
        ("actor_rollout_ref.rollout.gpu_memory_utilisation", "actor_rollout_ref.rollout.gpu_memory_utilization"),
        ("rollout.n", "actor_rollout_ref.rollout.n"),
        ("actor_rollout_ref.actor.fsdp.param_offload", "actor_rollout_ref.actor.fsdp_config.param_offload"),
        ("actor_rollout_ref.actor.megatron.grad_offload", None),
        ("mine.own", None),
    ],
)
def test_a_guess_is_made_where_one_key_is_near(key: str, meant: str | None):
    assert guess(key, known_keys()) == meant


def test_doctor_tells_it_instead_of_hydras_advice_to_add_the_key():
    report = diagnose(["data.train_btach_size=8"])
    meant = "unknown key data.train_btach_size: did you mean data.train_batch_size? (a key that verl reads"
    assert report.lines[0][1].startswith(meant)


@pytest.mark.parametrize("name", ["presence_penalty", "stop"])
def test_a_parameter_of_a_request_is_told_as_one_and_not_to_be_added(name: str):
    said = unknown_key(f"Could not override 'actor_rollout_ref.rollout.{name}'.")
    assert said is not None
    assert f"{name} is a parameter of a request" in said
    assert "+actor_rollout_ref" not in said


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("partial_rollout.slots={most: 5}", "partial_rollout.slots.most was retired in release 0.2: leave it out: "),
        ("partial_rollout={slots: {most: 5}}", "partial_rollout.slots.most was retired in release 0.2: "),
        ("partial_rollout.slots={lest: 5}", "unknown key partial_rollout.slots.lest: did you mean "),
        ("trainer={nnode: 2}", "unknown key trainer.nnode: did you mean trainer.nnodes? "),
    ],
)
def test_a_key_within_a_block_on_the_command_line_is_told_as_it_is(override: str, told: str):
    assert diagnose([override]).lines[0][1].startswith(told)


def test_a_key_of_another_training_backend_is_not_taken_for_a_mistyped_one():
    said = unknown_key("Could not override 'actor_rollout_ref.actor.megatron.tensor_model_parallel_size'.")
    assert said is not None
    assert "model_engine=megatron" in said
    assert "did you mean" not in said


def test_only_a_key_very_near_to_one_of_verls_is_looked_at():
    added = [
        "+actor_rollout_ref.rollout.max_num_seq=8",
        "+actor_rollout_ref.rollout.moe_tensor_parallel_size=2",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "+trainer.nnodes=1",
    ]
    assert added_by_mistake(added) == {
        "actor_rollout_ref.rollout.max_num_seq": "actor_rollout_ref.rollout.max_num_seqs"
    }


def test_a_flag_without_its_plus_is_told_how_to_write_it(tmp_path: Path):
    (tmp_path / "data").touch()
    data = [f"data.{name}_files={tmp_path / 'data'}" for name in ("train", "val")]
    report = diagnose([*data, "async_training.partial_rollout=True"])
    assert report.blocked[0].startswith("write +async_training.partial_rollout=True: ")
