from __future__ import annotations

import logging

import pytest

from partial_rollout.diffusion import contract
from partial_rollout.diffusion.contract import QWEN_IMAGE, Adapter, register, resolve
from partial_rollout.diffusion.sde_window import window_of_request, window_of_step
from partial_rollout.errors import ConfigError


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(contract, "_ADAPTERS", dict(contract._ADAPTERS))


@pytest.mark.parametrize(("name", "window"), [("flow_grpo", window_of_request), ("mix_grpo", window_of_step)])
def test_step_execution_chooses_the_stepwise_one(name, window):
    plain, stepwise = (resolve(QWEN_IMAGE, name, step_execution=flag) for flag in (False, True))
    assert not plain.stepwise
    assert stepwise.stepwise
    assert plain.pipeline != stepwise.pipeline
    assert plain.window is stepwise.window is window


def test_without_a_stepwise_one_it_says_so_and_takes_the_plain_one(caplog):
    adapter = Adapter("other", "a.B", window_of_step, stepwise=False)
    register(QWEN_IMAGE, "other", adapter)
    with caplog.at_level(logging.WARNING):
        assert resolve(QWEN_IMAGE, "other", step_execution=True) is adapter
    assert "no other_stepwise is registered for QwenImagePipeline" in caplog.text


def test_an_unknown_algorithm_or_architecture_is_named():
    with pytest.raises(ConfigError, match="'dpo' is not registered.*flow_grpo, mix_grpo"):
        resolve(QWEN_IMAGE, "dpo", step_execution=True)
    with pytest.raises(ConfigError, match="architecture FluxPipeline"):
        resolve("FluxPipeline", "flow_grpo", step_execution=True)


def test_a_name_is_taken_once_and_says_whether_it_is_stepwise():
    adapter = Adapter("flow_grpo", "a.B", window_of_step, stepwise=False)
    with pytest.raises(ConfigError, match="is taken by"):
        register(QWEN_IMAGE, "flow_grpo", adapter)
    with pytest.raises(ConfigError, match="_stepwise"):
        register(QWEN_IMAGE, "x_stepwise", adapter)
