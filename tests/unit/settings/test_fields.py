"""Keys that verl's dataclasses do not have are refused before anything is started."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.core.resume import UNRESUMABLE
from partial_rollout.doctor import Report, describe
from partial_rollout.errors import Refusal
from partial_rollout.settings.fields import fields_of, unlisted
from partial_rollout.settings.refused import check_inputs

if TYPE_CHECKING:
    from tests.unit.settings.support import Composed

ROLLOUT = "actor_rollout_ref.rollout"
NOT_WITH_DRAFTS = ("min_p", "logit_bias")


@pytest.mark.parametrize(
    ("key", "told"),
    [
        *((f"{ROLLOUT}.{name}", "and partial rollout refuses it there too") for name in UNRESUMABLE),
        (f"{ROLLOUT}.stop", "an agent loop of your own gives it in its sampling parameters"),
        (f"{ROLLOUT}.val_kwargs.presence_penalty", "SamplingConfig has no presence_penalty"),
        # With drafts vLLM refuses requests that have one: if verl gets such a key, `_check_drafts` has to refuse it.
        *((f"{ROLLOUT}.{name}", f"RolloutConfig has no {name}") for name in NOT_WITH_DRAFTS),
        *((f"{ROLLOUT}.val_kwargs.{name}", f"SamplingConfig has no {name}") for name in NOT_WITH_DRAFTS),
        (f"{ROLLOUT}.swap_space", "below actor_rollout_ref.rollout.engine_kwargs.vllm"),
        ("actor_rollout_ref.actor.fsdp_config.mine", "FSDPEngineConfig has no mine"),
        ("actor_rollout_ref.model.mine", "HFModelConfig has no mine"),
    ],
)
def test_a_key_that_verls_dataclass_lacks_is_refused_with_the_place_where_it_belongs(
    composed: Composed, key: str, told: str
):
    with pytest.raises(Refusal) as refusal:
        check_inputs(composed({key: 0.5}))
    assert str(refusal.value).startswith(f"{key}=0.5 is not allowed: verl's ")
    assert told in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({f"{ROLLOUT}.moe_tensor_parallel_size": 2}, []),
        ({f"{ROLLOUT}.engine_kwargs.vllm.mine": 2, f"{ROLLOUT}.custom.mine.also": 2}, []),
        ({"actor_rollout_ref.model.override_config.mine": 2, "trainer.mine": 1, "data.mine": 1}, []),
        ({"critic.mine": 2}, []),
        ({"critic.mine": 2, "critic.enable": True}, ["critic.mine"]),
    ],
)
def test_keys_that_verl_takes_are_left_alone(composed: Composed, changes: dict[str, Any], keys: list[str]):
    assert [found.key for found in unlisted(composed(changes))] == keys


def test_a_key_of_a_class_that_cannot_be_read_is_to_be_looked_at(composed: Composed):
    config = composed({f"{ROLLOUT}._target_": "mine.Rollout", f"{ROLLOUT}.presence_penalty": 0.5})
    check_inputs(config)
    report = Report()
    describe(report, config, [])
    assert (
        "look at",
        f"{ROLLOUT}.presence_penalty is no key that verl lists, and whether mine.Rollout takes it is not known",
    ) in report.lines


@pytest.mark.parametrize(
    "target",
    [
        "verl.workers.config.RolloutConfig",
        "verl.workers.config.FSDPActorConfig",
        "verl.workers.config.McoreActorConfig",
        "verl.workers.config.FSDPCriticConfig",
        "verl.workers.config.FSDPEngineConfig",
        "verl.workers.config.McoreOptimizerConfig",
        "verl.workers.config.HFModelConfig",
        "verl.workers.config.FSDPCriticModelCfg",
        "verl.trainer.config.CheckpointConfig",
        "verl.utils.profiler.config.NPUToolConfig",
        "verl.utils.profiler.ProfilerConfig",
    ],
)
def test_fields_that_are_read_from_the_source_are_those_of_the_class(target: str):
    module, _, name = target.rpartition(".")
    fields = dataclasses.fields(getattr(importlib.import_module(module), name))
    assert fields_of(target) == {field.name for field in fields} - {"_target_"}
