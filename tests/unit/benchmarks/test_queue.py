"""Rows of the queue's benchmark that need no Ray: the log of rollouts, and many replicas in virtual time."""

from __future__ import annotations

import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("verl")

from benchmarks import bench_queue

if TYPE_CHECKING:
    from pathlib import Path


def measured(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> dict[str, Any]:
    """What the command has stored."""
    path = folder / "result.json"
    monkeypatch.setattr(sys, "argv", ["bench_queue", *words, "--json", str(path)])
    bench_queue.main()
    return json.loads(path.read_text())


def test_steps_with_and_without_the_log_alternate_and_those_with_it_are_replayed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["--rows", "log", "--steps", "2", "--tokens", "8", "--pause-s", "0", "--folder", str(tmp_path)]
    found = measured(monkeypatch, tmp_path, *words)["log"]
    assert found["steps_replayed"] == 2
    assert found["loop_ms"].keys() == found["cpu_ms"].keys() == {"on", "off"}
    assert 0 < found["mb_a_step"] < 1


def test_all_prompts_are_trained_on_many_replicas_and_the_queue_adds_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["--rows", "replicas", "--replicas", "4", "8", "--replica-prompts", "128", "--slots", "16"]
    rows = measured(monkeypatch, tmp_path, *words)["replicas"]
    assert [(row["replicas"], row["filtered"]) for row in rows] == list(itertools.product((4, 8), (0.0, 0.3)))
    assert all(row["conserved"] and 0 < row["idle_share"] < 1 for row in rows)
    assert [row["prompts_trained"] >= (64, 128)[row["replicas"] == 8] for row in rows] == [True] * 4
    assert [row["prompts_dropped"] > 0 for row in rows] == [False, True, False, True]
