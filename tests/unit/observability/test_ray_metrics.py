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
    """What Ray was given since it forgot: (metric, tag values..., run) to value."""

    def __init__(self) -> None:
        self.news = threading.Condition()

    def forget(self) -> None:
        with self.news:
            self.clear()

    def seen(self) -> dict[tuple[str, ...], float]:
        with self.news:
            return dict(self)

    def wait_for(self, expected: dict[tuple[str, ...], float]) -> None:
        with self.news:
            is_there = self.news.wait_for(lambda: expected.items() <= self.items(), WAIT_S)
            assert is_there, expected.items() - self.items()


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
    monkeypatch.setattr(metrics, "INTERVAL_S", 0.01)
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


def of(run: str, **values: float) -> dict[tuple[str, ...], float]:
    """Values of metrics without tags."""
    return {(f"partial_rollout_{name}", run): value for name, value in values.items()}


def test_the_status_is_exported_with_the_runs_label(exported: Values):
    metrics.ManagerMetrics("mine").update(status())
    numbers = {"step": 4, "weight_version": 3, "gate_open": 0, "parked_requests": 7, "oldest_ongoing_seconds": 7.5}
    totals = {"admitted_prompts_total": 9, "taken_prompts_total": 2, "failed_attempts_total": 3}
    prompts = {"pending": 1, "ongoing": 2, "deferred": 4, "done": 3}
    exported.wait_for(
        of("mine", **numbers, **totals, restarted_attempts_total=0)
        | {("partial_rollout_prompts", state, "mine"): number for state, number in prompts.items()}
        | {("partial_rollout_slots", "in_use", "mine"): 5, ("partial_rollout_slots", "total", "mine"): 8}
        | {("partial_rollout_dropped_prompts_total", "prompt_too_long", "mine"): 1}
    )
    assert {name[-1] for name in exported.seen()} == {"mine"}


def test_totals_are_those_of_the_status(exported: Values):
    exporter = metrics.ManagerMetrics()
    exporter.update(status())
    exporter.update(status(admitted=12, taken=4, dropped={"prompt_too_long": 3, "no_spread": 2}))
    dropped = {"prompt_too_long": 3, "no_spread": 2}
    exported.wait_for(
        of("", admitted_prompts_total=12, taken_prompts_total=4)
        | {("partial_rollout_dropped_prompts_total", reason, ""): number for reason, number in dropped.items()}
    )


STEP = {"timing_s/step": 8.0, "timing_s/drain": 0.5, "partial_rollout/interrupted": 3.0, "critic/score/mean": None}


def test_steps_are_counted_and_show_their_last_values(exported: Values):
    exporter = metrics.TrainerMetrics("r", clock=lambda: 99.0)
    exporter.update(STEP)
    exporter.update(STEP | {"timing_s/step": 6.0, "partial_rollout/engine_relaunches": 1.0})
    expected = of(
        "r",
        step_seconds=6.0,
        drain_seconds=0.5,
        interrupted_requests_total=6.0,
        reprefilled_tokens_total=0.0,
        trained_tokens_total=0.0,
        engine_relaunches_total=1.0,
        steps_total=2.0,
        last_step_timestamp_seconds=99.0,
    )
    exported.wait_for(expected)
    assert exported.seen().keys() == expected.keys()


def test_totals_of_steps_are_there_before_the_first_step_has_ended(exported: Values):
    metrics.TrainerMetrics("r")
    exported.wait_for(of("r", steps_total=0.0, trained_tokens_total=0.0, engine_relaunches_total=0.0))


def test_ray_is_given_every_value_again_and_again_because_it_forgets_it(exported: Values):
    exporter = metrics.TrainerMetrics("r", clock=lambda: 99.0)
    exporter.update(STEP)
    for _ in range(3):
        exported.forget()
        exported.wait_for(of("r", step_seconds=8.0, last_step_timestamp_seconds=99.0, steps_total=1.0))


def test_a_trainer_that_has_closed_its_metrics_is_forgotten(exported: Values):
    closed, other = metrics.TrainerMetrics("closed"), metrics.TrainerMetrics("other")
    exported.wait_for(of("closed", steps_total=0.0) | of("other", steps_total=0.0))
    closed.close()
    exported.forget()
    for steps in (1.0, 2.0, 3.0):
        other.update(STEP)
        exported.wait_for(of("other", steps_total=steps))
    assert {name[-1] for name in exported.seen()} == {"other"}


def test_a_run_is_called_as_its_folder() -> None:
    assert metrics.run_name(Path("/o/quick/events")) == "quick"
    assert metrics.run_name(Path("/o/quick/checkpoints/events")) == "quick"
    assert metrics.run_name(None) == ""
