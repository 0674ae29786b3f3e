"""Every number of the manager's status reaches a Ray metric, under a name that does not change."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from partial_rollout.observability import metrics
from partial_rollout.types import ManagerStatus, QueueStatistics, WorkerStatus

Values = dict[tuple[str, ...], float]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Values:
    """What Ray would export: (metric, tag values...) to value."""
    values: Values = defaultdict(float)

    class Metric:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...] = ()) -> None:
            self.name = name

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            values[(self.name, *(tags or {}).values())] = value

        def inc(self, value: float) -> None:
            values[(self.name,)] += value

    for name in ("Gauge", "Counter"):
        monkeypatch.setattr(metrics, name, Metric)
    return values


def status(**queue: Any) -> ManagerStatus:
    numbers = {
        "admitted": 9,
        "pending": 1,
        "ongoing": 2,
        "deferred": 4,
        "done": 3,
        "taken": 2,
        "dropped": {"prompt_too_long": 1},
    }
    workers = {"w0": WorkerStatus(inflight_trajectories=5, slot_budget=8, requests_in_flight=7)}
    return ManagerStatus(queue=QueueStatistics(**{**numbers, **queue}), capacity=16, workers=workers)


def test_every_queue_is_exported(exported: Values):
    metrics.ManagerMetrics().update(status())
    queues = {tags[0]: value for (name, *tags), value in exported.items() if name == "partial_rollout_prompts"}
    assert queues == {"pending": 1, "ongoing": 2, "deferred": 4, "done": 3, "taken": 2}
    assert exported["partial_rollout_dropped_prompts", "prompt_too_long"] == 1
    assert exported["partial_rollout_slots", "in_use"] == 5
    assert exported["partial_rollout_slots", "total"] == 8


def test_counters_advance_by_what_is_new(exported: Values):
    exporter = metrics.ManagerMetrics()
    exporter.update(status())
    exporter.update(status(admitted=12, taken=4))
    assert exported["partial_rollout_admitted_prompts",] == 12
    assert exported["partial_rollout_taken_prompts",] == 4
