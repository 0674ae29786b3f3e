"""The GPU measurements as a dry run: the same command, parts and files with a tiny model on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.gpu.reload import Case, compare

pytestmark = pytest.mark.engine

MODES = ("sync", "partial_keep_kv:2", "partial_abort_adaptive", "uninterrupted", "sync@uniform")
TIMEOUT_S = 600
JOBS = ("--jobs", "--modes", "partial_rollout", "--steps", "4", "--budget-s", "400")
ORDERS = ("file", "shuffled")


def measure(repository, module: str, *words: str, timeout_s: float = TIMEOUT_S) -> None:
    """Run a module of benchmarks.gpu."""
    run = subprocess.run(
        [sys.executable, "-m", f"benchmarks.gpu.{module}", *words], cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository)}, timeout=timeout_s,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:]


@pytest.fixture(scope="module")
def result(repository, tmp_path_factory):
    """What one run of all parts has stored."""
    out = tmp_path_factory.mktemp("gpu")
    words = ["--shape", "tiny", "--out", str(out), "--modes", *MODES, "--rounds", "1", "--steps", "1"]
    measure(repository, "all", *words, "--budget-s", str(TIMEOUT_S), *JOBS, timeout_s=2 * TIMEOUT_S)
    whole = {"jobs": json.loads((out / "jobs/jobs.json").read_text()), "rates": (out / "jobs/table.md").read_text()}
    return json.loads((out / "result.json").read_text()) | {"table": (out / "table.md").read_text()} | whole


def test_every_mode_ran_to_its_end_and_has_a_row(result):
    assert [block["ended"] for block in result["blocks"]] == ["done"] * len(MODES)
    rows = result["summary"]["long_tail"]
    assert list(rows) == ["sync", "partial_keep_kv", "partial_abort_adaptive", "uninterrupted"]
    assert all(row["useful_tokens_per_s"] > 0 and row["time_ratio"] > 0 for row in rows.values())
    assert list(result["summary"]["uniform"]) == ["sync"]
    assert (result["table"].count("| sync |"), result["table"].count("| partial_keep_kv |")) == (2, 1)


def test_whole_jobs_followed_with_the_same_load(result):
    (job,) = result["jobs"]["jobs"]
    assert (job["code"], len(job["first_steps"]), len(job["steps"])) == (0, 2, 2)
    loads = [{**load, "steps": 0, "skip": 0} for load in (result["jobs"]["workload"], result["workloads"]["long_tail"])]
    assert loads[0] == loads[1]
    assert job["samples"]
    assert "| partial_rollout | 2 |" in result["rates"]


def test_steps_are_those_of_the_policies(result):
    sync, kept, _, bound, uniform = result["blocks"]
    assert all(step["interrupted"] == 0 == step["staleness_steps/max"] for step in sync["steps"])
    assert all(step["generated_tokens"] == step["useful_tokens"] for step in sync["steps"])
    assert any(step["interrupted"] > 0 and step["drain_ms"] > 0 for step in kept["steps"])
    assert any(step["old_kv_token_share"] > 0 for step in kept["steps"])
    assert all(step["drain_ms"] == 0 for step in bound["steps"])
    assert [len(block["steps"]) for block in (sync, kept, bound)] == [2, 5, 4]
    assert uniform["steps"][1]["useful_tokens"] % result["workloads"]["uniform"]["median"] == 0


def test_every_mode_had_the_same_work(result):
    """The primer's responses have two tokens each, whoever generates them."""
    first, load = [block["steps"][0] for block in result["blocks"]], result["workloads"]["long_tail"]
    assert all(step["warmup"] for step in first)
    assert {step["useful_tokens"] for step in first} == {2 * load["batch"] * load["group"]}


def test_the_engine_was_sampled_and_measured(result):
    assert all(block["samples"] for block in result["blocks"])
    assert all(cell["decode_ms"] > 0 and cell["prefill_tokens_per_s"] > 0 for cell in result["curve"]["cell"])
    assert [row["mode"] for row in result["curve"]["interruption"]] == ["abort", "reuse_kv", "keep_kv"]
    reprefilled = {row["mode"]: row["reprefilled_tokens"] for row in result["curve"]["interruption"]}
    assert reprefilled["abort"] > reprefilled["reuse_kv"] > reprefilled["keep_kv"] == 0


def test_the_weight_channel_is_measured_in_all_steps(repository, tmp_path):
    """On a CPU, with shared memory: equal tensors, a rate for each mode, and both ends killed."""
    path = tmp_path / "weights.json"
    measure(repository, "weights", "--dry-run", "--rounds", "2", "--json", str(path))
    found = json.loads(path.read_text())
    assert all(found["equal"][order]["in_order"] and not found["equal"][order]["different"] for order in ORDERS)
    assert all(row["channel"]["gb_per_s"] > 0 and row["verl"]["gb_per_s"] > 0 for row in found["speed"])
    assert ["is gone" in end["error"] for end in found["faults"].values()] == [True, True]
    assert found["versions"]["torch"]


def test_a_reloaded_engine_is_compared_with_a_fresh_one(tmp_path):
    found = compare(Case(None, tied=False), tmp_path)
    assert found["models_differ"]
    assert found["max_difference_to_fresh"] == found["max_difference_back"] == 0.0
