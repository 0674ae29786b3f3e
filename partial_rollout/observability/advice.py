"""What to change in a run: the one thing to try next, and whether settings would help. Each says what it has seen.

The steps that count are the last ones, without the first ones, in which the queue fills.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from partial_rollout.core.depth import FREE_BELOW, is_waited_for
from partial_rollout.observability.events import DENOISE_STEPS
from partial_rollout.observability.gpu_seconds import LONGEST, REPREFILL, gpu_seconds
from partial_rollout.observability.record import numbers
from partial_rollout.observability.step_line import PREFIX
from partial_rollout.observability.summary import dropped_by_reason
from partial_rollout.observability.why import PENDING, pending_at_end

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.observability.events import Choice
    from partial_rollout.observability.record import RunRecord

MODE_KEY, DEPTH_KEY = "partial_rollout.tail.interrupt_mode", "partial_rollout.prefetch_factor"
LAST, SKIP = 20, 2
"""Steps that count, and first steps that do not."""
TAKEN, WAITED = f"{PREFIX}/slots_taken", f"{PREFIX}/waited"
USE = ("slot_utilisation", "mean_running")
FEW = 10
"""Steps since a choice below which most of what was seen is of the choice before."""
MANY_AGAIN = 0.1
"""Share of trained tokens computed again from which on retained KV is worth a try."""
ROOMY_KV = 0.8
"""Share of the KV cache in use below which an engine evicts nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a setting would help."""

    word: str
    """`no`, `hardly`, `perhaps` or `not known`."""
    seen: str
    change: str = ""
    """How to change it, where it may help."""

    def __str__(self) -> str:
        """Text for pages."""
        return f"{self.word}: {self.seen}" + (f"; {self.change}" if self.change else "")


def next_step(record: RunRecord) -> str:
    """The one thing to try next; it never contradicts `would_help`."""
    if record.unit == DENOISE_STEPS:
        return _next_of_images(record)
    if not _last_steps(record):
        return (
            "run it with +async_training.partial_rollout=True too, and compare: python -m partial_rollout.compare A B"
        )
    if found := change(record):
        return f"perhaps: {found}"
    return "compare with the same command without the flag: python -m partial_rollout.compare A B"


def change(record: RunRecord) -> str:
    """The one thing to change in a run of ours, with what was seen; empty where nothing seen says so."""
    last, dropped = _last_steps(record), dropped_by_reason(record)
    if not last:
        return ""
    if dropped:
        return f"prompts were dropped ({', '.join(dropped)}): docs/troubleshooting.md says what each reason means"
    causes = gpu_seconds(last)
    answers = {REPREFILL: _kept(record, last), LONGEST: _deeper(record, last)}
    for cause in sorted(answers, key=lambda cause: -causes.get(cause, 0.0)):  # what may give most comes first
        if answers[cause].change:
            return f"{answers[cause].seen}: {answers[cause].change}"
    return ""


def would_help(record: RunRecord) -> list[tuple[str, str]]:
    """Settings, each with whether it would help and what says so; nothing for verl's own modes."""
    last = _last_steps(record)
    if not last:
        return []
    return [
        ("a deeper queue", str(_deeper(record, last))),
        ("keeping the KV cache of interrupted responses", str(_kept(record, last))),
    ]


def _last_steps(record: RunRecord) -> list[dict[str, float]]:
    """Empty for verl's own modes, which do not say how many slots were in use."""
    last = [(record.steps[number], numbers(record.steps[number])) for number in _counted(record)]
    # Without what is not known, as how many were pending after the last step.
    return [
        {name: value for name, value in metrics.items() if name != PENDING or pending_at_end(step) is not None}
        for step, metrics in last
    ]


def _counted(record: RunRecord) -> list[int]:
    steps = sorted(record.steps)
    return [n for n in (steps[SKIP:] or steps)[-LAST:] if f"{PREFIX}/slot_utilisation" in record.steps[n].metrics]


def _which(record: RunRecord) -> str:
    """The steps that count, for a sentence: others may show other shares."""
    first, *others = _counted(record)
    return f"in steps {first} to {others[-1]}" if others else f"in step {first}"


def _deeper(record: RunRecord, last: Sequence[dict[str, float]]) -> Answer:
    used, running = (fmean(step.get(f"{PREFIX}/{name}", 0.0) for step in last) for name in USE)
    pending = [step[PENDING] for step in last if PENDING in step]
    lacking = sum(not each for each in pending)
    slots = f"{running / used:.0f} slots" if used and running else "slots"
    tells = "" if len(pending) == len(last) else " (the last step of a run does not tell)"
    of_steps = f"no prompt was pending at the end of {lacking} of {len(pending)} steps{tells}"
    seen = (
        f"{_which(record)} requests filled {used:.0%} of the {slots} that the run began with (empty ones took "
        f"{_share(last, LONGEST)}), and {of_steps if pending else 'how many prompts were pending is not known'}"
    )
    if used >= FREE_BELOW:
        return Answer("no", seen)
    if not pending:
        return Answer("not known", seen)
    if not lacking:
        return Answer("no", f"{seen}, so slots were not empty for want of prompts")
    if 2 * lacking <= len(pending):
        return Answer("hardly", f"{seen}; in the other steps slots were empty though prompts were pending")
    known = [step[TAKEN] for step in last if TAKEN in step]
    if known and (taken := fmean(known)) >= FREE_BELOW:
        return Answer("no", f"{seen}, but trajectories took {taken:.0%} of these slots, in engines or not")
    waits = [step[WAITED] for step in last if WAITED in step]
    if waits and not is_waited_for(waits):
        return Answer("no", f"{seen}, but the trainer waited {median(waits):.0%} of a step for its batch (the median)")
    mode = _chosen(record, MODE_KEY)
    if mode is not None and mode.after == "abort":
        return Answer(
            "hardly", f"{seen}, but with abort more prompts in flight are more to compute again (docs/modes.md)"
        )
    return Answer("perhaps", seen, _more_prompts(record))


def _kept(record: RunRecord, last: Sequence[dict[str, float]]) -> Answer:
    trained = sum(step.get(f"{PREFIX}/response_tokens", 0.0) for step in last)
    again = sum(step.get(f"{PREFIX}/reprefilled_tokens", 0.0) for step in last) / trained if trained else 0.0
    seen = (
        f"for 100 tokens of trained responses {100 * again:.0f} of context were computed again {_which(record)} (this "
        f"took {_share(last, REPREFILL)})"
    )
    return Answer("perhaps", seen, _keep_kv(record)) if again > MANY_AGAIN else Answer("no", seen)


def _share(steps: Sequence[dict[str, float]], cause: str) -> str:
    """What a cause took at most; a change saves no more."""
    causes = gpu_seconds(steps)
    whole = sum(causes.values())
    return f"{causes.get(cause, 0.0) / whole if whole else 0.0:.0%} of the GPU seconds"


def _next_of_images(record: RunRecord) -> str:
    """The gate moves only where requests can be interrupted."""
    other = "whole requests (rollout.step_execution=false rollout.prefetch_factor=1; in the recipes PARTIAL_ROLLOUT=0)"
    if record.gate is None:
        other = "requests that are interrupted (rollout.step_execution=true; in the recipes PARTIAL_ROLLOUT=1)"
    return f"compare the seconds of a step and the reward with those of the same job with {other}"


def _keep_kv(record: RunRecord) -> str:
    """What keeps the KV of interrupted requests, where much of it was computed again."""
    choice = _chosen(record, MODE_KEY)
    if choice is None:
        return (
            "keep the KV of interrupted requests with partial_rollout.tail.interrupt_mode=auto, or reuse_kv where "
            "engines keep their memory (docs/modes.md)"
        )
    if choice.after == "abort":
        return f"auto took abort ({choice.seen}: {choice.reason}); docs/modes.md says what keeps KV"
    most = max(record.values(f"{PREFIX}/kv_usage") + record.values(f"{PREFIX}/slots/kv_usage_max"), default=1.0)
    if most < ROOMY_KV:
        return (
            f"auto took {choice.after}, and the KV cache was never more than {most:.0%} full, so nothing was evicted: "
            "vLLM keeps full blocks only (unless set of 16 tokens, on a CPU of 128), and these responses are short. "
            "To try: +actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32"
        )
    return (
        f"auto took {choice.after}, and KV was evicted before it was used again: more KV memory, or fewer "
        "partial_rollout.num_slots (docs/modes.md)"
    )


def _more_prompts(record: RunRecord) -> str:
    """What fills empty slots."""
    choice = _chosen(record, DEPTH_KEY)
    if choice is None:
        return "a higher partial_rollout.prefetch_factor fills them, for older tokens (docs/modes.md)"
    since = f"since step {choice.step}: " if choice.step else ""  # else it reads as if it were seen now
    few = "; few steps have had them yet" if choice.step and max(record.steps) - choice.step < FEW else ""
    return (
        f"auto keeps {choice.after} batches in flight ({since}{choice.reason}{few}); more may fill them, for older "
        f"tokens: {DEPTH_KEY}={_one_more(choice.after)} (docs/modes.md)"
    )


def _one_more(depth: object) -> str:
    """One batch more in flight."""
    return f"{depth + 1:g}" if isinstance(depth, int | float) else "a higher number"


def _chosen(record: RunRecord, key: str) -> Choice | None:
    """What the run chose last for a key."""
    return {choice.key: choice for choice in record.choices}.get(key)
