"""Why a step took as long as it did, and what its interruption cost.

What an interruption cost comes from the requests themselves: the next request of an interrupted trajectory says how
many tokens of its context the engine computed again. They are charged to the step whose end interrupted the trajectory,
which the weight version of the interrupted request tells.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from partial_rollout.observability.events import (
    DENOISE_STEPS,
    AnyEvent,
    CommandEnded,
    GateMoved,
    PhaseBegan,
    SegmentEnded,
    StageBegan,
)
from partial_rollout.observability.gpu_seconds import TRAINING, prefill_s, step_causes
from partial_rollout.observability.record import INTERRUPTED, numbers
from partial_rollout.observability.step_line import (
    NUM_TOKENS,
    PREFIX,
    ROLLOUT_GPUS,
    STEP_SECONDS,
    seconds_by_part,
    slots_in_use,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from partial_rollout.observability.events import StepEnded
    from partial_rollout.observability.record import RunRecord

NEIGHBOURS = 10
"""Steps before a step, and after it, that say what is usual."""
SLOW = 1.15
"""A step that took more than this times the usual is slow."""
LONGEST_RESPONSE = "response_length/max"
PENDING = f"{PREFIX}/queue/pending"
NUM_ROWS = 20
BETWEEN_S = 0.3
"""Seconds between steps from which on a step tells of them."""


def pending_at_end(step: StepEnded) -> float | None:
    """Prompts that waited for a slot at the step's end; None: not known.

    After the last step workers have stopped, and all prompts that they had begun are pending again.
    """
    return None if step.step == step.total else step.metrics.get(PENDING)


@dataclass(slots=True)
class Interruption:
    """The interruption at the end of a step's generation."""

    requests: int = 0
    drain_s: float = 0.0
    tokens_kept: int = 0
    """Tokens that the interrupted requests had; they are not generated again."""
    tokens_again: int = 0
    """Tokens that engines computed again when these trajectories went on, so far."""
    resumed: int = 0
    """Interrupted trajectories that have gone on, so far."""
    waiting: int = 0
    """Interrupted trajectories of which the next request has not ended: what they cost is not known yet."""


@dataclass(slots=True)
class Interruptions:
    """Follows the requests; `of(step)` says what the step's interruption cost."""

    _steps: dict[int, int] = field(default_factory=dict)
    """Weight version that a step's generation ended with."""
    _found: dict[int, Interruption] = field(default_factory=dict)
    """By weight version."""
    _open: dict[tuple[str, int], int] = field(default_factory=dict)
    """Weight version of the interrupted request, by trajectory that has not gone on yet."""
    _tokens: dict[int, int] = field(default_factory=dict)
    """Tokens that engines have generated, by weight version."""
    _opened_s: dict[int, float] = field(default_factory=dict)
    """When the gate was first opened for a weight version, in this start."""
    _open_s: dict[int, float] = field(default_factory=dict)
    """For how long the gate was open before a step's drain."""

    def add(self, event: AnyEvent) -> None:
        """Take in one event, in the order of the events' times."""
        match event:
            case GateMoved(is_open=False):
                self._steps[event.step] = event.version
                found = self._found.setdefault(event.version, Interruption())
                found.requests, found.drain_s = event.interrupted, event.seconds
                if (opened_s := self._opened_s.pop(event.version, None)) is not None:
                    self._open_s[event.step] = event.t - event.seconds - opened_s
            case GateMoved():
                self._opened_s.setdefault(event.version, event.t)
            case SegmentEnded():
                self._segment(event)
            case PhaseBegan(phase="agent" | "ended"):
                self._forget((event.uid, event.session))
            case StageBegan(number=1) | CommandEnded():
                self._opened_s.clear()
                for key in list(self._open):
                    self._forget(key)
            case _:
                pass

    def _forget(self, key: tuple[str, int]) -> None:
        """The trajectory does not go on."""
        if (version := self._open.pop(key, None)) is not None:
            self._found[version].waiting -= 1

    def _segment(self, event: SegmentEnded) -> None:
        key = (event.uid, event.session)
        self._tokens[event.version] = self._tokens.get(event.version, 0) + event.tokens
        if (version := self._open.pop(key, None)) is not None:
            before = self._found.setdefault(version, Interruption())
            before.tokens_again += max(0, event.prompt_tokens - event.reused_tokens)
            before.resumed += 1
            before.waiting -= 1
        if event.reason == INTERRUPTED and event.tokens:
            self._open[key] = event.version
            now = self._found.setdefault(event.version, Interruption())
            now.tokens_kept += event.tokens
            now.waiting += 1

    def of(self, step: int) -> Interruption | None:
        """What the step's interruption did; None: the gate has not closed in this step."""
        return self._found.get(self._steps.get(step, -1))

    def generated(self, step: int) -> int:
        """Tokens of all requests under the weights of the step's generation; of requests that have ended."""
        return self._tokens.get(self._steps.get(step, -1), 0)

    def open_seconds(self, step: int) -> float | None:
        """For how long engines generated for the step; None: not known, as in the first step of a start."""
        return self._open_s.get(step)


def again_seconds(tokens: int, steps: Sequence[Mapping[str, float]]) -> float:
    """What computing tokens again takes, at the usual speed of these steps; an estimate.

    >>> again_seconds(100, [{"timing_s/update_actor": 6.0, "perf/total_num_tokens": 400.0}])
    0.5
    """
    one_s = [prefill_s(step) for step in steps if step.get(NUM_TOKENS)]
    return tokens * median(one_s) if one_s else 0.0


def _near(record: RunRecord, number: int) -> list[int]:
    """The step and those around it."""
    return [each for each in range(number - NEIGHBOURS, number + NEIGHBOURS + 1) if each in record.steps]


def _neighbours(record: RunRecord, number: int) -> list[dict[str, float]]:
    return [numbers(record.steps[each]) for each in _near(record, number) if each != number]


def _more_than_usual(record: RunRecord, number: int) -> tuple[float, dict[str, float]]:
    """Usual seconds of a step, and by how many seconds each cause was above its usual ones, the most first."""
    others = [step for step in _neighbours(record, number) if STEP_SECONDS in step]
    if not others:
        return 0.0, {}
    usual = [step_causes(step) for step in others]
    found = step_causes(numbers(record.steps[number]))
    more = {cause: seconds - median(each.get(cause, 0.0) for each in usual) for cause, seconds in found.items()}
    return median(step[STEP_SECONDS] for step in others), dict(sorted(more.items(), key=lambda each: -each[1]))


def step_why(record: RunRecord, interruptions: Interruptions, number: int) -> list[str]:
    """Sentences about one step; empty if the run has no such step."""
    if number not in record.steps:
        return []
    metrics = numbers(record.steps[number])
    seconds = metrics.get(STEP_SECONDS, 0.0)
    parts = ", ".join(
        f"{cause} {part:.1f}{_halves(metrics) if cause == TRAINING else ''}"
        for cause, part in step_causes(metrics).items()
        if part >= 0.05
    )
    said = [f"step {number} took {seconds:.1f} s: {parts}", *_outside(record, interruptions, number)]
    around = [metrics, *_neighbours(record, number)]
    said += _slow(record, number, seconds) + _rate(record, interruptions, number)
    return said + _cost(interruptions.of(number), around, record.unit)


def _outside(record: RunRecord, interruptions: Interruptions, number: int) -> list[str]:
    """Seconds that no step counts: those between two steps, and the generation that began in them."""
    metrics, said = numbers(record.steps[number]), []
    if (between_s := record.between_s.get(number, 0.0)) >= BETWEEN_S:
        said.append(
            f"{between_s:.1f} s more passed between the end of the step before and the end of step {number}; no step "
            "counts them: metrics, logs, validation"
        )
    open_s, gen_s = interruptions.open_seconds(number), metrics.get("timing_s/gen", 0.0)
    if open_s is None or metrics.get(ROLLOUT_GPUS):
        return said
    if (early_s := open_s - max(0.0, gen_s - metrics.get("timing_s/drain", 0.0))) >= BETWEEN_S:
        said.append(
            f"engines generated for {open_s:.1f} s with the gate open: {early_s:.1f} s of them before step {number} "
            "began, and no step counts these"
        )
    return said


def _halves(metrics: Mapping[str, float]) -> str:
    parts = seconds_by_part(metrics)
    told = [f"{name} {parts[name]:.1f}" for name in ("log-probs", "update") if parts.get(name, 0.0) >= 0.05]
    return f" ({', '.join(told)})" if len(told) > 1 else ""


def _slow(record: RunRecord, number: int, seconds: float) -> list[str]:
    usual_s, more = _more_than_usual(record, number)
    if not usual_s:
        return []
    if seconds <= SLOW * usual_s:
        return [f"no slow step: the usual step is {usual_s:.1f} s, the median of up to {2 * NEIGHBOURS} around it"]
    causes = [f"{cause} {part:+.1f} s" for cause, part in more.items() if part > 0.1 * (seconds - usual_s)]
    said = [f"slow: {seconds - usual_s:.1f} s more than the usual step, {usual_s:.1f} s; {', '.join(causes[:3])}"]
    longest = numbers(record.steps[number]).get(LONGEST_RESPONSE)
    others = [step[LONGEST_RESPONSE] for step in _neighbours(record, number) if LONGEST_RESPONSE in step]
    if longest is not None and others and longest > SLOW * median(others):  # otherwise it explains nothing
        said.append(f"its longest response has {longest:,.0f} tokens; around it {median(others):,.0f}, in the median")
    return said


def _rate(record: RunRecord, interruptions: Interruptions, number: int) -> list[str]:
    """Whether the engines were slow: tokens of a request by the seconds in which it was generated."""
    rates = {
        each: interruptions.generated(each) / request_s
        for each in _near(record, number)
        if (request_s := _request_seconds(numbers(record.steps[each]), interruptions.open_seconds(each)))
    }
    own, others = rates.get(number, 0.0), [rate for each, rate in rates.items() if each != number and rate]
    if not own or not others or record.unit == DENOISE_STEPS:
        return []
    usual = median(others)
    word = "slow engines" if own * SLOW < usual else "engines"
    return [f"{word}: {own:,.1f} tokens/s for each request; in the steps around it {usual:,.1f}, in the median"]


def _request_seconds(metrics: Mapping[str, float], open_s: float | None) -> float:
    """Requests run as long as the gate is open, which it is before the step begins: its timer counts less."""
    seconds = metrics.get("timing_s/gen", 0.0) if open_s is None else open_s
    return seconds * metrics.get(f"{PREFIX}/mean_running", 0.0)


def _cost(cost: Interruption | None, around: Sequence[Mapping[str, float]], unit: str) -> list[str]:
    """`around`: the step, and the steps around it."""
    if cost is None:
        return []
    if not cost.requests and not cost.resumed:
        return [f"its end interrupted nothing; the drain took {cost.drain_s:.2f} s"]
    if unit == DENOISE_STEPS:  # a request goes on from its latents, whatever the mode
        kept = "no denoise step is computed again"
        return [f"its end interrupted {cost.requests:,} images. Cost: {cost.drain_s:.2f} s until engines stood; {kept}"]
    again_s = again_seconds(cost.tokens_again, around)
    usual_s = median(step.get(STEP_SECONDS, 0.0) for step in around)
    share = (cost.drain_s + again_s) / usual_s if usual_s else 0.0
    went_on = "none of their trajectories went on"
    if cost.resumed:
        went_on = (
            f"{cost.tokens_again:,} tokens of context (prompts and earlier tokens too) computed again when "
            f"{cost.resumed:,} of their trajectories went on, about {again_s:.2f} s, mostly in later steps. In all "
            f"{share:.0%} of a usual step"
        )
    if cost.waiting:
        later = f"what {cost.waiting:,} trajectories cost is known when their next requests have ended"
        went_on = f"{went_on} so far; {later}" if cost.resumed else later
    return [
        f"its end interrupted {cost.requests:,} requests; their {cost.tokens_kept:,} new tokens were kept. Cost: "
        f"{cost.drain_s:.2f} s of drain; {went_on}"
    ]


def step_rows(record: RunRecord, interruptions: Interruptions, num: int = NUM_ROWS) -> list[tuple[str, ...]]:
    """The last steps, the latest first: number, seconds, times the usual, what was most above the usual, interrupted
    requests, what that cost, slots in use, prompts pending at the end, seconds before its end that no step counts."""
    return [_row(record, interruptions.of(number), number) for number in sorted(record.steps, reverse=True)[:num]]


def _row(record: RunRecord, cost: Interruption | None, number: int) -> tuple[str, ...]:
    metrics = numbers(record.steps[number])
    seconds = metrics.get(STEP_SECONDS, 0.0)
    usual_s, more = _more_than_usual(record, number)
    most = next(iter(more.items()), None) if usual_s and seconds > SLOW * usual_s else None
    pending, between_s = pending_at_end(record.steps[number]), record.between_s.get(number)
    again_s = 0.0 if cost is None else again_seconds(cost.tokens_again, [metrics, *_neighbours(record, number)])
    return (
        str(number),
        f"{seconds:.1f}",
        f"{seconds / usual_s:.2f} x" if usual_s else "",
        "" if most is None else f"{most[0]} {most[1]:+.1f} s",
        "" if cost is None else f"{cost.requests:,}",
        "" if cost is None else f"{cost.drain_s + again_s:.2f} s{' so far' if cost.waiting else ''}",
        slots_in_use(metrics),
        "" if pending is None else f"{pending:.0f}",
        "" if between_s is None else f"{between_s:.1f}",
    )
