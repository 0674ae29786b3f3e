"""Rows of the queue's benchmark that need no Ray: the log of rollouts, and many replicas in virtual time."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("verl")

from benchmarks import bench_queue, virtual_replicas
from partial_rollout.advise.scheduler import Group, Mode, Rollout, Speed
from partial_rollout.advise.workload import Workload, lengths

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


def advised(batch: int, slots: int, num_steps: int) -> tuple[list[dict[str, Any]], float]:
    """Steps of the scheduler of `advise`, and its idle share: one worker, a token time that no load changes."""
    draw = random.Random(0)
    pool: list[int] = lengths(replace(virtual_replicas.POOL, seed=0), virtual_replicas.POOL_SIZE)[:, 0].tolist()
    load = Workload(batch=batch, group=slots // batch)
    groups = (Group([draw.choice(pool) for _ in range(load.group)]) for _ in itertools.count())
    speed = Speed(0.02, 0.0, 0.0, math.inf, 0.0, sent_per_s=math.inf)
    rollout = Rollout(Mode("", slots, 3.0), speed, load, prompt_tokens=0, prompts=groups)
    steps = [rollout.step() for _ in range(num_steps)]
    return steps, 1 - rollout.slot_s / (rollout.now_s * slots)


def test_the_scheduler_of_advise_does_what_the_production_manager_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Over 200 steps with the same lengths batches have the same age, and slots are as busy, but for a tick."""
    monkeypatch.setattr(virtual_replicas, "TICK_REPLICA_S", 0.1)
    words = ["--rows", "replicas", "--replicas", "1", "--replica-prompts", "1600", "--slots", "64", "--filtered", "0"]
    (row, *_) = measured(monkeypatch, tmp_path, *words)["replicas"]
    steps, idle_share = advised(row["batch"], row["slots"], row["steps"])
    assert row["prompts_trained"] == 1600
    assert row["staleness_mean"] == round(statistics.fmean(step["staleness_mean"] for step in steps), 2)
    assert row["staleness_max"] == max(step["staleness_max"] for step in steps)
    assert abs(row["idle_share"] - idle_share) < 0.003
