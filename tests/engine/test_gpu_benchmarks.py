"""The GPU measurements as a dry run: the same command, parts and files with a tiny model on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

MODES = ("sync", "partial_keep_kv:2", "partial_abort_adaptive", "uninterrupted", "sync@uniform")
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def result(repository, tmp_path_factory):
    """What one run of all parts has stored."""
    out = tmp_path_factory.mktemp("gpu")
    words = [sys.executable, "-m", "benchmarks.gpu.all", "--shape", "tiny", "--out", str(out), "--modes", *MODES]
    words += ["--rounds", "1", "--steps", "1", "--budget-s", str(TIMEOUT_S)]
    run = subprocess.run(
        words, cwd=repository, env=os.environ | {"PYTHONPATH": str(repository)}, timeout=TIMEOUT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:]
    return json.loads((out / "result.json").read_text()) | {"table": (out / "table.md").read_text()}


def test_every_mode_ran_to_its_end_and_has_a_row(result):
    assert [block["ended"] for block in result["blocks"]] == ["done"] * len(MODES)
    rows = result["summary"]["long_tail"]
    assert list(rows) == ["sync", "partial_keep_kv", "partial_abort_adaptive", "uninterrupted"]
    assert all(row["useful_tokens_per_s"] > 0 and row["time_ratio"] > 0 for row in rows.values())
    assert list(result["summary"]["uniform"]) == ["sync"]
    assert (result["table"].count("| sync |"), result["table"].count("| partial_keep_kv |")) == (2, 1)


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
    assert [row["mode"] for row in result["curve"]["interruption"]] == ["abort", "reuse_kv", "keep", "keep_kv"]
    reprefilled = {row["mode"]: row["reprefilled_tokens"] for row in result["curve"]["interruption"]}
    assert min(reprefilled["abort"], reprefilled["keep"]) > reprefilled["reuse_kv"] > reprefilled["keep_kv"] == 0
