"""The metrics `partial_rollout/...` of a training step: its batch (staleness, resumption) and the prompt queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partial_rollout.core.resume import kv_lags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from partial_rollout.types import FinishedGroup, QueueStatistics, TrajectorySummary

PREFIX = "partial_rollout"
OLDEST_CLASS = 5
"""Tokens of this age and above share the last class of the histogram; five are enough to see a shift."""


CURVES = {
    "reward": "critic/score/mean",
    "step_seconds": "timing_s/step",
    "generation_seconds": "timing_s/gen",
    "tokens_per_second_and_gpu": "perf/throughput",
    "slots_in_use": f"{PREFIX}/slot_utilisation",
    "kv_in_use": f"{PREFIX}/kv_usage",
    "staleness_steps": f"{PREFIX}/staleness_steps/mean",
    "tokens_computed_again": f"{PREFIX}/reprefilled_tokens",
    "response_tokens": "response_length/mean",
    "prompts_pending": f"{PREFIX}/queue/pending",
}
"""The ten curves to look at first, each with the metric that it repeats; the page and the report draw the same."""
FIRST = f"0_{PREFIX}"
"""Group of these curves. TensorBoard and W&B sort groups by name, and verl alone has some twenty."""


def curves(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The curves of a step, for verl's loggers.

    >>> curves({"timing_s/step": 8.0, "actor/lr": 1e-6})
    {'0_partial_rollout/step_seconds': 8.0}
    """
    found = {f"{FIRST}/{name}": metrics.get(metric) for name, metric in CURVES.items()}
    return {name: value for name, value in found.items() if value is not None}


def group_metrics(groups: Sequence[FinishedGroup], *, trained_version: int) -> dict[str, float]:
    """Metrics of one batch.

    The staleness of a token is `trained_version` (the weights that this batch updates) minus the weight version that
    sampled the token. The staleness of a trajectory, in `staleness_steps`, is that of its oldest token.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    stale_steps = [max(0, trained_version - trajectory.min_version) for trajectory in trajectories]
    stale_tokens, num_tokens = _stale_tokens(trajectories, trained_version)
    histogram = _staleness_histogram(trajectories, trained_version)
    lags = [lag for trajectory in trajectories for lag in kv_lags(trajectory.version_spans, trajectory.context_spans)]
    resumed = sum(trajectory.num_interruptions > 0 for trajectory in trajectories)
    return {
        f"{PREFIX}/deferrals/mean": sum(group.num_deferrals for group in groups) / len(groups),
        f"{PREFIX}/deferrals/max": max(group.num_deferrals for group in groups),
        f"{PREFIX}/trajectories": len(trajectories),
        f"{PREFIX}/resumed_trajectories": resumed,
        f"{PREFIX}/resumed_share": resumed / len(trajectories),
        f"{PREFIX}/interruptions": sum(trajectory.num_interruptions for trajectory in trajectories),
        f"{PREFIX}/reprefilled_tokens": sum(trajectory.num_reprefilled_tokens for trajectory in trajectories),
        f"{PREFIX}/staleness_steps/mean": sum(stale_steps) / len(stale_steps),
        f"{PREFIX}/staleness_steps/max": max(stale_steps),
        f"{PREFIX}/stale_tokens": stale_tokens,
        f"{PREFIX}/stale_token_share": stale_tokens / max(num_tokens, 1),
        f"{PREFIX}/old_kv_token_share": sum(count for lag, count in lags if lag > 0) / max(num_tokens, 1),
        f"{PREFIX}/old_kv_steps/max": max((lag for lag, _ in lags), default=0),
        f"{PREFIX}/response_tokens": num_tokens,
        **{f"{PREFIX}/staleness_tokens/{label}": count for label, count in histogram.items()},
    }


def queue_metrics(queue: QueueStatistics) -> dict[str, float]:
    """Prompts by state at the end of a step, and the counts of the whole run: admitted, taken, dropped by reason."""
    names = (
        "pending",
        "ongoing",
        "deferred",
        "done",
        "taken",
        "admitted",
        "num_dropped",
        "failed_attempts",
        "restarted",
    )
    return {
        **{f"{PREFIX}/queue/{name}": getattr(queue, name) for name in names},
        **{f"{PREFIX}/dropped/{reason}": count for reason, count in queue.dropped.items()},
    }


def numbers(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics of a step that are numbers, as Python floats; verl has some of them as NumPy or torch scalars."""
    found: dict[str, float | None] = {}
    for name, value in metrics.items():
        if hasattr(value, "item"):
            try:
                value = value.item()
            except (TypeError, ValueError, RuntimeError):  # more than one number
                continue
        if isinstance(value, int | float):
            found[name] = int(value) if isinstance(value, bool) else value
    return found


def _staleness_histogram(trajectories: Sequence[TrajectorySummary], trained_version: int) -> dict[str, int]:
    """Tokens by age in weight versions; the last class is open."""
    labels = [*map(str, range(OLDEST_CLASS)), f"{OLDEST_CLASS}+"]
    counts = dict.fromkeys(labels, 0)
    for span in (span for trajectory in trajectories for span in trajectory.version_spans):
        age = max(0, trained_version - span.version)  # a negative index would count from the end
        counts[labels[min(age, OLDEST_CLASS)]] += span.num_tokens
    return counts


def _stale_tokens(trajectories: Sequence[TrajectorySummary], trained_version: int) -> tuple[int, int]:
    spans = [span for trajectory in trajectories for span in trajectory.version_spans]
    stale = sum(span.num_tokens for span in spans if span.version < trained_version)
    return stale, sum(span.num_tokens for span in spans)
