from __future__ import annotations

import copy
import functools
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from partial_rollout.settings.derived import read_block, read_settings
from partial_rollout.settings.flag import is_enabled
from partial_rollout.settings.refused import check_config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
RUN = ROOT / "partial_rollout" / "run"
ALL = sorted(path.name for path in RUN.glob("run_*.sh") if "image" not in path.stem)
RECIPES = [name for name in ALL if not name.endswith("_baseline.sh")]
FLAG = "+async_training.partial_rollout=True"
HOME = "/somebody/home"
PRIVATE_PATH = re.compile(r"(?<![\w~}])/(root|work|home|mnt|data|Users|scratch)/")


def shell(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": HOME, "RUN": f"{HOME}/run", **variables}
    return subprocess.run(
        ["bash", str(RUN / script), *arguments], env=environment, cwd=RUN, capture_output=True, text=True, check=False
    )


def command(script: str, *arguments: str, **variables: str) -> list[str]:
    """What the recipe would start, one argument each."""
    return list(_command(script, arguments, tuple(variables.items())))


@functools.cache
def _command(script: str, arguments: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    done = shell(script, *arguments, PARTIAL_ROLLOUT_DRY_RUN="1", **dict(variables))
    assert done.returncode == 0, done.stderr
    return tuple(shlex.split(done.stdout))


def composed(words: list[str]) -> Any:
    """The configuration that a command line selects, Hydra's own part left out."""
    return copy.deepcopy(_composed(tuple(words)))


@functools.cache
def _composed(words: tuple[str, ...]) -> Any:
    arguments = words[3:]
    name = "partial_rollout"
    if arguments[0] == "--config-name":
        name, arguments = arguments[1], arguments[2:]
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return compose(name, overrides=[item for item in arguments if not item.startswith("hydra.")])


def test_every_recipe_has_its_baseline():
    assert {f"{Path(name).stem}_baseline.sh" for name in RECIPES} == set(ALL) - set(RECIPES)
    assert len(RECIPES) == 9


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_with_the_flag_and_the_correction(name: str):
    words = command(name)
    assert words[1:3] == ["-m", "partial_rollout.main_ppo"]
    config = composed(words)
    assert is_enabled(config)
    assert read_block(config).depths[0] == 2.0
    assert config.algorithm.adv_estimator == "grpo"
    assert config.algorithm.rollout_correction.rollout_is == "token"
    assert config.algorithm.rollout_correction.rollout_is_threshold == 2.0
    assert not config.algorithm.rollout_correction.bypass_mode
    assert config.actor_rollout_ref.rollout.calculate_log_probs
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert config.data.train_batch_size % config.actor_rollout_ref.actor.ppo_mini_batch_size == 0
    assert config.trainer.total_training_steps > 0
    assert not OmegaConf.missing_keys(config) - OmegaConf.missing_keys(composed(["", "-m", "", FLAG, "+recipe=grpo"]))


@pytest.mark.parametrize("name", [name for name in RECIPES if "qwen3" in name])
def test_a_gpu_recipe_leaves_modes_to_the_run(name: str):
    config = composed(command(name, "actor_rollout_ref.rollout.free_cache_engine=False"))
    check_config(config, read_settings(config))
    block = read_block(config)
    assert (block.prefetch_factor, block.tail.interrupt_mode, block.slots.adaptive) == ("auto", "auto", "auto")
    assert block.packing.planner == "auto"


@pytest.mark.parametrize("name", RECIPES)
def test_a_baseline_differs_by_the_flag_and_the_runs_name_only(name: str):
    recipe = command(name)
    baseline = command(name.replace(".sh", "_baseline.sh"))
    assert FLAG in recipe
    assert FLAG not in baseline
    recipe.remove(FLAG)
    changed = {word.partition("=")[0] for word in set(recipe) ^ set(baseline)}
    assert changed <= {"trainer.experiment_name", "trainer.default_local_dir", "hydra.run.dir"}
    assert not is_enabled(composed(baseline))


@pytest.mark.parametrize("name", ALL)
def test_paths_are_the_users_or_this_repositorys(name: str):
    assert PRIVATE_PATH.findall((RUN / name).read_text()) == []
    values = [word.partition("=")[2].strip("'") for word in command(name)]
    paths = [value for value in values if value.startswith("/")]
    assert paths
    assert all(path.startswith((HOME, str(ROOT))) for path in paths)


@pytest.mark.parametrize("place", ["/a b/c,d", "/x=1/(y)#z", "/it's"])
def test_a_path_may_hold_what_means_something_to_hydra(place: str):
    quickstart = composed(command("run_quickstart_cpu.sh", PARTIAL_ROLLOUT_HOME=place))
    assert quickstart.data.train_files == f"{place}/quickstart/task/train.parquet"
    recipe = command("run_qwen3-0.6b_gsm8k_grpo.sh", MODEL_PATH=place, OUTPUT_DIR=place)
    assert composed(recipe).actor_rollout_ref.model.path == place


@pytest.mark.parametrize("name", ALL)
def test_further_overrides_come_last_and_unchanged(name: str):
    words = command(name, "trainer.total_training_steps=5", "trainer.logger=[console, file]")
    assert words[-2:] == ["trainer.total_training_steps=5", "trainer.logger=[console, file]"]


@pytest.mark.parametrize("name", ["run_quickstart_cpu.sh", "run_qwen3-0.6b_gsm8k_grpo.sh"])
def test_the_last_override_counts(name: str):
    assert composed(command(name, "trainer.total_training_steps=5")).trainer.total_training_steps == 5


@pytest.mark.parametrize("name", ALL)
def test_help_says_what_and_which_variables(name: str):
    done = shell(name, "--help")
    assert done.returncode == 0
    assert "PARTIAL_ROLLOUT_DRY_RUN" in done.stdout
    assert not done.stdout.startswith("\n")
    assert "set -euo" not in done.stdout


def test_sizes_and_paths_come_from_the_environment():
    words = command("run_qwen3-4b_gsm8k_grpo.sh", BATCH_SIZE="32", GROUP_SIZE="4", TRAIN_FILE="my dir/x.parquet")
    config = composed(words)
    assert (config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (32, 4)
    assert config.data.train_files == "my dir/x.parquet"
    assert config.data.max_response_length == 4096


def test_a_recipes_own_default_wins_over_the_shared_one():
    assert composed(command("run_qwen3-4b_dapo_math.sh")).data.max_response_length == 8192
    assert composed(command("run_qwen3-4b_dapo_math.sh")).actor_rollout_ref.actor.clip_ratio_high == 0.28
    filtering = composed(command("run_qwen3-4b_dapo_math.sh")).algorithm.filter_groups
    assert (filtering.enable, filtering.metric) == (True, "reward")


def test_the_tool_recipe_names_the_tools_for_rollout_and_data():
    config = composed(command("run_qwen3-0.6b_gsm8k_tool.sh"))
    assert config.actor_rollout_ref.rollout.multi_turn.enable
    assert Path(config.actor_rollout_ref.rollout.multi_turn.tool_config_path).is_file()
    assert config.data.tool_config_path == config.actor_rollout_ref.rollout.multi_turn.tool_config_path


def test_the_reorder_recipe_begins_more_than_it_trains():
    config = composed(command("run_qwen3-8b_reorder.sh"))
    tail = read_block(config).tail
    assert (tail.policy, tail.groups_per_round(config.data.train_batch_size)) == ("reorder", 320)
    tail = read_block(composed(command("run_qwen3-8b_reorder.sh", GEN_BATCH_SIZE="300"))).tail
    assert tail.groups_per_round(256) == 300


def test_the_recipe_for_two_small_gpus_offloads_and_has_small_batches():
    config = composed(command("run_qwen3-0.6b_two_small_gpus.sh"))
    sharded = config.actor_rollout_ref.actor.fsdp_config
    assert (sharded.param_offload, sharded.optimizer_offload) == (True, True)
    assert (config.data.train_batch_size, config.trainer.n_gpus_per_node) == (8, 2)
    check_config(config, read_settings(config))


def test_engines_get_some_of_the_gpus_and_a_baseline_is_refused_them():
    config = composed(command("run_qwen3-4b_gsm8k_grpo.sh", ROLLOUT_GPUS="3", NUM_NODES="2"))
    assert config.partial_rollout.placement == "separate"
    for block, per_node in ((config.trainer, 5), (config.actor_rollout_ref.rollout, 3)):
        assert (block.nnodes, block.n_gpus_per_node) == (2, per_node)
    for script, number, text in (
        ("run_qwen3-4b_gsm8k_grpo.sh", "8", "must be below GPUS_PER_NODE=8"),
        ("run_qwen3-4b_gsm8k_grpo_baseline.sh", "4", "needs PARTIAL_ROLLOUT=1"),
    ):
        done = shell(script, PARTIAL_ROLLOUT_DRY_RUN="1", ROLLOUT_GPUS=number)
        assert (done.returncode, done.stdout) == (2, "")
        assert text in done.stderr


def test_the_dapo_recipe_of_the_small_model_samples_dynamically():
    config = composed(command("run_qwen3-0.6b_dapo_math.sh"))
    assert config.algorithm.filter_groups.enable
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen3-0.6B"


def test_missing_data_is_told_with_the_way_out():
    done = shell("run_qwen3-0.6b_gsm8k_grpo.sh")
    assert done.returncode == 2
    assert f"error: {HOME}/data/gsm8k/train.parquet does not exist. Make it: python3 -m" in done.stderr
    assert done.stdout == ""


def test_the_quickstart_fits_its_task():
    config = composed(command("run_quickstart_cpu.sh"))
    assert config.trainer.device == "cpu"
    assert config.reward.custom_reward_function.path == "pkg://partial_rollout.run.quickstart.reward"
    assert (
        config.actor_rollout_ref.rollout.max_model_len
        == config.data.max_prompt_length + config.data.max_response_length
    )
    assert config.trainer.total_training_steps == 3 * config.trainer.save_freq == 60


def test_the_smollm2_recipe_fits_its_task_and_has_a_form_for_a_cpu():
    config = composed(command("run_smollm2_reasoning_gym.sh"))
    reward = config.reward.custom_reward_function
    assert (reward.path, reward.name) == ("pkg://partial_rollout.run.smollm2_reasoning_gym.reward", "compute_score")
    rollout, data = config.actor_rollout_ref.rollout, config.data
    assert rollout.max_model_len == data.max_prompt_length + data.max_response_length
    assert config.trainer.n_gpus_per_node == 1
    assert config.data.train_files.endswith("/smollm2_task/train.parquet")

    on_cpu = composed(command("run_smollm2_reasoning_gym.sh", DEVICE="cpu"))
    assert is_enabled(on_cpu)
    assert (on_cpu.trainer.device, on_cpu.trainer.total_training_steps) == ("cpu", 3)
    assert on_cpu.reward.custom_reward_function.path == reward.path
    assert on_cpu.actor_rollout_ref.model.path == config.actor_rollout_ref.model.path
    refused = shell("run_smollm2_reasoning_gym.sh", DEVICE="tpu")
    assert (refused.returncode, refused.stderr) == (2, "error: DEVICE=tpu is not allowed: must be cuda or cpu\n")


@pytest.mark.parametrize("name", sorted(path.name for path in RUN.glob("run_*.sh")))
def test_every_recipe_is_shown_while_it_runs(name: str, tmp_path: Path):
    """A recipe starts `watch` last, or the quickstart's verdict, which shows the run as `watch` does."""
    interpreters = [tmp_path / "env" / path / "python" for path in ("bin", "omni/bin")]
    for interpreter in interpreters:
        interpreter.parent.mkdir(parents=True)
        interpreter.write_text('#!/bin/sh\nshift; printf "started %s\\n" "$1"\n')
        interpreter.chmod(0o755)
    task = tmp_path / "smollm2_task"
    task.mkdir()
    given = [task / name for name in ("train.parquet", "val.parquet", "model")]
    for path in given:
        path.touch()
    files = dict(zip(("TRAIN_FILE", "VAL_FILE", "MODEL_PATH"), map(str, given), strict=True))
    folders = dict.fromkeys(("OUTPUT_DIR", "RUN", "PARTIAL_ROLLOUT_HOME"), str(tmp_path))
    environment = {"PYTHON": str(interpreters[0]), "VENV": str(tmp_path / "env"), "SKIP_SETUP": "1"}
    done = shell(name, **files, **folders, **environment)
    assert done.returncode == 0, done.stderr
    last = "partial_rollout.watch" if name != "run_quickstart_cpu.sh" else "partial_rollout.run.quickstart.verdict"
    assert done.stdout.splitlines()[-1] == f"started {last}"
