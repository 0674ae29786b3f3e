"""Settings: which attention, ranks and weight channel a configuration may have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from verl.utils.config import omega_conf_to_dataclass

from partial_rollout.errors import ConfigError
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.settings.by_hand import ByHand
from partial_rollout.settings.changes import Changes
from partial_rollout.settings.derived import num_ranks, read_settings, sequence_parallel_size
from partial_rollout.settings.flag import provide_attention
from tests.unit.settings.support import apply, check, check_ours

if TYPE_CHECKING:
    from tests.unit.settings.support import Composed

ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
LIBRARY = "actor_rollout_ref.model.external_lib"
OURS = "partial_rollout.packing.attention"


@pytest.mark.parametrize(
    ("changes", "actor", "critic"),
    [
        ({}, None, None),
        ({ATTENTION: "varlen_sdpa"}, [OURS], None),
        ({ATTENTION: "varlen_sdpa", LIBRARY: "mine"}, ["mine", OURS], None),
        ({ATTENTION: "varlen_sdpa", LIBRARY: ["mine", "yours"]}, ["mine", "yours", OURS], None),
        ({"critic.model.override_config.attn_implementation": "varlen_sdpa"}, None, [OURS]),
    ],
)
def test_verl_imports_our_attention_where_it_is_named(composed: Composed, changes: dict[str, Any], actor, critic):
    config = composed(changes)
    provide_attention(Changes(config, ByHand()))
    assert (config.actor_rollout_ref.model.external_lib, config.critic.model.external_lib) == (actor, critic)


SEQUENCE_PARALLEL = "actor_rollout_ref.{}ulysses_sequence_parallel_size"
FOUR_DEVICES = {"trainer.n_gpus_per_node": 4, "partial_rollout.packing.planner": "global"}


@pytest.mark.parametrize(
    ("actor", "deprecated", "expected"),
    [(1, 1, (4, 1)), (2, 1, (2, 2)), (1, 2, (2, 2)), (4, 2, (2, 2)), (4, 1, (1, 4))],
)
def test_both_keys_of_sequence_parallelism_count_as_in_verl(composed: Composed, actor, deprecated, expected):
    keys = {SEQUENCE_PARALLEL.format("actor.fsdp_config."): actor, SEQUENCE_PARALLEL.format("actor."): deprecated}
    config = composed(FOUR_DEVICES | keys)
    check(config)
    assert (num_ranks(config), sequence_parallel_size(config)) == expected
    verls = omega_conf_to_dataclass(config.actor_rollout_ref.actor).fsdp_config.ulysses_sequence_parallel_size
    assert verls == expected[1]


@pytest.mark.parametrize("key", ["actor.", "actor.fsdp_config."])
def test_devices_that_cannot_share_rows_are_told(composed: Composed, key: str):
    message = r"actor\.fsdp_config\.ulysses_sequence_parallel_size \(or .*=3 for .*= 4 devices .*divisor.*planner=verl"
    with pytest.raises(ConfigError, match=message):
        check(composed(FOUR_DEVICES | {SEQUENCE_PARALLEL.format(key): 3}))


def test_our_attention_needs_whole_rows(composed: Composed):
    shared = FOUR_DEVICES | {SEQUENCE_PARALLEL.format("actor."): 2}
    check(composed(shared))
    check(composed({ATTENTION: "varlen_sdpa"}))
    with pytest.raises(ConfigError, match=r"=2 for .* attn_implementation=varlen_sdpa is not allowed"):
        check(composed(shared | {ATTENTION: "varlen_sdpa"}))


@pytest.mark.parametrize("reference", ["actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"])
def test_a_reference_on_other_ranks_is_told(composed: Composed, reference: str):
    """A reference inherits only the actor's deprecated key."""
    actor = {SEQUENCE_PARALLEL.format("actor.fsdp_config."): 2}
    with pytest.raises(ConfigError, match=r"ref\..*ulysses_sequence_parallel_size .*=1 .* the actor's 2"):
        check(composed(FOUR_DEVICES | actor | {reference: True}))
    check(composed(FOUR_DEVICES | actor | {reference: True, SEQUENCE_PARALLEL.format("ref.fsdp_config."): 2}))
    check(composed(FOUR_DEVICES | {SEQUENCE_PARALLEL.format("actor."): 2, reference: True}))
    check(composed(FOUR_DEVICES | actor | {reference: False}))
    check(composed(FOUR_DEVICES | actor | {reference: True, "actor_rollout_ref.model.lora_rank": 8}))


@pytest.mark.parametrize("change", [{"actor_rollout_ref.actor.strategy": "megatron"}, {"trainer.n_gpus_per_node": 3}])
def test_verls_planner_asks_for_nothing(composed: Composed, change: dict[str, Any]):
    check(composed(change | {"partial_rollout.packing.planner": "verl"}))


CHANNEL = {"partial_rollout.weights.backend": "channel"}
LORA = {"actor_rollout_ref.model.lora_rank": 8}
DUMMY = {"actor_rollout_ref.rollout.load_format": "dummy"}
BEYOND = [
    (LORA | DUMMY, r"the weights below a LoRA adapter \(actor_rollout_ref.model.lora_rank=8\)"),
    ({"actor_rollout_ref.model.lora.rank": 8} | DUMMY, "model.lora.rank=8"),
    ({"actor_rollout_ref.rollout.quantization": "fp8"}, "rollout.quantization=fp8"),
    ({"actor_rollout_ref.rollout.disaggregation.enabled": True}, "disaggregation.enabled=True"),
    ({"actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl"}, "checkpoint_engine.backend=nccl"),
]


@pytest.mark.parametrize(("changes", "message"), BEYOND)
def test_what_the_weight_channel_does_not_carry_is_told_when_it_was_asked_for(composed: Composed, changes, message):
    check_ours(composed(changes))
    with pytest.raises(ConfigError, match=rf"{message}.*weights.backend=verl or auto"):
        check_ours(composed(CHANNEL | changes))


def test_the_weight_channel_on_a_device_it_does_not_know_is_refused(composed: Composed):
    check_ours(composed({"trainer.device": "npu"}))
    with pytest.raises(ConfigError, match=r"trainer.device=npu is not allowed: .* one of cpu, cuda"):
        check_ours(composed(CHANNEL | {"trainer.device": "npu"}))


def test_merged_adapters_are_whole_weights_and_others_travel_if_engines_load_what_is_below_them(composed: Composed):
    check_ours(composed(CHANNEL | LORA | DUMMY | {"actor_rollout_ref.model.lora.merge": True}))
    check_ours(composed(CHANNEL | LORA))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "channel"),
        ({"trainer.device": "cuda"}, "channel"),
        ({"trainer.device": "npu"}, "verl"),
        (LORA, "channel"),
        (LORA | DUMMY, "verl"),
        ({"partial_rollout.weights.backend": "verl"}, "verl"),
    ],
)
def test_servers_and_training_workers_are_told_the_same_weight_backend(composed: Composed, changes, wanted):
    config = composed(changes)
    apply(config)
    handed_on = PartialRolloutConfig.from_rollout(config.actor_rollout_ref.rollout.custom)
    assert (handed_on.weights.backend, read_settings(config).uses_channel) == (wanted, wanted == "channel")
