"""The recipes for image models compose to a configuration that is accepted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from partial_rollout.diffusion.config import DiffusionConfig
from partial_rollout.diffusion.contract import resolve
from partial_rollout.diffusion.sde_window import WindowPlan
from partial_rollout.errors import ConfigError
from tests.unit.run.test_recipes import HOME, PRIVATE_PATH, ROOT, RUN, command, shell

RECIPES = sorted(path.name for path in RUN.glob("run_qwen_image_*.sh"))
GIVEN = {"model": {"path": "m"}, "data": {"prompts": "p"}, "trainer": {"output_dir": "o", "reward": "a.b"}}


def composed(words: list[str]) -> DiffusionConfig:
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        config = compose("diffusion", overrides=words[3:])
    block: Any = OmegaConf.to_container(config, throw_on_missing=True)
    return DiffusionConfig.from_mapping(block)


def test_there_is_one_for_a_cpu_and_one_for_gpus():
    assert RECIPES == ["run_qwen_image_flow_grpo.sh", "run_qwen_image_flow_grpo_cpu.sh"]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("algorithm", ["flow_grpo", "mix_grpo"])
def test_a_recipe_composes_and_resolves_its_adapter(name: str, algorithm: str):
    words = command(name, ALGORITHM=algorithm)
    assert words[1:3] == ["-m", "partial_rollout.main_diffusion"]
    config = composed(words)
    rollout = config.rollout
    adapter = resolve(config.model.architecture, config.algorithm.name, step_execution=rollout.step_execution)
    assert (adapter.algorithm, adapter.stepwise) == (algorithm, True)
    assert rollout.prefetch_factor > 1
    assert (config.actor.device == "cpu") == (rollout.gpus_per_server == 0) == ("cpu" in name)


@pytest.mark.parametrize("name", RECIPES)
def test_the_baseline_runs_whole_requests(name: str):
    rollout = composed(command(name, PARTIAL_ROLLOUT="0")).rollout
    assert (rollout.step_execution, rollout.prefetch_factor) == (False, 1)


@pytest.mark.parametrize("name", RECIPES)
def test_paths_help_and_overrides(name: str):
    assert PRIVATE_PATH.findall((RUN / name).read_text()) == []
    words = command(name, "trainer.total_training_steps=5", OUTPUT_DIR="/a b/c,d")
    assert composed(words).trainer.total_training_steps == 5
    assert composed(words).trainer.output_dir == "/a b/c,d"
    done = shell(name, "--help")
    assert done.returncode == 0
    assert "PARTIAL_ROLLOUT_DRY_RUN" in done.stdout
    assert HOME in done.stdout or "gpu" not in name


def test_nothing_is_logged_to_a_file_where_the_job_is_started():
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        logging = compose("diffusion", return_hydra_config=True).hydra.job_logging
    assert list(logging.handlers) == list(logging.root.handlers) == ["console"]


def test_yaml_defaults_equal_the_dataclass_defaults():
    text = (ROOT / "configs" / "diffusion.yaml").read_text(encoding="utf-8")
    blocks = {key: value for key, value in yaml.safe_load(text).items() if key not in ("defaults", "hydra")}
    defaults = dataclasses.asdict(DiffusionConfig.from_mapping(GIVEN))
    for name, block in GIVEN.items():
        for key in block:
            assert blocks[name].pop(key) == "???"
            defaults[name].pop(key)
    assert blocks == defaults


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ({"algorithm": {"sde_window_size": 6}}, "does not fit"),
        ({"algorithm": {"name": "mix_grpo", "sde_window_interval": 0}}, "sde_window_interval=0 .* at least 1"),
        ({"algorithm": {"sde_window_last": 10, "sde_type": "cps"}}, "at most 9"),
        ({"algorithm": {"noise_level": 0}}, "nothing is learnt"),
        ({"rollout": {"true_cfg_scale": 4.0}}, "data.negative_prompt=None"),
        ({"data": {"prompts": "p", "negative_prompt": " "}}, "is not above 1"),
        ({"rollout": {"step_execution": False}}, "rollout.prefetch_factor=2.0"),
        ({"rollout": {"interrupt": "kill"}}, "hold or snapshot"),
        ({"rollout": {"num_steps": 201}}, r"rollout.num_steps=201 is not allowed: must be at most 200"),
        ({"rollout": {"gpus_per_server": 2}}, r"rollout.gpus_per_server=2 .* 0, a CPU, or 1"),
        ({"rollout": {"timeout_s": 0}}, "rollout.timeout_s=0.0"),
        ({"algorithm": {"noise_level": 1.1, "sde_type": "cps"}}, r"algorithm.noise_level=1.1 .* at most 1 with"),
        ({"rollout": {"n": 1}}, "compares the images"),
        ({"rollout": {"speed": 1}}, "unknown key rollout.speed"),
        ({"actor": {"device": "tpu"}}, "actor.device"),
    ],
)
def test_a_wrong_value_is_named(block: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        DiffusionConfig.from_mapping(GIVEN | block)


def test_a_window_that_moves_must_be_shared_by_the_requests_of_a_step():
    algorithm = DiffusionConfig.from_mapping(GIVEN | {"algorithm": {"sde_window_interval": 25}}).algorithm
    algorithm.check_window(is_shared=True)
    with pytest.raises(ConfigError, match="must be null with algorithm.name=flow_grpo"):
        algorithm.check_window(is_shared=False)


def test_the_plan_of_windows_has_all_that_is_said_of_them():
    given = {"name": "mix_grpo", "sde_window_size": 1, "sde_window_first": 2, "sde_window_last": 4}
    config = DiffusionConfig.from_mapping(GIVEN | {"algorithm": given | {"sde_window_interval": 3}})
    assert config.algorithm.window_plan() == WindowPlan(1, 2, 4, 3)


@pytest.mark.parametrize("name", ["height", "width"])
def test_a_size_that_the_model_cannot_have_is_named(name: str):
    config = DiffusionConfig.from_mapping(GIVEN | {"rollout": {name: 500}})
    with pytest.raises(ConfigError, match=f"rollout.{name}=500 is not allowed: must be a multiple of 16"):
        config.check_sizes(16)
    config.check_sizes(4)
