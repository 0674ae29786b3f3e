"""The one readable line of a training step, with and without partial rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

REWARD = "critic/score/mean"
GEN_SECONDS = "timing_s/gen"
STEP_SECONDS = "timing_s/step"
PREFIX = "partial_rollout"


def step_line(step: int, total: int | None, metrics: Mapping[str, float]) -> str:
    """The line of one step; a part is left out if its metric is missing, as in verl's own modes.

    >>> step_line(3, 60, {"critic/score/mean": 0.25, "timing_s/gen": 4.0})
    'step 3/60 | reward 0.250 | gen 4.0 s'
    """
    head = f"step {step}/{total}" if total else f"step {step}"
    parts = [head, *_basic(metrics), *_resumption(metrics), *_queue(metrics)]
    return " | ".join(parts)


def _basic(metrics: Mapping[str, float]) -> list[str]:
    parts = []
    if REWARD in metrics:
        parts.append(f"reward {metrics[REWARD]:.3f}")
    if GEN_SECONDS in metrics:
        parts.append(f"gen {metrics[GEN_SECONDS]:.1f} s")
    if STEP_SECONDS in metrics:
        parts.append(f"step {metrics[STEP_SECONDS]:.1f} s")
    if "perf/total_num_tokens" in metrics and metrics.get(STEP_SECONDS):
        parts.append(f"{metrics['perf/total_num_tokens'] / metrics[STEP_SECONDS]:.0f} tokens/s")
    return parts


def _resumption(metrics: Mapping[str, float]) -> list[str]:
    if f"{PREFIX}/interrupted" not in metrics:
        return []
    return [
        f"interrupted {metrics[f'{PREFIX}/interrupted']:.0f}",
        f"resumed {metrics[f'{PREFIX}/resumed_trajectories']:.0f}",
    ]


def _queue(metrics: Mapping[str, float]) -> list[str]:
    names = ("pending", "ongoing", "deferred", "done")
    if f"{PREFIX}/queue/pending" not in metrics:
        return []
    counts = {name: metrics.get(f"{PREFIX}/queue/{name}", 0.0) for name in names}
    shown = [f"{name} {count:.0f}" for name, count in counts.items() if count or name != "deferred"]
    return ["queue " + " ".join(shown)]
