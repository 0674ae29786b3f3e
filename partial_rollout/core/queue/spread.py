"""DAPO's dynamic sampling (arXiv:2503.14476): whether the trajectories of a group differ in what they were worth. Pure.

Where all trajectories of a group have the same metric, their advantages are zero and training learns nothing from them.
verl's `algorithm.filter_groups` therefore drops such a group and samples another prompt in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.types import TrajectorySummary

NUM_LANES = 8
BLOCK = 128


def shared_metric(trajectories: Sequence[TrajectorySummary]) -> float | None:
    """The metric that all `trajectories` of a group have in common; None if the group is to be trained.

    A group is trained if its metrics differ, if it has one trajectory only, and where groups are not filtered: then its
    trajectories have no metric.

    >>> from partial_rollout.types import TrajectorySummary
    >>> def group(*metrics):
    ...     return [TrajectorySummary(f"a_{i}_0", 3, 5, 0, 0, metric=metric) for i, metric in enumerate(metrics)]
    >>> shared_metric(group(1.0, 1.0)), shared_metric(group(1.0, 0.0)), shared_metric(group(1.0))
    (1.0, None, None)
    """
    metrics = [trajectory.metric for trajectory in trajectories if trajectory.metric is not None]
    if len(metrics) < 2 or len(metrics) < len(trajectories):
        return None
    # verl asks whether NumPy's standard deviation is zero. So does this, rounding errors included: three times 0.1 has
    # one of 1e-17, and verl trains it.
    mean = _sum(metrics) / len(metrics)
    variance = _sum([(metric - mean) * (metric - mean) for metric in metrics]) / len(metrics)
    return metrics[0] if variance == 0.0 else None


def _sum(values: Sequence[float]) -> float:
    """The sum with NumPy's rounding: it adds up eight lanes in blocks of at most 128 values."""
    num = len(values)
    if num > BLOCK:
        half = num // 2 - num // 2 % NUM_LANES
        return _sum(values[:half]) + _sum(values[half:])
    whole = num - num % NUM_LANES
    total = 0.0
    if whole:
        a, b, c, d, e, f, g, h = (_in_order(values[lane:whole:NUM_LANES]) for lane in range(NUM_LANES))
        total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for value in values[whole:]:
        total += value
    return total


def _in_order(values: Sequence[float]) -> float:
    total = values[0]
    for value in values[1:]:
        total += value
    return total
