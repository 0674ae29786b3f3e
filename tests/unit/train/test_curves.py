"""The ten curves in verl's loggers: one group that sorts first, read back from files of TensorBoard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from verl.trainer.ppo.v1 import PPOTrainer
from verl.utils.tracking import Tracking

from partial_rollout.observability.report import CHARTS
from partial_rollout.train.metrics import CURVES, FIRST
from partial_rollout.types import QueueStatistics
from tests.unit.train.support import bare_trainer

if TYPE_CHECKING:
    from pathlib import Path

MEASURED = {metric: float(number) for number, metric in enumerate(CURVES.values(), 1)}


def step_of(monkeypatch: pytest.MonkeyPatch, measured: dict[str, float]) -> tuple[dict[str, Any], list[Any]]:
    """The metrics that verl would log of a step in which it measured these, and the events."""
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda self, batch, metrics, *_: metrics.update(measured))
    trainer = bare_trainer()
    trainer.manager = SimpleNamespace(statistics=SimpleNamespace(remote=lambda: QueueStatistics(9, 10, 0, 0, 0)))
    trainer._ask = lambda answer: answer
    trainer._round_kind, trainer.total_training_steps = "open", 9
    trainer._uncorrected = SimpleNamespace(look=lambda *_: None)
    events: list[Any] = []
    trainer._events = SimpleNamespace(write=events.append)
    trainer._ray_metrics = SimpleNamespace(update=lambda shown: None)
    metrics: dict[str, Any] = {}
    trainer._compute_metrics([], metrics, {"drain": 0.1, "resume": 0.1}, 3, 0)
    return metrics, events


def test_tensorboard_has_ten_curves_in_a_group_that_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics, events = step_of(monkeypatch, MEASURED)
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    tracking = Tracking("project", "run", ["tensorboard"])
    tracking.log(metrics, step=3)
    tracking.finish()
    read = EventAccumulator(str(tmp_path)).Reload()
    tags = sorted(read.Tags()["scalars"])
    assert [tag.partition("/")[0] for tag in tags[:11]] == [*[FIRST] * 10, "critic"]
    for name, metric in CURVES.items():
        [curve], [original] = read.Scalars(f"{FIRST}/{name}"), read.Scalars(metric)
        assert (curve.step, curve.value) == (3, original.value)
    assert not any(name.startswith(FIRST) for name in events[0].metrics)


def test_a_curve_whose_metric_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {name: value for name, value in MEASURED.items() if name != "perf/throughput"}
    metrics, _ = step_of(monkeypatch, measured)
    assert sum(name.startswith(FIRST) for name in metrics) == 9


def test_the_curves_are_the_charts_of_the_page() -> None:
    assert set(CURVES.values()) == set(CHARTS)
