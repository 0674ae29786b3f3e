"""Values that verl refuses are refused before anything is started; the names are verl's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import verl
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, AdvantageEstimator
from verl.workers.config import ActorConfig, RolloutConfig

from partial_rollout.doctor import diagnose
from partial_rollout.errors import ConfigError, Refusal
from partial_rollout.settings import verl_values
from partial_rollout.settings.by_hand import ByHand
from partial_rollout.settings.compose import CommandLine, compose_line, resolve
from partial_rollout.settings.prepare import prepare
from partial_rollout.settings.refused import check_counts, check_inputs
from tests.unit.settings.support import check

if TYPE_CHECKING:
    from tests.unit.settings.support import Composed

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
TWO_BY_ONE = {f"{ROLLOUT}.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{ROLLOUT}.mode": "sync"}, r"rollout.mode=sync is not allowed: must be async .* has been removed"),
        ({f"{ROLLOUT}.mode": "asynch"}, r"rollout.mode=asynch is not allowed: must be async"),
        ({f"{ROLLOUT}.pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2 is not allowed: must be 1: "),
        ({f"{ROLLOUT}.expert_parallel_size": 2}, "expert_parallel_size=2 is not allowed: must be 1: "),
        ({f"{ROLLOUT}.expert_parallel_size": 4, **TWO_BY_ONE}, "expert_parallel_size=4 is not .* must be 1 or 2: "),
        ({f"{ROLLOUT}.moe_tensor_parallel_size": 2}, "moe_tensor_parallel_size=2 .* for TensorRT-LLM only"),
        ({f"{ACTOR}.loss_agg_mode": "token_mean"}, r"loss_agg_mode=token_mean .*\(did you mean token-mean\?\)"),
        ({f"{ACTOR}.loss_agg_mode": "mean"}, "loss_agg_mode=mean is not allowed: must be one of token-mean"),
        ({"algorithm.adv_estimator": "GRPO"}, r"adv_estimator=GRPO .*\(did you mean grpo\?\)"),
        ({f"{ACTOR}.policy_loss.loss_mode": "gspoo"}, r"loss_mode=gspoo .*\(did you mean gspo\?\)"),
        ({f"{ACTOR}.strategy": "fdsp"}, r"strategy=fdsp .*\(did you mean fsdp\?\)"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, "parallel_size=2 for .* = 1 devices .* a divisor of the dev"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 0}, "parallel_size=0 for .* = 1 devices .* a divisor of the dev"),
        ({f"{ROLLOUT}.gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5 .* above 0 and at most 1"),
        ({f"{ROLLOUT}.gpu_memory_utilization": 0}, "gpu_memory_utilization=0 .* above 0 and at most 1"),
        ({f"{ACTOR}.ppo_mini_batch_size": 17}, "mini_batch_size=17 .* must be at most data.train_batch_size=16"),
        ({"trainer.total_epochs": "abc"}, "trainer.total_epochs=abc is not allowed: must be a number"),
        ({"trainer.val_before_train": "no"}, "val_before_train=no is not allowed: must be True or False: any other"),
    ],
)
def test_a_value_that_verl_refuses_is_refused_with_what_is_allowed(
    composed: Composed, changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        check(composed(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {f"{ROLLOUT}.expert_parallel_size": 2, **TWO_BY_ONE},
        {f"{ROLLOUT}.data_parallel_size": 2, f"{ROLLOUT}.expert_parallel_size": 2, "trainer.n_gpus_per_node": 4},
        {f"{ROLLOUT}.tensor_model_parallel_size": 16, "trainer.n_gpus_per_node": 8, "trainer.nnodes": 2},
        {f"{ROLLOUT}.gpu_memory_utilization": 1},
        {f"{ROLLOUT}.gpu_memory_utilization": None, f"{ROLLOUT}.mode": None},
        {f"{ACTOR}.ppo_mini_batch_size": 17, f"{ACTOR}.use_dynamic_bsz": True},
        {"algorithm.rollout_correction.rollout_is_threshold": "0.5_2.0"},
        {"trainer.total_epochs": "${oc.decode:'3'}"},
        {"trainer.total_epochs": "${trainer.save_freq}"},
        {"transfer_queue.backend.MooncakeStore.global_segment_size": "4GB"},
        *({"algorithm.adv_estimator": name} for name in verl_values.ESTIMATORS if name not in ("gae", "remax")),
        *({f"{ACTOR}.policy_loss.loss_mode": name} for name in verl_values.POLICY_LOSSES),
        *({f"{ACTOR}.loss_agg_mode": name} for name in verl_values.LOSS_AGGREGATIONS),
    ],
    ids=str,
)
def test_a_value_that_verl_takes_is_left_alone(composed: Composed, changes: dict[str, Any]):
    check(composed(changes))


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.external_lib", "data.custom_cls.path"])
def test_code_of_the_users_own_may_add_names(composed: Composed, key: str):
    mine = {key: __file__, "algorithm.adv_estimator": "mine", f"{ACTOR}.policy_loss.loss_mode": "mine"}
    check_inputs(composed(mine))
    with pytest.raises(Refusal, match="adv_estimator=mine"):
        check_inputs(composed({**mine, key: None}))
    with pytest.raises(Refusal, match="loss_agg_mode=mine"):
        check_inputs(composed({**mine, f"{ACTOR}.loss_agg_mode": "mine"}))


def test_the_names_are_verls():
    assert set(verl_values.ESTIMATORS) == {each.value for each in AdvantageEstimator} == set(ADV_ESTIMATOR_REGISTRY)
    assert set(verl_values.POLICY_LOSSES) == set(POLICY_LOSS_REGISTRY)
    files = Path(verl.__path__[0], "workers", "engine").rglob("*.py")
    found = [re.findall(r"@EngineRegistry.register\(.*?backend=(\[.*?\]|\".*?\")", file.read_text()) for file in files]
    assert {name for given in found for names in given for name in re.findall(r"\w+", names)} == set(
        verl_values.STRATEGIES
    )


def test_verl_itself_refuses_them():
    sizes: dict[str, Any] = {"ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1}
    for name in verl_values.LOSS_AGGREGATIONS:
        ActorConfig(strategy="fsdp", loss_agg_mode=name, **sizes)
    with pytest.raises(ValueError, match="token_mean"):
        ActorConfig(strategy="fsdp", loss_agg_mode="token_mean", **sizes)
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"mode": "sync"}, ValueError),
        ({"pipeline_model_parallel_size": 2}, NotImplementedError),
        ({"expert_parallel_size": 3}, AssertionError),
        ({"moe_tensor_parallel_size": 2}, AssertionError),
    ]
    for wrong, error in refused:
        with pytest.raises(error):
            RolloutConfig(name="vllm", **wrong)


def test_all_wrong_paths_and_values_are_told_at_once_by_doctor_and_by_the_start(tmp_path: Path):
    (tmp_path / "data").touch()
    words = [
        *("data.train_files=[/nope1,/nope2]", "data.val_files=/nope3", "actor_rollout_ref.model.path=/nope/4"),
        *("data.tool_config_path=/nope5", "reward.custom_reward_function.path=/nope6", f"{ROLLOUT}.name=vllm"),
        *(f"{ACTOR}.use_dynamic_bsz=True", "algorithm.adv_estimator=GRPO", f"{ROLLOUT}.mode=sync"),
    ]
    words += [f"+{ROLLOUT}.mine=1", f"+{ROLLOUT}.other=1"]
    told = diagnose(words).blocked
    expected = [
        *("data.train_files=/nope1", "data.train_files=/nope2", "data.val_files=/nope3"),
        *("actor_rollout_ref.model.path=/nope/4", "data.tool_config_path=/nope5"),
        *("reward.custom_reward_function.path=/nope6", f"{ROLLOUT}.mine=1", f"{ROLLOUT}.other=1"),
        *("algorithm.adv_estimator=GRPO", f"{ROLLOUT}.mode=sync"),
    ]
    assert [text.partition(" ")[0] for text in told] == expected
    with pytest.raises(ConfigError) as refused:
        prepare(compose_line(resolve(CommandLine.parse(words))), ByHand.read(words))
    assert [line.partition(" ")[0] for line in str(refused.value).splitlines()[1:]] == expected


def test_a_text_is_no_size_to_compute_with(composed: Composed):
    with pytest.raises(Refusal, match="tensor_model_parallel_size=two .* must be a number"):
        check_counts(composed({f"{ROLLOUT}.tensor_model_parallel_size": "two"}))
