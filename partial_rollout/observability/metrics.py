"""A run as Ray metrics, for the Ray dashboard and for a Prometheus that reads Ray's ports.

Names follow Prometheus: a unit at the end, and counters, to which Ray adds `_total`; Ray puts `ray_` before all. Each
metric has the label `run`. The prompt manager exports the queue, the trainer its steps.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ray.util.metrics import Counter, Gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from partial_rollout.types import ManagerStatus

PREFIX = "partial_rollout"
RUN = "run"
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
STEP_COUNTERS = {
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
    """Makes metrics that all have the run's label."""

    def __init__(self, run: str) -> None:
        self._run = run

    def gauge(self, name: str, description: str, *tags: str) -> Gauge:
        gauge = Gauge(f"{PREFIX}_{name}", description, (*tags, RUN))
        gauge.set_default_tags({RUN: self._run})
        return gauge

    def counter(self, name: str, description: str, *tags: str) -> _Advancing:
        counter = Counter(f"{PREFIX}_{name}", description, (*tags, RUN))
        counter.set_default_tags({RUN: self._run})
        return _Advancing(counter)


class _Advancing:
    """A counter that follows numbers which only grow, one for each set of tags."""

    def __init__(self, counter: Counter) -> None:
        self._counter, self._seen = counter, dict[tuple[str, ...], float]()

    def follow(self, value: float, tags: dict[str, str] | None = None) -> None:
        """Advance to `value`."""
        key = tuple((tags or {}).values())
        if value > self._seen.get(key, 0.0):
            self._counter.inc(value - self._seen.get(key, 0.0), tags or {})
            self._seen[key] = value

    def add(self, value: float) -> None:
        """Advance by `value`."""
        if value > 0:
            self._counter.inc(value)


class ManagerMetrics:
    """Gauges and counters of one prompt manager. Made in its process, to which Ray metrics belong."""

    def __init__(self, run: str = "") -> None:
        """`run` is the label of all of them."""
        make = _Exporter(run)
        self._prompts = make.gauge("prompts", "Prompts in the queue, by state.", "state")
        self._slots = make.gauge("slots", "Trajectory slots of all workers: taken (in_use) and total.", "kind")
        self._parked = make.gauge("parked_requests", "Requests that wait at a closed gate.")
        self._oldest = make.gauge("oldest_ongoing_seconds", "Seconds since the oldest claim that is not finished.")
        self._step = make.gauge("step", "Training step that is under way.")
        self._version = make.gauge("weight_version", "Weight version that the engines have.")
        self._gate = make.gauge("gate_open", "1 while the gates are open, 0 while they are closed.")
        self._dropped = make.counter("dropped_prompts", "Prompts dropped, by reason.", "reason")
        self._admitted = make.counter("admitted_prompts", "Prompts admitted, restored ones included.")
        self._taken = make.counter("taken_prompts", "Prompts taken for training, restored ones included.")
        self._failed = make.counter("failed_attempts", "Attempts that failed and were tried again.")
        self._restarted = make.counter("restarted_attempts", "Attempts given back because their tokens were too old.")

    def update(self, status: ManagerStatus) -> None:
        """Set every gauge to `status`, and advance the counters to it."""
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
            self._dropped.follow(count, {"reason": reason})
        self._admitted.follow(queue.admitted)
        self._taken.follow(queue.taken)
        self._failed.follow(queue.failed_attempts)
        self._restarted.follow(queue.restarted)


class TrainerMetrics:
    """Gauges and counters of the steps. Made in the trainer's process."""

    def __init__(self, run: str, clock: Callable[[], float] = time.time) -> None:
        """`run` is the label of all of them."""
        make = _Exporter(run)
        self._clock = clock
        self._gauges = {name: make.gauge(name, text) for name, (_, text) in STEP_GAUGES.items()}
        self._counters = {name: make.counter(name, text) for name, (_, text) in STEP_COUNTERS.items()}
        self._steps = make.counter("steps", "Training steps that have ended.")
        self._last = make.gauge("last_step_timestamp_seconds", "When the last step ended, in seconds since 1970.")

    def update(self, metrics: Mapping[str, float | None]) -> None:
        """A step has ended with these metrics; what a step does not have stays as it was."""
        for name, (source, _) in STEP_GAUGES.items():
            if (value := metrics.get(source)) is not None:
                self._gauges[name].set(value)
        for name, (source, _) in STEP_COUNTERS.items():
            if (value := metrics.get(source)) is not None:
                self._counters[name].add(value)
        self._steps.add(1)
        self._last.set(self._clock())
