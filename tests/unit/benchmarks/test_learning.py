"""The comparison of learning: what each mode starts, and what is said of unequal jobs."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import pytest
from hydra import compose, initialize_config_dir

from benchmarks import learning
from partial_rollout.advise.result import read_result, store
from partial_rollout.settings.derived import read_settings
from partial_rollout.settings.flag import is_enabled
from partial_rollout.settings.refused import check_config
from tests.unit.benchmarks.test_jobs import CONFIGS
from tests.unit.run.test_recipes import shell

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


WRITE = """
import json, os
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    for step in range(1, 13):
        numbers = {"actor/lr": 0.1, "critic/score/mean": step / 12, "timing_s/gen": 2.0, "timing_s/step": 3.0}
        print(json.dumps({"data": numbers}), file=file)
"""


def job(mode: str, rewards: list[float], step_s: float) -> learning.Job:
    steps = [{learning.REWARD: reward, learning.STEP_S: step_s} for reward in rewards]
    return {"mode": mode, "seed": 0, "steps": steps}


def started(mode: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, str], list[str]]:
    """The variables and overrides of the recipe, as a dry run shows them."""
    learning.main(
        [
            "--task",
            "smollm2",
            "--out",
            "/somewhere",
            "--modes",
            mode,
            "--env",
            "TEST_FREQ=5",
            "--set",
            "a.b=1",
            "--dry-run",
        ]
    )
    env, *words = shlex.split(capsys.readouterr().out)
    assert env == "env"
    start = words.index("bash")
    return dict(word.split("=", 1) for word in words[:start]), words[start + 2 :]


@pytest.mark.parametrize("mode", learning.RECIPE_MODES)
def test_a_dry_run_shows_the_recipe_of_each_mode(mode: str, capsys: pytest.CaptureFixture[str]):
    variables, words = started(mode, capsys)
    assert (variables["TEST_FREQ"], words[-1]) == ("5", "a.b=1")
    done = shell(learning.RECIPE.name, *words[:-1], PARTIAL_ROLLOUT_DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    overrides = [word for word in shlex.split(done.stdout)[3:] if not word.startswith("hydra.")]
    with initialize_config_dir(str(CONFIGS), version_base=None):
        config = compose("partial_rollout", overrides=overrides)
    assert config.actor_rollout_ref.rollout.free_cache_engine == (mode == "flag_released")
    speculation = config.actor_rollout_ref.rollout.engine_kwargs.vllm.get("speculative_config")
    assert (speculation is not None) == mode.endswith("_drafts")
    assert is_enabled(config) == (mode not in ("sync", "sync_drafts", "colocate_async"))
    if is_enabled(config):
        check_config(config, read_settings(config))
        assert mode.startswith("flag_") or read_settings(config).block.tail.interrupt_mode == "reuse_kv"
    else:
        assert config.trainer.v1.trainer_mode == mode.removesuffix("_drafts")


def test_jobs_of_unequal_length_are_compared_over_the_steps_that_all_have():
    slow = job("sync", [0.0] * 10 + [1.0] * 10, 2.0)
    fast = job("reuse_kv_3", [0.0] * 5 + [1.0] * 35, 1.0)
    found = learning.summarise([slow, fast])
    assert found["common_steps"] == 20
    first, second = found["summary"]
    assert (first["steps_to_level"], first["s_to_level"], first["time_ratio"]) == (20, 40.0, 1.0)
    assert (second["steps_to_level"], second["s_to_level"], second["time_ratio"]) == (15, 15.0, 0.5)
    assert (first["s_to_reward"]["0.50"], second["s_to_reward"]["0.50"]) == (30.0, 10.0)


def test_a_level_is_reached_by_the_mean_of_a_whole_window_or_has_no_time():
    lucky = job("sync", [1.0] * 5 + [0.0] * 15, 2.0)
    (row,) = learning.summarise([lucky])["summary"]
    assert [row["s_to_reward"][level] for level in ("0.50", "0.52")] == [20.0, None]


@pytest.mark.parametrize(("window", "last", "until"), [(10, 0.6, 10), (8, 0.5, 8), (4, 0.5, 4)])
def test_rewards_that_swing_with_the_prompts_are_means_of_whole_rounds_of_them(window: int, last: float, until: int):
    """In rounds of four steps the first two are easy: of ten steps six may be, of eight or four it is always half."""
    swinging = job("sync", [1.0, 1.0, 0.0, 0.0] * 5 + [1.0, 1.0], 2.0)
    (row,) = learning.summarise([swinging], window)["summary"]
    assert (row["reward_last"], row["steps_to_level"]) == (last, until)
    assert learning.summarise([swinging], window)["window"] == window


def test_another_learning_rate_is_told():
    first, second = (job(mode, [0.5] * 3, 1.0) for mode in ("sync", "reuse_kv_3"))
    for rate, each in ((1e-6, first), (2e-6, second)):
        each["steps"] = [step | {learning.RATE: rate} for step in each["steps"]]
    assert [row["same_learning_rate"] for row in learning.summarise([first, second])["summary"]] == [True, False]


def test_results_of_single_jobs_become_one(tmp_path: Path):
    files = [tmp_path / "sync.json", tmp_path / "fast.json"]
    for file, each in zip(files, (job("sync", [0.5] * 20, 2.0), job("reuse_kv_3", [0.5] * 30, 1.0)), strict=True):
        store({"machine": file.stem, **learning.summarise([each]), "jobs": [each]}, file, raw=["jobs"])
    whole = tmp_path / "whole.json"
    learning.main(["--out", str(tmp_path), "--modes", "--add", *map(str, files), "--json", str(whole)])
    found = read_result(whole)
    assert (found["machine"], found["common_steps"]) == ("sync", 20)
    assert [row["time_ratio"] for row in found["summary"]] == [1.0, 0.5]
    assert [len(each["steps"]) for each in found["jobs"]] == [20, 30]


def test_held_out_accuracy_is_the_mean_of_the_tasks():
    accuracy = {"val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 0.7, "val-aux/num_turns/mean": 2.0}
    steps = [{learning.REWARD: 0.0, learning.STEP_S: 9.0}, {learning.REWARD: 0.0, learning.STEP_S: 9.0, **accuracy}]
    assert learning.held_out({"mode": "sync", "seed": 0, "steps": steps}) == {"2": 0.6}


def test_a_comparison_goes_on_with_the_jobs_that_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Here jobs only write the metrics of steps."""
    given: list[tuple[str, list[str]]] = []

    def command(_task: Path, folder: Path, overrides: list[str]) -> list[str]:
        given.append((folder.name, overrides))
        return [sys.executable, "-c", WRITE]

    monkeypatch.setattr(learning, "training_command", command)
    result = tmp_path / "result.json"
    words = ["--modes", "wait", "flag", "--steps", "12", "--json", str(result), "--out", str(tmp_path)]
    words += ["--inputs", str(tmp_path)]
    learning.main([*words, "--seeds", "3"])
    learning.main([*words, "--seeds", "3", "4", "--add", str(result)])
    assert [name for name, _ in given] == ["wait-3", "flag-3", "wait-4", "flag-4"]
    assert [set(words) >= {"data.seed=3", "trainer.total_training_steps=12"} for _, words in given[:2]] == [True, True]
    rows = {(row["mode"], row["seed"]): row for row in read_result(result)["summary"]}
    assert set(rows) == {("wait", 3), ("flag", 3), ("wait", 4), ("flag", 4)}
    assert all(row["same_learning_rate"] and row["time_ratio"] == 1.0 for row in rows.values())
    assert all(row["generation, s a step"] == 2.0 for row in rows.values())
    assert (rows["flag", 4]["reward_common"], rows["flag", 4]["reward_last"]) == (
        round(6.5 / 12, 4),
        round(7.5 / 12, 4),
    )


def test_a_job_without_its_seed_s_base_is_compared_with_nothing():
    other = job("reuse_kv_3", [0.5] * 20, 1.0) | {"seed": 1}
    first, second = learning.summarise([job("sync", [0.5] * 20, 2.0), other])["summary"]
    assert first["time_ratio"] == 1.0
    assert (second["time_ratio"], second["s_to_level"]) == (None, None)


def test_a_mode_of_the_other_task_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        learning.main(["--task", "smollm2", "--modes", "reorder", "--dry-run"])
    assert "--modes ['reorder']: choose from ['sync', " in capsys.readouterr().err


def test_jobs_without_a_step_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(learning, "training_command", lambda *_: [sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(SystemExit, match="without a single step: .'flag-0'."):
        learning.main(["--modes", "flag", "--out", str(tmp_path), "--inputs", str(tmp_path)])
