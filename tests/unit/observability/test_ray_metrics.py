"""Every number of the manager's status and of a step reaches a Ray metric, under a name that does not change."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from partial_rollout.observability import metrics
from partial_rollout.types import ManagerStatus, QueueStatistics, WorkerStatus

WAIT_S = 60.0


class Values(dict[tuple[str, ...], float]):
    """What Ray would export once: (metric, tag values..., run) to value."""

    def __init__(self) -> None:
        self.news = threading.Condition()


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Values:
    values = Values()

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...] = ()) -> None:
            self.name, self.keys, self.default = name, tag_keys, {}

        def set_default_tags(self, tags: dict[str, str]) -> None:
            self.default = tags

        def key(self, tags: dict[str, str] | None) -> tuple[str, ...]:
            tags = self.default | (tags or {})
            assert set(tags) == set(self.keys)
            return (self.name, *(tags[key] for key in self.keys))

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            with values.news:
                values[self.key(tags)] = value
                values.news.notify_all()

    monkeypatch.setattr(metrics, "Gauge", Gauge)
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
        "failed_attempts": 3,
        "oldest_ongoing_s": 7.5,
    }
    workers = {"w0": WorkerStatus(inflight_trajectories=5, slot_budget=8, requests_in_flight=7)}
    where = {"step": 4, "weight_version": 3, "gate": "closed"}
    return ManagerStatus(queue=QueueStatistics(**{**numbers, **queue}), capacity=16, workers=workers, **where)


def test_the_status_is_exported_with_the_runs_label(exported: Values):
    metrics.ManagerMetrics("mine").update(status())
    assert {name[-1] for name in exported} == {"mine"}
    seen = {name[:-1]: value for name, value in exported.items()}
    queues = {tags[0]: value for (name, *tags), value in seen.items() if name == "partial_rollout_prompts"}
    assert queues == {"pending": 1, "ongoing": 2, "deferred": 4, "done": 3}
    assert seen["partial_rollout_dropped_prompts_total", "prompt_too_long"] == 1
    assert seen["partial_rollout_slots", "in_use"] == 5
    assert seen["partial_rollout_slots", "total"] == 8
    names = (
        "step",
        "weight_version",
        "gate_open",
        "parked_requests",
        "oldest_ongoing_seconds",
        "failed_attempts_total",
    )
    assert [seen[f"partial_rollout_{name}",] for name in names] == [4, 3, 0, 7, 7.5, 3]


def test_totals_are_those_of_the_status(exported: Values):
    exporter = metrics.ManagerMetrics()
    exporter.update(status())
    exporter.update(status(admitted=12, taken=4, dropped={"prompt_too_long": 3, "no_spread": 2}))
    assert exported["partial_rollout_admitted_prompts_total", ""] == 12
    assert exported["partial_rollout_taken_prompts_total", ""] == 4
    assert exported["partial_rollout_dropped_prompts_total", "prompt_too_long", ""] == 3
    assert exported["partial_rollout_dropped_prompts_total", "no_spread", ""] == 2


def test_steps_are_counted_and_show_their_last_values(exported: Values):
    exporter = metrics.TrainerMetrics("r", clock=lambda: 99.0)
    step = {"timing_s/step": 8.0, "timing_s/drain": 0.5, "partial_rollout/interrupted": 3.0, "critic/score/mean": None}
    exporter.update(step)
    exporter.update(step | {"timing_s/step": 6.0, "partial_rollout/engine_relaunches": 1.0})
    assert exported == {
        ("partial_rollout_step_seconds", "r"): 6.0,
        ("partial_rollout_drain_seconds", "r"): 0.5,
        ("partial_rollout_interrupted_requests_total", "r"): 6.0,
        ("partial_rollout_reprefilled_tokens_total", "r"): 0.0,
        ("partial_rollout_trained_tokens_total", "r"): 0.0,
        ("partial_rollout_engine_relaunches_total", "r"): 1.0,
        ("partial_rollout_steps_total", "r"): 2.0,
        ("partial_rollout_last_step_timestamp_seconds", "r"): 99.0,
    }


def test_every_value_is_set_again_until_the_process_ends_because_ray_exports_it_once(exported: Values):
    manager, trainer = metrics.ManagerMetrics("mine"), metrics.TrainerMetrics("mine", clock=lambda: 99.0)
    manager.update(status())
    trainer.update({"timing_s/step": 8.0})
    manager.update(status(admitted=12, oldest_ongoing_s=1.5))
    last = dict(exported)
    for _ in range(2):
        with exported.news:
            exported.clear()
            assert exported.news.wait_for(lambda: exported == last, WAIT_S), last.items() - exported.items()


def test_a_run_is_called_as_its_folder() -> None:
    assert metrics.run_name(Path("/o/quick/events")) == "quick"
    assert metrics.run_name(Path("/o/quick/checkpoints/events")) == "quick"
    assert metrics.run_name(None) == ""
