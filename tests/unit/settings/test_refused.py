"""Settings: mistakes are told with their key before a start; the flag sets just the hooks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

from partial_rollout.core.slots import SlotBounds
from partial_rollout.errors import ConfigError, DataError, UserError
from partial_rollout.settings.block import PartialRolloutConfig, TimeoutConfig, WeightsConfig
from partial_rollout.settings.derived import AT_THE_END, read_settings
from partial_rollout.settings.flag import is_enabled
from partial_rollout.settings.refused import check_inputs
from tests.unit.settings.support import apply, check

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from tests.unit.settings.support import Composed

FLAG = "async_training.partial_rollout"


def leaves(config: DictConfig) -> dict[str, Any]:
    """Every value of a configuration by its dotted key, interpolations unresolved."""

    def walk(node: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(node, dict) or not node:
            return {prefix: node}
        return {key: leaf for name, child in node.items() for key, leaf in walk(child, f"{prefix}.{name}").items()}

    return {key.removeprefix("."): leaf for key, leaf in walk(OmegaConf.to_container(config), "").items()}


def test_the_quickstart_passes(composed: Composed):
    check(composed({}))


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("data.train_files", "/nowhere/a.parquet", DataError, "data.train_files=/nowhere/a.parquet does not exist"),
        ("data.val_files", ["/nowhere/b.parquet"], DataError, "data.val_files=/nowhere/b.parquet does not exist"),
        ("actor_rollout_ref.model.path", "/no/model", DataError, "actor_rollout_ref.model.path=/no/model does not"),
        ("partial_rollout.num_slots", 1, ConfigError, "1 trajectory slots over 1 .*raise partial_rollout.num_slots"),
        ("partial_rollout.packing.planner", "best", ConfigError, "planner='best' .* global, verl"),
        (
            "partial_rollout.packing.token_budget",
            0,
            ConfigError,
            "packing.token_budget=0 .* null or a whole number of at least 1",
        ),
        ("algorithm.adv_estimator", "remax", ConfigError, "algorithm.adv_estimator=remax cannot work"),
        (
            "algorithm.filter_groups",
            {"enable": True, "metric": None},
            ConfigError,
            "algorithm.filter_groups.metric=null is not allowed with algorithm.filter_groups.enable=True: must be `rew",
        ),
        ("actor_rollout_ref.rollout.n", 0, ConfigError, "actor_rollout_ref.rollout.n=0 is not allowed"),
        ("actor_rollout_ref.rollout.name", "sglang", ConfigError, "actor_rollout_ref.rollout.name=sglang .* vllm"),
        ("actor_rollout_ref.rollout.agent.num_workers", 0, ConfigError, "rollout.agent.num_workers=0 is not allowed"),
        ("data.train_batch_size", 0, ConfigError, "data.train_batch_size=0 is not allowed"),
        ("partial_rollout.no_such_key", 1, ConfigError, "unknown key partial_rollout.no_such_key; known here: "),
        ("partial_rollout.timeouts.drain_s", -1, ConfigError, r"partial_rollout.timeouts.drain_s=-1 is not allowed"),
        ("data.train_batch_size", None, ConfigError, "data.train_batch_size=None is not allowed"),
        ("data.train_batch_size", 2.5, ConfigError, "data.train_batch_size=2.5 is not allowed"),
        ("actor_rollout_ref.rollout.n", "many", ConfigError, "rollout.n='many' is not allowed: must be a whole"),
        ("data.train_files", None, ConfigError, "data.train_files=None is not allowed: must be a path"),
        ("actor_rollout_ref.model.path", None, ConfigError, "model.path=None is not allowed"),
        ("actor_rollout_ref.model.path", "models/none/here", DataError, "model.path=models/none/here does not exist"),
        ("actor_rollout_ref.rollout.max_model_len", 10, ConfigError, "max_model_len=10 .*max_prompt_length=32"),
        ("trainer.v1.partial_rollout", {"parameter_sync_step": 2}, ConfigError, "parameter_sync_step=2 is not"),
        ("trainer.use_v1", False, ConfigError, "trainer.use_v1=False is not allowed: must be True"),
        ("actor_rollout_ref.hybrid_engine", False, ConfigError, "hybrid_engine=False is not allowed: must be True"),
        ("reward.reward_model.enable", True, ConfigError, "reward_model.enable=True .*enable_resource_pool=True"),
        ("actor_rollout_ref.rollout.full_determinism", True, ConfigError, "full_determinism=True is not allowed"),
        (
            "data.gen_batch_size",
            20,
            ConfigError,
            "gen_batch_size=20 .*tail.policy=reorder and .*tail.gen_batch_size=20",
        ),
        (
            "data.gen_batch_size",
            3,
            ConfigError,
            "gen_batch_size=3 .* null or a divisor of data.train_batch_size=16: a batch",
        ),
        (
            "partial_rollout.tail.gen_batch_size",
            20,
            ConfigError,
            "tail.gen_batch_size=20 .* null with .*policy=partial",
        ),
        ("partial_rollout", None, ConfigError, "has no `partial_rollout` block"),
    ],
)
def test_a_mistake_is_told_with_its_key(composed: Composed, key: str, value: Any, error: type[UserError], message: str):
    with pytest.raises(error, match=message):
        check(composed({key: value}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("actor_rollout_ref.actor.strategy", "megatron", "strategy=megatron .* fsdp or fsdp2 .*planner=verl"),
        ("actor_rollout_ref.actor.shuffle", True, "shuffle=True .* set partial_rollout.packing.planner=verl"),
        ("trainer.n_gpus_per_node", 3, "= 64 for 3 ranks is not allowed: must be a multiple of the ranks"),
    ],
)
def test_a_planner_set_by_hand_that_cannot_work_is_refused(composed: Composed, key: str, value: Any, message: str):
    check(composed({key: value}))
    with pytest.raises(ConfigError, match=message):
        check(composed({key: value, "partial_rollout.packing.planner": "global"}))


INTERRUPT_MODE = "partial_rollout.tail.interrupt_mode"
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize("mode", ["keep_kv", "reuse_kv"])
def test_an_engine_that_releases_its_memory_can_keep_nothing(composed: Composed, mode: str):
    check(composed({INTERRUPT_MODE: mode}))
    with pytest.raises(ConfigError, match=f"free_cache_engine=True with .*={mode} is .* False .*interrupt_mode=abort"):
        check(composed({INTERRUPT_MODE: mode, f"{ROLLOUT}.free_cache_engine": True}))


@pytest.mark.parametrize(
    ("mode", "key", "value", "allowed"),
    [
        ("reuse_kv", f"{ROLLOUT}.enable_prefix_caching", False, True),
        ("reuse_kv", f"{ROLLOUT}.engine_kwargs.vllm.enable_prefix_caching", False, True),
        ("reuse_kv", f"{ROLLOUT}.disaggregation.enabled", True, False),
        ("reuse_kv", f"{ROLLOUT}.data_parallel_size", 2, 1),
        ("keep_kv", f"{ROLLOUT}.enable_rollout_routing_replay", True, False),
        ("keep_kv", f"{ROLLOUT}.mtp.enable_rollout", True, False),
        ("keep_kv", f"{ROLLOUT}.data_parallel_size", 2, 1),
        ("keep_kv", f"{ROLLOUT}.engine_kwargs.vllm.stream_interval", 8, 1),
        ("keep_kv", "actor_rollout_ref.model.lora_rank", 8, 0),
    ],
)
def test_what_a_mode_needs_of_the_engine_is_told(composed: Composed, mode: str, key: str, value: Any, allowed: Any):
    with pytest.raises(ConfigError, match=f"{key}={value} with .*interrupt_mode={mode} is not .* must be {allowed} "):
        check(composed({INTERRUPT_MODE: mode, key: value}))


def test_kv_is_offloaded_from_a_gpu_whose_memory_is_released(composed: Composed):
    changes = {INTERRUPT_MODE: "offload_kv", "partial_rollout.tail.offload_gib": 8}
    with pytest.raises(ConfigError, match="trainer.device=cpu with .*offload_kv is .* a GPU, from which alone vLLM"):
        check(composed(changes))
    changes["trainer.device"] = "cuda"
    with pytest.raises(ConfigError, match="free_cache_engine=False with .*offload_kv .* must be True"):
        check(composed(changes))
    changes[f"{ROLLOUT}.free_cache_engine"] = True
    check(composed(changes))
    for key, value, allowed in (
        ("enable_rollout_routing_replay", True, False),
        ("data_parallel_size", 2, 1),
        ("engine_kwargs.vllm.kv_transfer_config", {"kv_connector": "MooncakeStoreConnector"}, "null"),
        ("engine_kwargs.vllm.kv_offloading_size", 4, "null"),
    ):
        with pytest.raises(ConfigError, match=f"{key}=.* with .*offload_kv is not .* must be {allowed} "):
            check(composed(changes | {f"{ROLLOUT}.{key}": value}))


def test_drafts_are_refused_on_a_cpu_without_the_flag_too(composed: Composed):
    drafts = {f"{ROLLOUT}.engine_kwargs.vllm.speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    with pytest.raises(ConfigError, match="trainer.device=cpu with .*speculative_config is .* a GPU, or no drafts"):
        check_inputs(composed(drafts))
    check_inputs(composed({**drafts, "trainer.device": "cuda"}))


def test_the_slot_budget_is_shared_by_the_workers_and_must_hold_a_prompt_in_each(composed: Composed):
    config = composed({"partial_rollout.num_slots": 8, "actor_rollout_ref.rollout.agent.num_workers": 2})
    check(config)
    assert (read_settings(config).num_slots, read_settings(config).slot_shares) == (8, [4, 4])
    refused = "8 trajectory slots over 3 agent-loop workers is not allowed: must be at least 12, .*n=4 .*num_slots or "
    with pytest.raises(ConfigError, match=refused):
        check(composed({"partial_rollout.num_slots": 8, "actor_rollout_ref.rollout.agent.num_workers": 3}))


def test_a_whole_batch_starts_at_once_where_the_workers_cannot_have_as_many_groups_each(composed: Composed):
    changes = {"data.train_batch_size": 12, "actor_rollout_ref.rollout.n": 8, f"{ACTOR}.ppo_mini_batch_size": 12}
    config = composed(changes | {"actor_rollout_ref.rollout.agent.num_workers": 8})
    check(config)
    assert read_settings(config).slot_shares == [16] * 4 + [8] * 4
    assert sum(share // 8 for share in read_settings(config).slot_shares) == read_settings(config).num_slots // 8 == 12


def test_slots_left_open_are_one_batch(composed: Composed):
    assert read_settings(composed({"data.train_batch_size": 6, "actor_rollout_ref.rollout.n": 3})).num_slots == 18


def test_slots_left_open_are_all_that_a_round_starts(composed: Composed):
    config = composed({"partial_rollout.tail": {"policy": "reorder", "gen_batch_size": 20}})
    check(config)
    assert read_settings(config).num_slots == 20 * 4
    with pytest.raises(ConfigError, match=r"tail.gen_batch_size=16 .* above data.train_batch_size=16 and at most 32"):
        check(composed({"partial_rollout.tail": {"policy": "reorder", "gen_batch_size": 16}}))


FIXED = {"partial_rollout.slots.adaptive": False, "partial_rollout.prefetch_factor": 2.0}
ADAPTIVE = {"partial_rollout.slots": {"adaptive": True}, "partial_rollout.num_slots": 24}


def test_an_adaptive_number_of_slots_may_reach_all_prompts_in_flight_and_a_group_for_each_worker(composed: Composed):
    config = composed(ADAPTIVE | {"actor_rollout_ref.rollout.agent.num_workers": 2})
    check(config)
    assert read_settings(config).slot_bounds == SlotBounds(least=8, most=3 * 16 * 4, group=4, num_workers=2)
    apply(config)
    assert config.actor_rollout_ref.rollout.disable_log_stats is False
    apply(fixed := composed(FIXED))
    assert fixed.actor_rollout_ref.rollout.disable_log_stats is True


@pytest.mark.parametrize("key", AT_THE_END)
def test_engines_count_tokens_that_they_hand_over_at_the_end_of_a_request(composed: Composed, key: str):
    at_the_end = FIXED | {"partial_rollout.tail.interrupt_mode": "abort", f"actor_rollout_ref.{key}": True}
    (made,) = [made for made in apply(composed(at_the_end)) if made.key.endswith("disable_log_stats")]
    assert (made.after, "timeouts.stall_s" in made.why) == (False, True)
    off = "actor_rollout_ref.rollout.disable_log_stats=True"
    assert not [made for made in apply(composed(at_the_end), off) if made.key.endswith("disable_log_stats")]


ROOM = "transfer_queue.backend.SimpleStorage.total_storage_size"


def test_transfer_queue_has_room_for_all_batches_in_flight_and_the_one_in_training(composed: Composed):
    large = {"data.train_batch_size": 2048, "actor_rollout_ref.rollout.n": 16, "partial_rollout.prefetch_factor": 2.0}
    assert OmegaConf.select(composed(large), ROOM) == 100_000  # one batch and its prompts take 34,816
    (made,) = [made for made in apply(composed(large)) if made.key == ROOM]
    assert (made.after, made.why) == (None, "up to 104448 prompts and responses are in flight or in training")
    assert not [made for made in apply(composed(large | {ROOM: 90_000}), f"{ROOM}=90000") if made.key == ROOM]
    for enough in (large | {ROOM: 208_896}, large | {ROOM: None}, large | {"data.train_batch_size": 512}):
        assert not [made for made in apply(composed(enough)) if made.key == ROOM]


@pytest.mark.parametrize(
    ("least", "cause"),
    [
        (2, "slots.least=2 is not allowed: must be at least 4"),
        (32, "slots.least=32 is not allowed: .* at most the 24 slots"),
    ],
)
def test_a_bound_without_the_number_to_start_with_is_refused(composed: Composed, least: int, cause: str):
    bounds = {"partial_rollout.slots": {"adaptive": True, "least": least}}
    with pytest.raises(ConfigError, match=cause):
        check(composed(ADAPTIVE | bounds))


@pytest.mark.parametrize("size", [1, 8, 16])
def test_a_fetch_size_that_cannot_be_meant_for_us_is_left_to_verl(composed: Composed, size: int):
    check(composed({"data.gen_batch_size": size}))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "hdfs://cluster/model"])
def test_a_model_of_a_hub_is_not_looked_for_on_the_disk(composed: Composed, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    check(composed({"actor_rollout_ref.model.path": name}))


@pytest.mark.parametrize(("changes", "expected"), [({}, False), ({FLAG: True}, True), ({FLAG: False}, False)])
def test_the_flag_is_what_was_given(composed: Composed, changes: dict[str, bool], expected: bool):
    assert is_enabled(composed(changes)) is expected


@pytest.mark.parametrize("value", ["yes_please", 1, None])
def test_a_flag_that_is_no_boolean_is_refused(composed: Composed, value: Any):
    with pytest.raises(ConfigError, match="async_training.partial_rollout=.* must be True or False"):
        is_enabled(composed({FLAG: value}))


def test_a_mistyped_flag_does_not_train_without_it(composed: Composed):
    with pytest.raises(ConfigError, match="unknown key async_training.partial_rolout; known here: partial_rollout"):
        is_enabled(composed({"async_training.partial_rolout": True}))


def test_a_flag_in_a_mistyped_block_does_not_train_without_it(composed: Composed):
    with pytest.raises(ConfigError, match="unknown key asyc_training.partial_rollout; the flag is async_training"):
        is_enabled(composed({"asyc_training.partial_rollout": True}))


@pytest.mark.parametrize("value", [True, None, "partial_rollout"])
def test_a_block_of_the_flag_that_is_none_is_refused(composed: Composed, value: Any):
    with pytest.raises(ConfigError, match="async_training=.* set async_training.partial_rollout to True or False"):
        is_enabled(composed({"async_training": value}))


def test_no_data_file_is_refused(composed: Composed):
    with pytest.raises(ConfigError, match=r"data.train_files=\[\] is not allowed: must be at least one file"):
        check_inputs(composed({"data.train_files": []}))


def test_the_flag_sets_exactly_the_hooks(composed: Composed):
    changes = {
        "partial_rollout.stream_interval": 7,
        "partial_rollout.timeouts.drain_s": 5,
        "trainer.default_local_dir": "runs/a",
    }
    config, events = composed(changes), os.path.abspath("runs/a/events")
    apply(config)
    custom = "actor_rollout_ref.rollout.custom"
    handed_on = PartialRolloutConfig.from_rollout(config.actor_rollout_ref.rollout.custom)
    assert handed_on == PartialRolloutConfig(
        stream_interval=7,
        timeouts=TimeoutConfig(drain_s=5.0),
        weights=WeightsConfig(backend="channel"),
        events=events,
        events_text=512,  # of the quickstart, for its page
    )
    before, after = leaves(composed(changes)), leaves(config)
    changed = {key: value for key, value in after.items() if key not in before or before[key] != value}
    assert {key: value for key, value in changed.items() if not key.startswith(custom)} == {
        "partial_rollout.events": events,
        "data.gen_batch_size": 1,
        "trainer.v1.trainer_mode": "partial_rollout",
        "trainer.v1.sampler.custom_sampler.path": "pkg://partial_rollout.train.replay_buffer",
        "trainer.v1.sampler.custom_sampler.name": "PartialRolloutReplayBuffer",
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class": (
            "partial_rollout.agent_loop.manager.PartialRolloutAgentLoopManager"
        ),
        "actor_rollout_ref.rollout.disable_log_stats": False,
    }
    assert before.keys() - after.keys() <= {custom, "trainer.v1.sampler.custom_sampler"}


def test_an_old_name_is_handed_on_as_the_new_one(composed: Composed):
    config = composed({"partial_rollout.tail.policy": "sync"})
    apply(config)
    assert config.partial_rollout.tail.policy == "wait"
    assert config.actor_rollout_ref.rollout.custom.partial_rollout.tail.policy == "wait"


def test_sequence_parallelism_that_does_not_fit_the_devices_is_refused_with_verls_planner_too(composed: Composed):
    sizes = {"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": 4, "trainer.n_gpus_per_node": 2}
    with pytest.raises(ConfigError, match="sequence parallelism of 4 .* = 2 devices is not allowed: must be a divisor"):
        check(composed({**sizes, "partial_rollout.packing.planner": "verl"}))


def test_a_reward_model_needs_a_function_that_asks_it(composed: Composed):
    own_devices = {"reward.reward_model.enable": True, "reward.reward_model.enable_resource_pool": True}
    with pytest.raises(ConfigError, match=r"without a reward function .*reward\.custom_reward_function\.path"):
        check(composed({**own_devices, "reward.custom_reward_function.path": None}))
    check(composed({**own_devices, "reward.custom_reward_function.path": __file__}))
