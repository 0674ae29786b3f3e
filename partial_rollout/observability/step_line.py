"""The one readable line of a training step, with and without partial rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

REWARD = "critic/score/mean"
STEP_SECONDS = "timing_s/step"
NUM_TOKENS = "perf/total_num_tokens"
FILTERED = "training/filter_groups/evicted_samples"
"""verl's name: groups without spread, which were dropped."""
PREFIX = "partial_rollout"
REPLAYED = f"{PREFIX}/replayed_responses"
"""Responses of the step that are of the log of rollouts; there only where some are."""
ROLLOUT_GPUS = f"{PREFIX}/rollout_gpus"
"""GPUs of engines alone; there only where engines have GPUs of their own."""
PARTS: dict[str, tuple[str, ...]] = {
    "generation": ("timing_s/gen",),
    "log-probs": ("timing_s/old_log_prob", "timing_s/ref", "timing_s/values"),
    "update": ("timing_s/adv", "timing_s/update_critic", "timing_s/update_actor"),
    "weights": ("timing_s/update_weights", "timing_s/resume"),
    "checkpoint": ("timing_s/save_checkpoint",),
}
"""Parts of a step's seconds, by the timers of verl that they are summed from."""
SHORT_S = 0.05
"""Parts below are left out of the line."""


def seconds_by_part(metrics: Mapping[str, float]) -> dict[str, float]:
    """Where the seconds of a step went; `rest` is what no timer of `PARTS` counts.

    >>> seconds_by_part({"timing_s/step": 5.0, "timing_s/gen": 3.0, "timing_s/update_actor": 1.5})
    {'generation': 3.0, 'update': 1.5, 'rest': 0.5}
    """
    found = {name: sum(metrics.get(timer, 0.0) for timer in timers) for name, timers in PARTS.items()}
    found["rest"] = max(0.0, metrics.get(STEP_SECONDS, 0.0) - sum(found.values()))
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def step_line(step: int, total: int | None, metrics: Mapping[str, float]) -> str:
    """The line of one step; a part is left out if its metric is missing, as in verl's own modes.

    >>> step_line(3, 60, {"critic/score/mean": 0.25, "timing_s/step": 5.0, "timing_s/gen": 3.0})
    'step 3/60 | reward 0.250 | 5.0 s: generation 3.0, rest 2.0'
    """
    head = f"step {step}/{total}" if total else f"step {step}"
    return " | ".join([head, *_basic(metrics), *_rollout(metrics), *_queue(metrics)])


def _basic(metrics: Mapping[str, float]) -> list[str]:
    parts = []
    if REWARD in metrics:
        parts.append(f"reward {metrics[REWARD]:.3f}")
    if step_s := metrics.get(STEP_SECONDS):
        shown = {name: seconds for name, seconds in seconds_by_part(metrics).items() if seconds >= SHORT_S}
        # The timer of generation counts how long the trainer waits for a batch, which is the same where engines stop.
        names = {"generation": "waiting for the batch"} if metrics.get(ROLLOUT_GPUS) else {}
        listed = (f"{names.get(name, name)} {seconds:.1f}" for name, seconds in shown.items())
        parts.append(f"{step_s:.1f} s: {', '.join(listed)}")
        if NUM_TOKENS in metrics:
            parts.append(f"{metrics[NUM_TOKENS] / step_s:,.0f} tokens/s")
    return parts


def _rollout(metrics: Mapping[str, float]) -> list[str]:
    """What only our modes have: slots, staleness, tokens computed again, interruptions."""
    parts = []
    if used := slots_in_use(metrics):
        parts.append(f"{used} slots in use")
    if (stale := metrics.get(f"{PREFIX}/staleness_steps/mean")) is not None:
        parts.append(f"staleness {stale:.1f}")
    if (again := metrics.get(f"{PREFIX}/reprefilled_tokens")) is not None:
        parts.append(f"{again:,.0f} tokens computed again")
    if (interrupted := metrics.get(f"{PREFIX}/interrupted")) is not None:
        parts.append(f"interrupted {interrupted:.0f}, resumed {metrics.get(f'{PREFIX}/resumed_trajectories', 0):.0f}")
    if replayed := metrics.get(REPLAYED):
        parts.append(f"{replayed:.0f} responses from the log, not generated")
    if (filtered := metrics.get(FILTERED)) is not None:
        parts.append(f"{filtered:.0f} groups without spread")
    return parts


def slots_in_use(metrics: Mapping[str, float]) -> str:
    """How many slots generate, in the mean, and of how many: adaptive ones are told, others follow from their share.

    >>> slots_in_use({"partial_rollout/mean_running": 31.2, "partial_rollout/slot_utilisation": 0.4875})
    '31 of 64'
    >>> slots_in_use({})
    ''
    """
    running, share = metrics.get(f"{PREFIX}/mean_running"), metrics.get(f"{PREFIX}/slot_utilisation")
    if running is None:
        return ""
    slots = metrics.get(f"{PREFIX}/slots/num", running / share if share else None)
    return f"{running:.0f}" if slots is None else f"{running:.0f} of {slots:.0f}"


def _queue(metrics: Mapping[str, float]) -> list[str]:
    names = ("pending", "ongoing", "deferred", "done")
    if f"{PREFIX}/queue/pending" not in metrics:
        return []
    counts = {name: metrics.get(f"{PREFIX}/queue/{name}", 0.0) for name in names}
    shown = [f"{name} {count:.0f}" for name, count in counts.items() if count or name != "deferred"]
    return ["queue " + " ".join(shown)]
