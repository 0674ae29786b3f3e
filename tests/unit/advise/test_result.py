"""A stored result: a short summary, and its long lists beside it, compressed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from partial_rollout.advise.result import circumstances, raw_path, read_result, store

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"
MOST_BYTES = 20_000


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.stem)
def test_a_summary_is_short(path):
    assert path.stat().st_size <= MOST_BYTES


def test_no_raw_file_is_without_a_summary():
    raw = {path.name.removesuffix(".raw.json.gz") for path in RESULTS.rglob("*.gz")}
    assert raw <= {path.stem for path in RESULTS.rglob("*.json")}


def test_paths_among_the_options_are_stored_by_their_names(tmp_path):
    options = argparse.Namespace(curve=tmp_path / "c.json", prices=[tmp_path / "a.json", tmp_path / "b.json"], steps=3)
    assert circumstances(options)["options"] == {"curve": "c.json", "prices": ["a.json", "b.json"], "steps": 3}


def test_what_is_stored_is_read_back_as_one(tmp_path):
    path = tmp_path / "new" / "result.json"
    result = {"options": {"seed": 0}, "summary": {"sync": 1.5}, "jobs": [{"steps": list(range(100))}], "none": None}
    for _ in range(2):
        store(result, path, raw=["jobs"])
        assert read_result(path) == result
    assert set(json.loads(path.read_text())) == {"options", "summary", "none"}
    assert sorted(path.parent.iterdir()) == sorted([path, raw_path(path)])


def test_a_result_without_long_lists_is_one_file(tmp_path):
    store({"a": [1, 2], "b": ["x" * 100, "y" * 100]}, tmp_path / "result.json")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert (tmp_path / "result.json").read_text().splitlines()[1] == '  "a": [1, 2],'
