"""The text recipes with made-up weights and problems, as far as they can be seen without a GPU."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from benchmarks import jobs
from benchmarks.jobs import RECIPES, Recipes, main, parse, variables, write_problems
from partial_rollout.advise.result import read_result
from partial_rollout.settings.flag import is_enabled
from tests.unit.benchmarks.test_jobs import CONFIGS, WRITE
from tests.unit.run.test_recipes import RECIPES as SCRIPTS
from tests.unit.run.test_recipes import shell
from tests.unit.settings.support import apply, check_ours

pytestmark = pytest.mark.slow


def test_every_text_recipe_is_known():
    assert {f"run_{name}.sh" for name in RECIPES} == {
        name for name in SCRIPTS if "cpu" not in name and "smollm2" not in name
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_problems_are_those_of_the_recipe_s_own_script(recipe, tmp_path):
    write_problems(tmp_path, recipe, 5)
    for split in ("train", "test"):
        rows = pd.read_parquet(tmp_path / f"{split}.parquet")
        assert len(rows) == 5
        assert ("agent_name" in rows) == ("tool" in recipe)


@pytest.mark.parametrize(
    ("recipe", "baseline"), [*((name, False) for name in RECIPES), ("qwen3-0.6b_gsm8k_grpo", True)]
)
def test_a_recipe_s_configuration_is_accepted(recipe, baseline, tmp_path):
    write_problems(tmp_path / recipe, recipe, 5)
    (tmp_path / RECIPES[recipe]).mkdir()
    words = ["--recipes", recipe, "--gpus", "0", "1", "--tensor-parallel", "2", "--out", str(tmp_path), "--steps", "3"]
    options = parse([*words, "--group", "4", "--set", "trainer.nnodes=2", *["--baseline"] * baseline])
    line = Recipes(options).commands(tmp_path)[recipe]
    environment = os.environ | {"PARTIAL_ROLLOUT_DRY_RUN": "1"}
    shown = subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout
    given = [word for word in shlex.split(shown)[3:] if not word.startswith("hydra.")]
    with initialize_config_dir(CONFIGS, version_base=None):
        config = compose("partial_rollout", overrides=given)
    assert is_enabled(config) == (not baseline)
    if not baseline:
        check_ours(config)
        apply(config)
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes) == (2, 2)
    rollout, data = config.actor_rollout_ref.rollout, config.data
    assert (rollout.tensor_model_parallel_size, rollout.n) == (2, 4)
    assert (data.train_batch_size, data.max_response_length) == (jobs.RECIPE_BATCH, jobs.RECIPE_RESPONSE_TOKENS)
    assert config.trainer.total_training_steps == 3
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "varlen_sdpa"
    assert config.actor_rollout_ref.model.use_fused_kernels == (RECIPES[recipe] != "8b")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_knows_every_variable_that_it_is_given(recipe, tmp_path):
    """A variable of another name would be ignored, and the recipe's own default stay."""
    known = shell(f"run_{recipe}.sh", "--help").stdout.split()
    assert not set(variables(parse(["--out", "out"]), tmp_path, tmp_path)) - set(known)


@pytest.fixture
def instead(monkeypatch):
    """Lets a script stand for every recipe, without a model."""

    def replace(script):
        for name in ("write_model", "write_weights"):
            monkeypatch.setattr(jobs, name, lambda *_: None)
        monkeypatch.setattr(Recipes, "_command", lambda *_: [sys.executable, "-c", script])

    return replace


def test_a_recipe_s_steps_are_stored_with_what_is_read_of_them(instead, tmp_path):
    """All of them, the first ones too."""
    instead(WRITE)
    main(["--recipes", "qwen3-0.6b_gsm8k_grpo", "--out", str(tmp_path / "out"), "--gpus", "3"])
    result = read_result(tmp_path / "out/recipes.json")
    (run,), (row,) = result["runs"], result["summary"]
    assert (run["code"], run["gpus"], len(run["steps"])) == (0, [3], 4)
    assert (row["recipe"], row["num_steps"]) == ("qwen3-0.6b_gsm8k_grpo", 4)
    training = {"training/rollout_probs_diff_mean", "training/off_policy/x"}
    assert set(run["steps"][0]) == {"timing_s/gen", "partial_rollout/drain_ms", *training}


def test_a_recipe_that_is_interrupted_is_stored_with_its_steps(instead, tmp_path):
    """Ctrl-C, here by the job itself once it has ended its steps, comes to the thread that waits."""
    instead(f"{WRITE}\nimport signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)")
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            main(["--recipes", *RECIPES, "--out", str(tmp_path), "--budget-s", "300"])
    finally:
        signal.signal(signal.SIGTERM, before)
    (run,) = read_result(tmp_path / "recipes.json")["runs"]
    assert (run["recipe"], len(run["steps"])) == ("qwen3-0.6b_gsm8k_grpo", 4)


def test_a_dry_run_shows_the_command_of_every_recipe(tmp_path, capsys):
    main(["--recipes", *RECIPES, "--out", str(tmp_path / "out"), "--dry-run", "--set", "a.b=1"])
    lines = capsys.readouterr().out.splitlines()
    assert [f"run_{name}.sh" in line for name, line in zip(RECIPES, lines, strict=True)] == [True] * len(RECIPES)
    assert all(line.endswith(" a.b=1") for line in lines)
    assert not (tmp_path / "out").exists()
