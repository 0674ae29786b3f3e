"""Where the GPU seconds of a step went, by cause. Report, comparison, page and trace all ask here.

    one step, all GPUs:  generating | re-prefill | waiting for the longest | drain | training | updates | ... | idle

The seconds are those of the step's timers, times the number of GPUs. Generation ends with the drain. The rest of it is
divided by two numbers: the share of the slots that were in use, and the tokens that were computed again. What these
tokens cost is an estimate (`prefill_s`): nothing times a prefill alone. Verl's own modes do not say how many slots were
in use, so generating and waiting are one cause there.

Where engines have GPUs of their own, generation and training overlap: each part of the GPUs has causes of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partial_rollout.observability.step_line import NUM_TOKENS, PREFIX, ROLLOUT_GPUS, STEP_SECONDS, seconds_by_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

THROUGHPUT = "perf/throughput"
"""verl's: trained tokens for each second of each GPU."""
GENERATING, TRAINING, UNDIVIDED = "generating", "training", "generating, waiting included"
LONGEST, REPREFILL, DRAIN, UPDATES = "waiting for the longest", "re-prefill", "drain", "updates"
FOR_BATCH = "waiting for a batch"
CHECKPOINT, IDLE = "checkpoint", "idle"
CAUSES = (GENERATING, UNDIVIDED, REPREFILL, LONGEST, FOR_BATCH, DRAIN, TRAINING, CHECKPOINT, UPDATES, IDLE)
"""In the order in which they come in a step."""
MEANS = {
    GENERATING: "engines computed new tokens",
    UNDIVIDED: "engines generated; how many of their slots were empty is not known",
    REPREFILL: "engines computed the context of interrupted responses again (an estimate)",
    LONGEST: "slots were empty while engines generated: no prompt was pending, only the longest responses were left, "
    "or the KV cache was full",
    FOR_BATCH: "training GPUs had no batch, where engines have GPUs of their own",
    DRAIN: "from closing the gate until the engines were empty, or stood",
    TRAINING: "log-probs, advantages, update of the model",
    CHECKPOINT: "a checkpoint was saved",
    UPDATES: "weights were sent to the engines, and the gate was opened",
    IDLE: "what no timer counts",
}
"""For somebody who sees the causes for the first time."""
UPDATE_PASSES = 3
"""Forward passes that take as long as an update; with gradient checkpointing it is four."""
TIMED_PASS = "actor/entropy"
"""Metric of verl's pass that computes old log-probs: a step without it has had no such pass."""
LOST = frozenset({LONGEST, REPREFILL, FOR_BATCH, DRAIN, UPDATES, CHECKPOINT, IDLE})
"""Seconds in which a GPU computed nothing, or nothing new."""


def num_gpus(step: Mapping[str, float]) -> int:
    """GPUs of the job, from verl's throughput; 1 where a step does not have it.

    >>> num_gpus({"perf/total_num_tokens": 800.0, "timing_s/step": 4.0, "perf/throughput": 25.0})
    8
    """
    one = step.get(STEP_SECONDS, 0.0) * step.get(THROUGHPUT, 0.0)
    return max(1, round(step[NUM_TOKENS] / one)) if one and step.get(NUM_TOKENS) else 1


def step_causes(step: Mapping[str, float]) -> dict[str, float]:
    """Seconds of one step by cause, in the order of `CAUSES`; of one GPU, as all of them go through the same step.

    Where engines have GPUs of their own, it is the mean over all GPUs.

    >>> causes = step_causes({"timing_s/step": 9.0, "timing_s/gen": 6.0, "partial_rollout/slot_utilisation": 0.75})
    >>> causes
    {'generating': 4.5, 'waiting for the longest': 1.5, 'idle': 3.0}
    """
    parts = seconds_by_part(step)
    if gpus := step.get(ROLLOUT_GPUS):
        found = _apart(step, parts, share=gpus / num_gpus(step))
        return {cause: found[cause] for cause in CAUSES if found.get(cause, 0.0) > 0}
    drain_s = min(step.get("timing_s/drain", 0.0), parts.get("generation", 0.0))
    found = _generation(step, parts.get("generation", 0.0) - drain_s) | {
        DRAIN: drain_s,
        TRAINING: parts.get("log-probs", 0.0) + parts.get("update", 0.0),
        CHECKPOINT: parts.get("checkpoint", 0.0),
        UPDATES: parts.get("weights", 0.0),
        IDLE: parts.get("rest", 0.0),
    }
    return {cause: found[cause] for cause in CAUSES if found.get(cause, 0.0) > 0}


def _apart(step: Mapping[str, float], parts: Mapping[str, float], share: float) -> dict[str, float]:
    """Seconds of one step by cause, the mean over all GPUs: a share of them only generates, the others only train."""
    drain_s = step.get("timing_s/drain", 0.0)
    saving_s, sending_s = parts.get("checkpoint", 0.0), parts.get("weights", 0.0)
    training = {
        TRAINING: parts.get("log-probs", 0.0) + parts.get("update", 0.0),
        FOR_BATCH: parts.get("generation", 0.0),
        IDLE: max(0.0, parts.get("rest", 0.0) - drain_s),
    }
    engines = _generation(step, max(0.0, step.get(STEP_SECONDS, 0.0) - drain_s - saving_s - sending_s))
    both = {DRAIN: drain_s, CHECKPOINT: saving_s, UPDATES: sending_s}
    weighted = {cause: (1 - share) * seconds for cause, seconds in training.items()}
    return both | weighted | {cause: share * seconds for cause, seconds in engines.items()}


def _generation(step: Mapping[str, float], seconds: float) -> dict[str, float]:
    used = step.get(f"{PREFIX}/slot_utilisation")
    if used is None:
        return {UNDIVIDED: seconds}
    busy_s = seconds * min(1.0, used)
    again_s = min(busy_s, step.get(f"{PREFIX}/reprefilled_tokens", 0.0) * prefill_s(step))
    return {GENERATING: busy_s - again_s, REPREFILL: again_s, LONGEST: seconds - busy_s}


def prefill_s(step: Mapping[str, float]) -> float:
    """Seconds of a token that is computed again: those of the trainer's log-probs, a forward pass on the same GPUs.

    Where the trainer computes no old log-probs it is a third of its update.

    >>> step = {"timing_s/update_actor": 6.0, "perf/total_num_tokens": 400.0}
    >>> prefill_s(step | {"timing_s/old_log_prob": 1.0, "actor/entropy": 0.5})
    0.0025
    >>> prefill_s(step | {"timing_s/old_log_prob": 0.01})
    0.005
    """
    if not step.get(NUM_TOKENS):
        return 0.0
    is_timed = TIMED_PASS in step
    pass_s = step.get("timing_s/old_log_prob" if is_timed else "timing_s/update_actor", 0.0)
    return pass_s / (1 if is_timed else UPDATE_PASSES) / step[NUM_TOKENS]


def gpu_seconds(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums over steps and GPUs, in the order of `CAUSES`."""
    sums: dict[str, float] = {}
    for step in steps:
        gpus = num_gpus(step)
        for cause, seconds in step_causes(step).items():
            sums[cause] = sums.get(cause, 0.0) + gpus * seconds
    return {cause: sums[cause] for cause in CAUSES if cause in sums}


def lost(causes: Mapping[str, float]) -> float:
    """Sum of the causes that are a loss."""
    return sum(seconds for cause, seconds in causes.items() if cause in LOST)
