"""Benchmarks in their shortest form: the same commands, parts and files with a tiny model on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from partial_rollout.advise.result import read_result
from partial_rollout.run.quickstart.make_task import TaskParameters, make_task
from tests import preloaded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.engine

TIMEOUT_S = 600
ORDERS = ("file", "shuffled")


@pytest.fixture
def start(repository: Path, nursery: Path) -> Callable[..., None]:
    """Runs a module with its command line, as a fork of the nursery; with `starts_ray` its workers are forks only."""

    def run(module: str, *words: str, starts_ray: bool = False) -> None:
        plain = [preloaded.client(nursery), "-m", module, *words]
        done = subprocess.run(
            plain if starts_ray else preloaded.module(nursery, module, *words), cwd=repository,
            env=os.environ | preloaded.environment_of_jobs(nursery) | {"PYTHONPATH": str(repository)},
            timeout=TIMEOUT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:]

    return run


def test_a_whole_job_is_measured(start, tmp_path):
    words = ["--shape", "tiny", "--modes", "partial_rollout", "--steps", "4", "--budget-s", str(TIMEOUT_S)]
    start("benchmarks.jobs", *words, "--out", str(tmp_path))
    result = read_result(tmp_path / "jobs.json")
    (job,) = result["jobs"]
    assert (job["code"], len(job["first_steps"]), len(job["steps"])) == (0, 2, 2)
    assert job["samples"]
    first, load = job["first_steps"][0], result["workload"]
    # The primer's responses have two tokens each, whoever generates them.
    each = result["engine"]["prompt_tokens"] + 2
    assert first["perf/total_num_tokens"] == each * load["batch"] * load["group"]
    assert "| partial_rollout | 2 |" in (tmp_path / "table.md").read_text()


def test_whole_jobs_are_compared_by_what_they_learn(start, tmp_path):
    """A step of the quickstart, on a model that has learned nothing."""
    make_task(tmp_path / "task", TaskParameters(num_train=64, num_val=8, warm_start_steps=1))
    words = ["--modes", "flag", "--steps", "1", "--inputs", str(tmp_path / "task"), "--out", str(tmp_path)]
    start("benchmarks.learning", *words, "--json", str(tmp_path / "result.json"))
    (row,) = read_result(tmp_path / "result.json")["summary"]
    assert (row["mode"], row["seed"], row["steps"], row["time_ratio"]) == ("flag", 0, 1, 1.0)
    assert 0 <= row["reward_last"] <= 1


def test_a_latency_curve_is_measured_and_predicts(start, tmp_path):
    path = tmp_path / "curve.json"
    start("partial_rollout.advise.measure", "--shape", "tiny", "--json", str(path))
    curve = json.loads(path.read_text())
    assert [cell["concurrency"] for cell in curve["curve"]["cell"]] == [8, 2]
    assert all(cell["decode_ms"] > 0 and cell["prefill_tokens_per_s"] > 0 for cell in curve["curve"]["cell"])
    (interruption,) = curve["curve"]["interruption"]
    assert interruption["drain_ms"] > 0
    assert interruption["rest_tokens"] > 0
    start("partial_rollout.advise", str(path), "--traces", "uniform", "--json", str(tmp_path / "out.json"))
    rows = json.loads((tmp_path / "out.json").read_text())["traces"]["uniform"]
    assert rows["sync"]["time_ratio"] == 1.0


def test_the_weight_channel_is_measured_in_all_steps(start, tmp_path):
    """On a CPU, with shared memory: equal tensors, and a rate for each mode."""
    path = tmp_path / "weights.json"
    start("benchmarks.bench_weights", "--dry-run", "--repeats", "2", "--json", str(path))
    found = json.loads(path.read_text())
    assert all(found["equal"][order]["in_order"] and not found["equal"][order]["different"] for order in ORDERS)
    assert all(row["channel"]["gb_per_s"] > 0 and row["verl"]["gb_per_s"] > 0 for row in found["speed"])
    assert found["versions"]["torch"]


def test_the_queue_is_measured_through_its_actor(start, tmp_path):
    path = tmp_path / "queue.json"
    words = ["--prompts", "200", "--batch", "8", "--take", "16", "--seconds", "1"]
    words += ["--rows", "single", "batched", "events"]  # the others start in tests/unit/benchmarks
    start("benchmarks.bench_queue", *words, "--json", str(path), starts_ray=True)
    found = json.loads(path.read_text())
    assert all(found[name]["transitions_per_s"] > 0 for name in ("single", "batched"))
    assert all(found[name]["conserved"] for name in ("single", "batched"))
    assert 0 < found["events"]["cpu_percent_of_step"] < 1


def test_every_way_to_pack_is_measured(start, tmp_path):
    sizes = ["--per-rank=4", "--per-row=2", "--token-budget=256", "--batches=1", "--repeats=1"]
    path = tmp_path / "result.json"
    start("benchmarks.bench_packing_wall", "--shape=tiny", "--shrink=32", "--fsdp2", *sizes, f"--json={path}")
    result = json.loads(path.read_text())
    assert (result["ended"], result["whole_repeats"]) == ("done", {"packed": 1, "padded": 1})
    assert result["training"]["gradient_checkpointing"]
    assert set(result["packed"]) == {"strided", "verl", "global"}
    assert set(result["padded"]) == {"strided", "verl", "global (by length)"}
    for part in ("packed", "padded"):
        assert result[part]["strided"]["ratio_to_strided"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}
        assert result[part]["strided"]["tokens_per_s"]["median"] > 0
    rows = [json.loads(line) for line in (tmp_path / "result.rows.jsonl").read_text().splitlines()]
    assert [(row["part"], row["repeat"], set(row["methods"])) for row in rows] == [
        (part, number, set(result[part])) for part in ("packed", "padded") for number in (0, 1)
    ]


def test_the_price_of_drafts_is_measured(start, tmp_path):
    """An engine that drafts as it is told while it runs."""
    path = tmp_path / "prices.json"
    start("partial_rollout.advise.drafts", "--shape", "tiny", "--engines", "draft_3", "--json", str(path))
    found = json.loads(path.read_text())
    assert not found["failed"]
    assert not found["engines"]["draft_3"]["asynchronous"]
    rows = [(row["engine"], row["requests"], row["drafts"]) for row in found["rows"]]
    plans = [[0, 0], [3, 3], [0, 3]]
    assert rows == [("draft_3", number, plan) for number in (4, 1) for plan in plans]
    assert all(row["step_ms"] > 0 for row in found["rows"])
    without = [row["tokens_a_step"] for row in found["rows"] if row["drafts"] == [0, 0]]
    assert without == [1.0] * 2
