"""The comparison of learning curves; here jobs only write the metrics of steps."""

from __future__ import annotations

import sys

import pytest

from benchmarks import learning_curves
from partial_rollout.advise.result import read_result

pytestmark = pytest.mark.slow

WRITE = """
import json, os
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    for step in range(1, 13):
        numbers = {"training/global_step": step, "actor/lr": 0.1, "critic/score/mean": step / 12, "timing_s/gen": 2.0}
        print(json.dumps({"data": numbers | {"response_length/mean": 9.0}}), file=file)
"""


def test_modes_are_compared_seed_by_seed(monkeypatch, tmp_path):
    given = []

    def command(*words):
        given.append(words)
        return [sys.executable, "-c", WRITE]

    monkeypatch.setattr(learning_curves, "training_command", command)
    places = {name: tmp_path / f"a.{name}" for name in ("task", "work", "json")}
    words = [word for name, path in places.items() for word in (f"--{name}", str(path))]
    learning_curves.main(["--modes", "wait", "partial_rollout", "--seeds", "3", "4", "--steps", "12", *words])
    result = read_result(places["json"])
    assert [(job["mode"], job["seed"]) for job in result["jobs"]] == [
        ("wait", 3), ("wait", 4), ("partial_rollout", 3), ("partial_rollout", 4),
    ]  # fmt: skip
    row = result["summary"]["partial_rollout"]
    assert row["same_steps_and_learning_rate"]
    assert row["difference_all_steps"] == [0.0, 0.0]
    assert (row["reward_to_mean"], row["gen_s_median"]) == (round(7.5 / 12, 3), 2.0)
    assert [set(words[2]) >= {"data.seed=3", "trainer.total_training_steps=12"} for words in given[:2]] == [True, True]


def test_a_comparison_goes_on_with_the_jobs_that_it_lacks(monkeypatch, tmp_path):
    given = []

    def command(_task, folder, *_):
        given.append(folder.name)
        return [sys.executable, "-c", WRITE]

    monkeypatch.setattr(learning_curves, "training_command", command)
    places = {name: tmp_path / f"a.{name}" for name in ("task", "work", "json")}
    words = [word for name, path in places.items() for word in (f"--{name}", str(path))]
    words += ["--modes", "sync", "flag", "--steps", "12", "--resume"]
    learning_curves.main([*words, "--seeds", "0"])
    learning_curves.main([*words, "--seeds", "0", "1"])
    assert given == ["sync-0", "flag-0", "sync-1", "flag-1"]
    assert read_result(places["json"])["summary"]["flag"]["seeds"] == [0, 1]
