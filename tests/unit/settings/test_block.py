"""`PartialRolloutConfig`: bad input is refused with the key and the value, before anything is started."""

from __future__ import annotations

import logging

import pytest

from partial_rollout.errors import ConfigError, UserError
from partial_rollout.settings.block import PartialRolloutConfig, TailConfig, _warn_of_old_name


def test_an_empty_block_gives_the_defaults():
    assert PartialRolloutConfig.from_mapping({}) == PartialRolloutConfig()


def test_values_and_nested_blocks_are_taken_over():
    config = PartialRolloutConfig.from_mapping({"num_slots": 12, "timeouts": {"drain_s": 5}})
    assert (config.num_slots, config.timeouts.drain_s) == (12, 5.0)
    assert config.timeouts.batch_s == PartialRolloutConfig().timeouts.batch_s


def test_engines_get_the_defaults_without_the_block():
    assert PartialRolloutConfig.from_rollout(None) == PartialRolloutConfig()
    assert PartialRolloutConfig.from_rollout({"other": {}}) == PartialRolloutConfig()


@pytest.mark.parametrize(
    ("block", "key"),
    [
        (
            {"prefetch_facto": 2},
            "prefetch_facto: did you mean partial_rollout.prefetch_factor. Known here: dump_every, ",
        ),
        (
            {"timeouts": {"drain": 1}},
            "timeouts.drain: did you mean partial_rollout.timeouts.drain_s. Known here: batch_s",
        ),
        ({"interrupt_mode": "abort"}, "interrupt_mode: did you mean partial_rollout.tail.interrupt_mode. Known here: "),
        ({"slots": {"port": 1}}, "slots.port; known here: adaptive, interval_s, least$"),
        ({"tails": {"policy": "wait"}}, "tails: did you mean partial_rollout.tail. Known here: "),
    ],
)
def test_an_unknown_key_is_named_with_what_was_perhaps_meant_and_the_known_ones(block: dict, key: str):
    with pytest.raises(ConfigError, match=f"unknown key partial_rollout.{key}"):
        PartialRolloutConfig.from_mapping(block)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"tail": {"interrupt_mode": "keep"}}, "tail.interrupt_mode=keep was retired .*=abort, .* or keep_kv"),
        (
            {"packing": {"planner": "fixed"}},
            "packing.planner=fixed was retired .*: leave .*planner out, or set",
        ),
        ({"packing": {"per_rank_batch_size": 4}}, "packing.per_rank_batch_size was retired .*packing.token_budget"),
        ({"packing": {"cost_model": "verl"}}, "packing.cost_model was retired .*: leave it out"),
        ({"manager": {"name": "mine"}}, "manager was retired .*: leave the block out"),
        ({"slots": {"most": 48}}, "slots.most was retired .*prefetch_factor .*tail.max_staleness"),
        ({"tail": {"policy": "reorder", "max_deferrals": 2}}, "max_deferrals was retired .*max_deferred_per_round"),
        ({"weights": {"timeout_s": 600.0}}, "weights.timeout_s was retired .*timeouts.resume_s to ten times"),
        ({"slots": {"kv_high": 0.8}}, "slots.kv_high was retired .*: leave it out"),
        ({"tail": {"boundary": "cost"}}, r"partial_rollout\.tail\.boundary was retired in release 0\.2: leave it out"),
        (
            {"costs": {"decode_step_ms": 1.0}},
            "partial_rollout.costs was retired in release 0.2: leave the block",
        ),
    ],
)
def test_a_retired_setting_is_told_with_what_to_use_instead(block: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        PartialRolloutConfig.from_mapping(block)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"prefetch_factor": 0.5}, r"prefetch_factor=0\.5 .* at least 1"),
        ({"num_slots": 0}, "num_slots=0 .* at least 1 .set partial_rollout.num_slots=...."),
        ({"max_attempts": 0}, "max_attempts=0 "),
        ({"stream_interval": 0}, "stream_interval=0 "),
        ({"timeouts": {"drain_s": 0}}, r"timeouts\.drain_s=0 .*above 0"),
        ({"timeouts": {"batch_s": -1.0}}, r"timeouts\.batch_s=-1\.0 "),
        ({"weights": {"backend": "nccl"}}, "weights.backend='nccl' .*one of auto, channel, verl"),
        ({"weights": {"bucket_mb": 0}}, "weights.bucket_mb=0 .*null or a whole number of at least 1"),
        ({"weights": {"relaunches": -1}}, "weights.relaunches=-1 .*at least 0"),
        ({"slots": {"adaptive": False, "least": 8}}, "slots.least=8 .*null with .*adaptive=false.*num_slots"),
        ({"slots": {"adaptive": True, "least": 0}}, "slots.least=0 .*at least 1"),
        ({"slots": {"interval_s": 0}}, "slots.interval_s=0 .*above 0"),
        ({"tail": {"policy": "long"}}, "tail.policy='long' .*partial, wait, reorder"),
        ({"tail": {"gen_batch_size": 10}}, "gen_batch_size=10 .*null with .*tail.policy=partial.*policy=reorder uses"),
        ({"tail": {"max_deferred_per_round": 2}}, "tail.max_deferred_per_round=2 .*null with .*tail.policy=partial"),
        (
            {"tail": {"interrupt_mode": "retain"}},
            "interrupt_mode='retain' .*abort, keep_kv, reuse_kv, ",
        ),
        (
            {"tail": {"policy": "wait", "interrupt_mode": "keep_kv"}},
            "interrupt_mode='keep_kv' .*abort with .*=wait",
        ),
        ({"tail": {"policy": "reorder", "interrupt_mode": "keep_kv"}}, "interrupt_mode='keep_kv' .*abort, reuse_kv or"),
        ({"tail": {"interrupt_mode": "offload_kv"}}, "offload_gib=None .*a number of GiB with .*offload_kv"),
        ({"tail": {"offload_gib": 4, "interrupt_mode": "abort"}}, "offload_gib=4 .*null with any other but auto"),
        (
            {"tail": {"interrupt_mode": "offload_kv", "offload_gib": 0}},
            "offload_gib=0 .*null or a whole number of at least 1",
        ),
        ({"tail": {"past_staleness": "wait"}}, "tail.past_staleness='wait' .*train, mask, drop, finish, restart"),
        ({"tail": {"past_staleness": "drop"}}, "tail.past_staleness='drop' .*train without a bound.*max_staleness"),
        ({"tail": {"max_staleness": -1}}, "tail.max_staleness=-1 .*null or a whole number of at least 0"),
        (
            {"tail": {"max_staleness": 2, "past_staleness": "restart"}, "max_attempts": 1},
            "max_attempts=1 .*at least 2 with .*past_staleness=restart.*drop",
        ),
        ({"slots": {"adaptive": True}, "tail": {"policy": "wait"}}, "slots.adaptive=True .*false with .*policy=wait"),
        ({"slots": {"adaptive": True}, "tail": {"policy": "reorder"}}, "slots.adaptive=True .*false with .*=reorder"),
        ({"tail": {"policy": "reorder"}, "prefetch_factor": 3.0}, "prefetch_factor=3.0 .*left out with .*=reorder"),
    ],
)
def test_a_value_out_of_range_is_refused(block: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        PartialRolloutConfig.from_mapping(block)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"prefetch_factor": "2"}, "prefetch_factor='2' .*: must be auto or a number of at least 1"),
        ({"prefetch_factor": True}, "prefetch_factor=True .*: must be auto or a number"),
        ({"num_slots": 1.5}, r"num_slots=1\.5 .*: must be null or a whole number of at least 1"),
        ({"num_slots": True}, "num_slots=True "),
        ({"max_attempts": None}, "max_attempts=None .*: must be a whole number of at least 1"),
        ({"timeouts": 3}, "timeouts=3 .* block of keys"),
        ({"slots": {"adaptive": 1}}, "slots.adaptive=1 .*: must be auto or true or false .set"),
        ({"events": ""}, "events='' .*: must be null or a non-empty string"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(block: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        PartialRolloutConfig.from_mapping(block)


def test_a_config_error_is_the_users_and_a_value_error():
    assert issubclass(ConfigError, UserError)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(("factor", "batch", "capacity"), [(2.0, 8, 16), (1.0, 8, 8), (1.5, 3, 4), (1.1, 1, 1)])
def test_capacity_is_never_below_one_batch(factor: float, batch: int, capacity: int):
    assert PartialRolloutConfig(prefetch_factor=factor).capacity(batch) == capacity


def test_the_name_of_0_1_for_waiting_is_accepted_with_one_warning(caplog: pytest.LogCaptureFixture):
    _warn_of_old_name.cache_clear()
    caplog.set_level(logging.WARNING)  # a library may have raised the root logger's
    old = [PartialRolloutConfig.from_mapping({"tail": {"policy": "sync"}}) for _ in range(2)]
    assert old == [PartialRolloutConfig(tail=TailConfig(policy="wait"))] * 2
    (record,) = caplog.records
    assert "tail.policy=sync is called partial_rollout.tail.policy=wait since" in record.getMessage()


REORDER = TailConfig(policy="reorder")


@pytest.mark.parametrize(
    ("tail", "batch", "groups"),
    [(TailConfig(), 8, 8), (REORDER, 8, 10), (REORDER, 1, 2), (TailConfig(policy="reorder", gen_batch_size=16), 8, 16)],
)
def test_a_round_has_a_quarter_more_groups_than_are_trained_unless_told(tail: TailConfig, batch: int, groups: int):
    tail.check_batch(batch)
    assert tail.groups_per_round(batch) == groups


@pytest.mark.parametrize("size", [6, 8, 17])
def test_a_round_that_is_no_over_sampling_is_refused(size: int):
    message = f"gen_batch_size={size} .* above data.train_batch_size=8 and at most 16; .*tail.policy=wait"
    with pytest.raises(ConfigError, match=message):
        TailConfig(policy="reorder", gen_batch_size=size).check_batch(8)


def test_more_joining_groups_than_a_batch_are_refused():
    with pytest.raises(ConfigError, match="max_deferred_per_round=9 .* at most data.train_batch_size=8"):
        TailConfig(policy="reorder", max_deferred_per_round=9).check_batch(8)
