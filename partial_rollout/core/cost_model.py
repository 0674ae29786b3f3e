"""What it costs to interrupt a request, and to wait for it instead; from measured speeds. Pure.

At a boundary an engine runs k requests. One that is interrupted is prefilled again, its context of c tokens at P
tokens/s. If the boundary is put off for w seconds, everything goes on meanwhile: requests that end need no prefill, all
others a little more, and the tokens that are generated need not be later, when the engine would make them at the rate
of full slots. Training and generation take turns on the same devices, so a second is a second:

    gain(w) = saved prefill + tokens / rate of full slots - w

`plan_boundary` takes the wait with the largest gain, which is often none. With full slots the last two terms cancel,
and what is left is prefill against an engine that empties.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from statistics import median_high
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SIBLING_WEIGHT = 8
"""A finished response to the same prompt says as much of an unfinished one as so many to others."""


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """One request in an engine."""

    request_id: str
    owner: str
    """Uid of its prompt; empty if it is of no training prompt."""
    num_context: int
    """Tokens of prompt and response that would be prefilled again."""
    num_done: int
    """Response tokens so far, over all segments."""
    num_left: int
    """Response tokens that are still allowed."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """What an engine has measured of itself, or was told."""

    steps: tuple[tuple[float, float], ...] = ()
    """Decode step in seconds by batch size, ascending."""
    prefill_tokens_per_s: float | None = None
    reprefilled_share: float = 1.0
    """Of a resumed context, what is computed again and not found in a cache."""

    @property
    def is_known(self) -> bool:
        """Whether there is enough to decide on."""
        return bool(self.steps) and self.prefill_tokens_per_s is not None

    def step_s(self, batch: float) -> float:
        """Seconds of a decode step, between measured batch sizes by interpolation, beyond them by the last slope."""
        sizes = [size for size, _ in self.steps]
        at = bisect_left(sizes, batch)
        if at == 0 or len(sizes) == 1:
            return self.steps[0][1]
        (low, low_s), (high, high_s) = self.steps[min(at, len(sizes) - 1) - 1 : min(at, len(sizes) - 1) + 1]
        return max(low_s, low_s + (high_s - low_s) * (batch - low) / (high - low))

    def prefill_s(self, num_tokens: float) -> float:
        """Seconds to compute an interrupted context of so many tokens again."""
        return num_tokens * self.reprefilled_share / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0

    def tokens_per_s(self, batch: float) -> float:
        """Throughput of decoding."""
        return batch / self.step_s(batch)


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """All that decisions at a boundary need of one engine."""

    speed: EngineSpeed = EngineSpeed()
    running: tuple[RunningRequest, ...] = ()
    finished: Mapping[str, Sequence[int]] = field(default_factory=dict[str, "Sequence[int]"])
    """Response lengths of finished requests by owner."""
    history: Sequence[int] = ()
    """Lengths of the last finished responses, ascending."""


@dataclass(frozen=True, slots=True)
class RequestDecision:
    """What becomes of one request, and why."""

    request_id: str
    owner: str
    ends: bool
    """Let it end; otherwise it is interrupted."""
    num_left: float | None
    """Expected tokens to its end; None if nothing says so."""
    reason: str


@dataclass(frozen=True, slots=True)
class BoundaryPlan:
    """Whom the boundary waits for."""

    wait_s: float = 0.0
    gain_s: float = 0.0
    decisions: tuple[RequestDecision, ...] = ()
    reason: str = ""

    @property
    def ends(self) -> tuple[str, ...]:
        """Request ids to wait for."""
        return tuple(decision.request_id for decision in self.decisions if decision.ends)


def given_speed(
    measured: EngineSpeed, step_ms: float | None, request_ms: float | None, prefill_tokens_per_s: float | None
) -> EngineSpeed:
    """The measured speed, with what is given instead; a step of k requests takes step_ms + k * request_ms."""
    if step_ms is not None and request_ms is not None:
        steps = tuple((batch, (step_ms + batch * request_ms) / 1000) for batch in (0.0, 1.0))
        measured = replace(measured, steps=steps)
    if prefill_tokens_per_s is not None:
        measured = replace(measured, prefill_tokens_per_s=prefill_tokens_per_s)
    return measured


def with_siblings(engines: Sequence[EngineProgress]) -> list[EngineProgress]:
    """Every engine knows what the others have finished: siblings need not be generated by the same one."""
    finished: dict[str, list[int]] = {}
    for engine in engines:
        for owner, lengths in engine.finished.items():
            finished.setdefault(owner, []).extend(lengths)
    history = sorted(length for engine in engines for length in engine.history)
    return [replace(engine, finished=finished, history=history) for engine in engines]


def expected_left(request: RunningRequest, siblings: Sequence[int], history: Sequence[int]) -> float | None:
    """Tokens to the request's end: the median of longer responses, its finished siblings' counted several times.

    `history` is ascending. None without any longer response: the rest of the budget is no estimate.
    """
    longer = list(history[bisect_right(history, request.num_done) :])
    longer += SIBLING_WEIGHT * [length for length in siblings if length > request.num_done]
    if not longer:
        return None
    return min(request.num_left, median_high(longer) - request.num_done)


def plan_boundary(progress: EngineProgress, num_slots: int) -> BoundaryPlan:
    """Whom to let end before everything else is interrupted; `num_slots` is the engine's share of slots."""
    speed = progress.speed
    if not speed.is_known:
        return BoundaryPlan(reason="speeds are not measured yet")
    expected = [(_left_in(progress, each), each) for each in progress.running]
    known = sorted(((left, each) for left, each in expected if left is not None), key=lambda pair: pair[0])
    unknown = [each for left, each in expected if left is None]
    lefts, contexts = [left for left, _ in known], [each.num_context for _, each in known]
    gains = _gains(lefts, contexts, speed, num_slots=num_slots, num_others=len(unknown))
    num_ending = max(range(len(gains)), key=lambda num: gains[num][0])
    gain_s, wait_s = gains[num_ending]
    decisions = [_decision(each, speed, left, ends=at < num_ending) for at, (left, each) in enumerate(known)]
    decisions += [_decision(each, speed, None, ends=False) for each in unknown]
    return BoundaryPlan(wait_s, gain_s, tuple(decisions), f"waiting {wait_s:.3f} s gains {gain_s:.3f} s")


def _left_in(progress: EngineProgress, request: RunningRequest) -> float | None:
    return expected_left(request, progress.finished.get(request.owner, ()), progress.history)


def _gains(
    lefts: Sequence[float], contexts: Sequence[int], speed: EngineSpeed, *, num_slots: int, num_others: int
) -> list[tuple[float, float]]:
    """Gain and wait in seconds of letting the first 0, 1, 2, ... requests end; `lefts` is ascending.

    `num_others` run meanwhile, and nobody knows for how long.
    """
    num_running = len(lefts) + num_others
    full = speed.tokens_per_s(max(num_slots, num_running, 1))
    gains = [(0.0, 0.0)]
    wait_s = num_tokens = num_saved = last = 0.0
    for at, (left, context) in enumerate(zip(lefts, contexts, strict=True)):
        batch = num_running - at
        wait_s += (left - last) * speed.step_s(batch)
        num_tokens += (left - last) * batch
        num_saved += context
        grown = (batch - 1) * left
        gains.append((speed.prefill_s(num_saved - grown) + num_tokens / full - wait_s, wait_s))
        last = left
    return gains


def _decision(request: RunningRequest, speed: EngineSpeed, left: float | None, *, ends: bool) -> RequestDecision:
    prefill_s = speed.prefill_s(request.num_context)
    tokens_left = "no response was longer" if left is None else f"{left:.0f} tokens left"
    reason = f"{tokens_left}, prefilling {request.num_context} again takes {prefill_s:.3f} s"
    what = "wait" if ends else "interrupt"
    return RequestDecision(request.request_id, request.owner, ends, left, f"{what}: {reason}")


def boundary_in_s(progress: Sequence[EngineProgress], num_groups: int) -> float | None:
    """Seconds until `num_groups` more prompts have finished, by expectation; None if that cannot be said.

    A prompt finishes with the last of its running requests.
    """
    ends: dict[str, float] = {}
    for engine in progress:
        if not engine.speed.is_known:
            return None
        step_s = engine.speed.step_s(len(engine.running))
        for each in engine.running:
            left = _left_in(engine, each)
            seconds = math.inf if left is None else left * step_s
            ends[each.owner] = max(ends.get(each.owner, 0.0), seconds)
    if num_groups < 1:
        return 0.0
    end_s = sorted(ends.values())[num_groups - 1] if num_groups <= len(ends) else math.inf
    return None if math.isinf(end_s) else end_s


def is_worth_starting(speed: EngineSpeed, seconds_left: float, num_prompt_tokens: float, num_slots: int) -> bool:
    """Whether a prompt that starts so shortly before a boundary makes more tokens than its interruption costs."""
    num_tokens = seconds_left / speed.step_s(num_slots)
    return num_tokens / speed.tokens_per_s(num_slots) > speed.prefill_s(num_prompt_tokens + num_tokens)


def why_not_start(progress: Sequence[EngineProgress], seconds: float | None, num_slots: int) -> str:
    """Why no further prompt should start, the boundary being `seconds` away (`boundary_in_s`); empty if they should.

    `num_slots` is one engine's share.
    """
    prompts = [each.num_context - each.num_done for engine in progress for each in engine.running]
    if seconds is None or not prompts:
        return ""
    num_prompt_tokens = sum(prompts) / len(prompts)
    if any(is_worth_starting(engine.speed, seconds, num_prompt_tokens, num_slots) for engine in progress):
        return ""
    return f"the batch is expected in {seconds:.2f} s, too soon for a prompt of {num_prompt_tokens:.0f} tokens"
