"""A run as Ray metrics, for the Ray dashboard and for a Prometheus that reads Ray's ports.

Names follow Prometheus: a unit at the end, and `_total` for what only grows; Ray puts `ray_` before all. Each metric
has the label `run`. The prompt manager exports the queue, the trainer its steps.

    update ──> last values ──thread, every second──> Ray ──> the agent of the node, which Prometheus reads

The agent forgets a value that was set 20 s ago (two of the intervals in which Ray sends values), so each is given again
and again. That also brings what did not reach the agent at first. Totals are gauges, since Ray sends only what was
added to a counter: an increase that does not reach the agent is never counted.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import TYPE_CHECKING

from ray.util.metrics import Gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from partial_rollout.types import ManagerStatus

PREFIX = "partial_rollout"
RUN = "run"
INTERVAL_S = 1.0
"""Between two times that Ray is given every value; the shortest interval in which Ray itself sends values."""
CLOSE_S = 5.0
"""Longest wait for the thread, which may be giving the last values."""
STEP_GAUGES = {
    "step_seconds": ("timing_s/step", "Seconds of the last step."),
    "generation_seconds": ("timing_s/gen", "Seconds of the last step in which the trainer waited for its batch."),
    "drain_seconds": ("timing_s/drain", "Seconds from closing the gates to empty engines, last step."),
    "update_seconds": ("timing_s/update_weights", "Seconds of the last weight update."),
    "reward_mean": ("critic/score/mean", "Mean reward of the last batch."),
    "slot_usage_ratio": (f"{PREFIX}/slot_utilisation", "Requests in generation by slots at the start, last step."),
    "kv_usage_ratio": (f"{PREFIX}/kv_usage", "Share of the KV cache in use in the fullest engine, last step."),
    "staleness_steps_mean": (f"{PREFIX}/staleness_steps/mean", "Mean age of the oldest tokens of the last batch."),
    "staleness_steps_max": (f"{PREFIX}/staleness_steps/max", "Largest age of a token of the last batch."),
}
"""By name: the metric of verl's logger that it shows, and what it is."""
STEP_TOTALS = {
    "interrupted_requests": (f"{PREFIX}/interrupted", "Requests interrupted at the end of a step."),
    "reprefilled_tokens": (f"{PREFIX}/reprefilled_tokens", "Tokens computed again after interruptions."),
    "trained_tokens": ("perf/total_num_tokens", "Tokens trained, prompts included."),
    "engine_relaunches": (f"{PREFIX}/engine_relaunches", "Engines that were started again."),
}


def run_name(events: Path | None) -> str:
    """The label of a run: the name of its folder.

    >>> from pathlib import Path
    >>> run_name(Path("/outputs/partial-1/checkpoints/events")), run_name(None)
    ('partial-1', '')
    """
    names = [] if events is None else [part for part in events.parts if part not in ("events", "checkpoints")]
    return names[-1] if names else ""


class _Exporter:
    """Metrics of one process that all have the run's label; a thread gives Ray the last value of each.

    begun -> gives every second -> closed, or its process ends
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self.values: dict[tuple[str, tuple[str, ...]], tuple[Gauge, float, dict[str, str]]] = {}
        """By the name of a metric and the values of its tags."""
        self._closed = threading.Event()
        atexit.register(self.close)  # Ray is taken down after it
        self._thread = threading.Thread(target=self._give, daemon=True, name="ray metrics")
        self._thread.start()

    def metric(self, name: str, description: str, *tags: str) -> _Metric:
        gauge = Gauge(f"{PREFIX}_{name}", description, (*tags, RUN))
        gauge.set_default_tags({RUN: self._run})
        return _Metric(self, name, gauge)

    def close(self) -> None:
        """Give no value again."""
        self._closed.set()
        self._thread.join(CLOSE_S)

    def _give(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            # A list, since the process may add a metric meanwhile.
            for gauge, value, tags in list(self.values.values()):
                gauge.set(value, tags)


class _Metric:
    """One metric of an exporter."""

    def __init__(self, exporter: _Exporter, name: str, gauge: Gauge) -> None:
        self._values, self._name, self._gauge = exporter.values, name, gauge
        self._total = 0.0

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        tags = tags or {}
        self._values[self._name, tuple(tags.values())] = (self._gauge, float(value), tags)

    def add(self, value: float) -> None:
        """Let a total without tags grow."""
        self._total += value
        self.set(self._total)


class ManagerMetrics:
    """Metrics of one prompt manager. Made in its process, to which Ray metrics belong."""

    def __init__(self, run: str = "") -> None:
        """`run` is the label of all of them."""
        make = _Exporter(run)
        self._prompts = make.metric("prompts", "Prompts in the queue, by state.", "state")
        self._slots = make.metric("slots", "Trajectory slots of all workers: taken (in_use) and total.", "kind")
        self._parked = make.metric("parked_requests", "Requests that wait at a closed gate.")
        self._oldest = make.metric("oldest_ongoing_seconds", "Seconds since the oldest claim that is not finished.")
        self._step = make.metric("step", "Training step that is under way.")
        self._version = make.metric("weight_version", "Weight version that the engines have.")
        self._gate = make.metric("gate_open", "1 while the gates are open, 0 while they are closed.")
        self._dropped = make.metric("dropped_prompts_total", "Prompts dropped, by reason.", "reason")
        self._admitted = make.metric("admitted_prompts_total", "Prompts admitted, restored ones included.")
        self._taken = make.metric("taken_prompts_total", "Prompts taken for training, restored ones included.")
        self._failed = make.metric("failed_attempts_total", "Attempts that failed and were tried again.")
        self._restarted = make.metric(
            "restarted_attempts_total", "Attempts given back because their tokens were too old."
        )

    def update(self, status: ManagerStatus) -> None:
        """Set every metric to `status`."""
        queue = status.queue
        for state in ("pending", "ongoing", "deferred", "done"):
            self._prompts.set(getattr(queue, state), {"state": state})
        self._slots.set(status.slots_in_use, {"kind": "in_use"})
        self._slots.set(status.slots_total, {"kind": "total"})
        self._parked.set(status.parked_requests)
        self._oldest.set(queue.oldest_ongoing_s)
        self._step.set(status.step)
        self._version.set(status.weight_version)
        self._gate.set(status.gate == "open")
        for reason, count in queue.dropped.items():
            self._dropped.set(count, {"reason": reason})
        self._admitted.set(queue.admitted)
        self._taken.set(queue.taken)
        self._failed.set(queue.failed_attempts)
        self._restarted.set(queue.restarted)


class TrainerMetrics:
    """Metrics of the steps. Made in the trainer's process."""

    def __init__(self, run: str, clock: Callable[[], float] = time.time) -> None:
        """`run` is the label of all of them."""
        make = self._exporter = _Exporter(run)
        self._clock = clock
        self._gauges = {name: make.metric(name, text) for name, (_, text) in STEP_GAUGES.items()}
        self._totals = {name: make.metric(f"{name}_total", text) for name, (_, text) in STEP_TOTALS.items()}
        self._steps = make.metric("steps_total", "Training steps that have ended.")
        for total in (*self._totals.values(), self._steps):
            total.add(0)
        self._last = make.metric("last_step_timestamp_seconds", "When the last step ended, in seconds since 1970.")

    def close(self) -> None:
        """No step follows: Ray forgets the values, and no alert waits for a step."""
        self._exporter.close()

    def update(self, metrics: Mapping[str, float | None]) -> None:
        """A step has ended with these metrics; what a step does not have stays as it was."""
        for name, (source, _) in STEP_GAUGES.items():
            if (value := metrics.get(source)) is not None:
                self._gauges[name].set(value)
        for name, (source, _) in STEP_TOTALS.items():
            self._totals[name].add(metrics.get(source) or 0.0)
        self._steps.add(1)
        self._last.set(self._clock())
