"""What the flag changes is listed, and nothing that the user set is replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

from partial_rollout.errors import ConfigError
from partial_rollout.settings.by_hand import ByHand, verl_defaults
from partial_rollout.settings.changes import Changes
from partial_rollout.settings.derived import read_settings
from partial_rollout.settings.flag import fit_workers
from tests.unit.settings.support import apply, unlisted, values

if TYPE_CHECKING:
    from tests.unit.settings.support import Composed


LIMITS = ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"partial_rollout.slots.adaptive": True},
        {"partial_rollout.tail.policy": "sync"},
        {"partial_rollout.events": "a/b"},
        {"actor_rollout_ref.rollout.custom": {"mine": 1}},
    ],
)
def test_every_change_is_listed_with_its_old_and_new_value(composed: Composed, changes: dict[str, Any]):
    config = composed(changes)
    before = values(config)
    made = apply(config)
    after = values(config)
    assert unlisted(before, after, made) == []
    assert all(change.before != change.after and change.why for change in made)
    for change in made:
        assert OmegaConf.select(config, change.key) == change.after


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.v1.trainer_mode", "colocate_async"),
        ("actor_rollout_ref.rollout.agent.agent_loop_manager_class", "mine.Manager"),
        ("trainer.v1.sampler.custom_sampler", {"path": "pkg://mine", "name": "Mine"}),
        ("trainer.v1.sampler.max_off_policy_threshold", 4),
        ("data.gen_batch_size", 8),
        ("actor_rollout_ref.rollout.custom", {"partial_rollout": {"num_slots": 3}}),
    ],
)
def test_what_a_file_of_the_user_sets_is_refused(composed: Composed, key: str, value: object):
    with pytest.raises(ConfigError, match="set in a configuration file.* is not possible with .*: .*; "):
        apply(composed({key: value}))


def test_a_default_that_was_typed_is_a_wish(composed: Composed):
    with pytest.raises(ConfigError, match=r"trainer_mode=sync \(set on the command line\)"):
        apply(composed({}), "trainer.v1.trainer_mode=sync")
    adaptive = composed({"partial_rollout.slots.adaptive": True})
    with pytest.raises(ConfigError, match="disable_log_stats=True .*slots.adaptive=false"):
        apply(adaptive, "actor_rollout_ref.rollout.disable_log_stats=True")


def test_a_value_that_stays_may_be_typed(composed: Composed):
    apply(composed({"data.gen_batch_size": 1}), "data.gen_batch_size=1")
    unbounded = composed({"trainer.v1.sampler.max_off_policy_threshold": None})
    apply(unbounded, "trainer.v1.sampler.max_off_policy_threshold=null")


def test_where_verl_itself_replaces_a_value_the_flag_does_not(composed: Composed):
    config = composed({"algorithm.filter_groups.enable": True, "data.gen_batch_size": 8})
    made = apply(config, "data.gen_batch_size=8", "algorithm.filter_groups.enable=True")
    assert "data.gen_batch_size" not in [change.key for change in made]


def test_values_of_other_files_than_verls_are_by_hand(composed: Composed):
    config, given = composed({}), ByHand()
    assert given.where(config, "trainer.total_training_steps") == "in a configuration file"
    assert given.where(config, "trainer.nnodes") is None
    assert ByHand.read(["+trainer.nnodes=1"]).where(config, "trainer.nnodes") == "on the command line"
    assert ByHand.read(["partial_rollout@partial_rollout=default"]).keys == frozenset()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"trainer.max_actor_ckpt_to_keep": 3}, {"trainer.max_actor_ckpt_to_keep: 3 -> null": "it keeps the 3 newest"}),
        (
            {"trainer.remove_previous_ckpt_in_save": True},
            {"trainer.remove_previous_ckpt_in_save: True -> False": "it keeps the newest"},
        ),
        (
            {"trainer.max_actor_ckpt_to_keep": 3, "critic.enable": True},
            {
                "trainer.max_actor_ckpt_to_keep: 3 -> null": (
                    "it keeps all of them, because not every model has a limit"
                )
            },
        ),
        ({}, {}),
        (
            {"trainer.max_actor_ckpt_to_keep": 3, "trainer.nnodes": 2},
            {"trainer.max_actor_ckpt_to_keep: 3 -> null": "it keeps the 3 newest"},
        ),
        ({"trainer.max_actor_ckpt_to_keep": 3, "actor_rollout_ref.actor.checkpoint.async_save": True}, {}),
    ],
)
def test_that_checkpoints_are_removed_by_the_flags_trainer_is_listed_and_done_later(
    composed: Composed, changes: dict[str, Any], told: dict[str, str]
):
    config = composed({f"trainer.{name}": None for name in LIMITS} | changes)
    made = [change for change in apply(config) if change.key.startswith("trainer.") and "ckpt" in change.key]
    assert {str(change).partition(" (")[0]: change.why.rpartition("; ")[2] for change in made} == told
    for key, value in changes.items():
        assert OmegaConf.select(config, key) == value


@pytest.mark.parametrize("strategy", ["fsdp", "megatron", "veomni", "torchtitan"])
def test_verls_defaults_are_those_of_the_trainers_backend(strategy: str):
    assert verl_defaults(strategy)["trainer.v1.trainer_mode"] == "sync"
    assert str(verl_defaults(strategy)["actor_rollout_ref.actor.strategy"]).startswith(strategy)


WORKERS = "actor_rollout_ref.rollout.agent.num_workers"


@pytest.mark.parametrize(
    ("changes", "typed", "num_workers"),
    [
        ({WORKERS: 8, "data.train_batch_size": 4}, (), 4),
        ({WORKERS: 8, "data.train_batch_size": 16}, (), 8),
        ({WORKERS: 8, "data.train_batch_size": 4}, (f"{WORKERS}=8",), 8),
        ({WORKERS: 6, "data.train_batch_size": 4}, (), 6),
    ],
)
def test_verls_default_number_of_workers_is_lowered_to_the_prompts_of_a_small_batch(
    composed: Composed, changes: dict[str, Any], typed: tuple[str, ...], num_workers: int
):
    """8 is verl's default; another number in a file is the user's."""
    config = composed(changes)
    made = Changes(config, ByHand.read(typed))
    fit_workers(made, read_settings(config))
    assert OmegaConf.select(config, WORKERS) == num_workers
    assert [change.after for change in made.made] == ([] if num_workers == changes[WORKERS] else [num_workers])
