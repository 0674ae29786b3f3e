"""What a blow cost a run, from its event stream: seconds to notice and to go on, tokens lost, prompts charged."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from partial_rollout.observability.events import (
    AnyEvent,
    BatchTaken,
    Fault,
    GateMoved,
    PromptDropped,
    QueueMoved,
    RequestSent,
    SegmentEnded,
    StageBegan,
    StepEnded,
    TrajectoryEnded,
    Warned,
)
from partial_rollout.observability.stages import RAY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NEVER_S = float("inf")
CHARGED = re.compile(r"attempt \d+ of .* failed \(")
"""What the prompt manager warns of when an attempt counts against its prompt."""


@dataclass(frozen=True)
class Cost:
    """What one blow cost."""

    noticed_s: float | None
    """From the blow to the first event `fault`; None: nobody has noticed."""
    step_done_s: float | None
    """From the blow to the end of the next step; None: no step has ended before the next blow.

    The next step is the one that the blow came in, or the one after it where that one had been trained.
    """
    tokens_lost: int
    """Response tokens that were there at the blow, and that the run generated again or threw away."""
    charged: int
    """Attempts that were counted against their prompts, and prompts that were dropped."""
    starts: int
    """How often training was started again before the next blow."""


def charges(events: Iterable[AnyEvent]) -> list[AnyEvent]:
    """Attempts that were counted against their prompts, and prompts that were dropped."""
    return [e for e in events if isinstance(e, PromptDropped) or (isinstance(e, Warned) and CHARGED.search(e.text))]


def unconserved(events: Iterable[AnyEvent]) -> list[QueueMoved]:
    """Moments at which the prompt queue had lost a prompt, or had one twice."""
    moments = [event for event in events if isinstance(event, QueueMoved)]
    return [e for e in moments if e.admitted != e.pending + e.ongoing + e.deferred + e.done + e.taken + e.dropped]


def cost_of(events: Sequence[AnyEvent], at_s: float, until_s: float = NEVER_S, *, trained: int | None = None) -> Cost:
    """What the blow at `at_s` cost; `until_s` is the time of the next one.

    `trained` is the step that the blow came in, if its training had ended: all that follows of it is its report.
    """
    later = [event for event in events if at_s <= event.t < until_s]
    noticed = [event.t for event in later if isinstance(event, Fault)]
    again_s = min((event.t for event in later if isinstance(event, StageBegan) and event.name == RAY), default=NEVER_S)
    ended = [e.t for e in later if isinstance(e, StepEnded) and (e.step != trained or e.t > again_s)]
    return Cost(
        noticed_s=round(min(noticed) - at_s, 1) if noticed else None,
        step_done_s=round(min(ended) - at_s, 1) if ended else None,
        tokens_lost=tokens_lost(events, at_s),
        charged=len(charges(later)),
        starts=sum(isinstance(event, StageBegan) and event.name == RAY for event in later),
    )


@dataclass
class _Response:
    """The requests of one response to engines, in the order of their times."""

    sent_s: list[float] = field(default_factory=list)
    segments: list[SegmentEnded] = field(default_factory=list)
    stored_s: list[float] = field(default_factory=list)
    """When the whole response was scored and stored."""

    def prompt_tokens(self) -> int:
        return min(segment.prompt_tokens for segment in self.segments)


def tokens_lost(events: Sequence[AnyEvent], at_s: float) -> int:
    """Response tokens that were there at `at_s` and that a later request to an engine did not go on from.

    A request that was cut off without an answer, as its worker or its server died, told nobody its tokens: it counts
    the seconds that it was in an engine, at the mean speed of all requests of the run. What was there before the last
    start of training before `at_s` was lost by an earlier blow, or is in a checkpoint.
    """
    started_s = max((e.t for e in events if isinstance(e, StageBegan) and e.name == RAY and e.t < at_s), default=0.0)
    responses: dict[tuple[str, int], _Response] = defaultdict(_Response)
    for event in sorted(events, key=lambda each: each.t):
        match event:
            case RequestSent():
                responses[event.uid, event.session].sent_s.append(event.t)
            case SegmentEnded():
                responses[event.uid, event.session].segments.append(event)
            case TrajectoryEnded():
                responses[event.uid, event.session].stored_s.append(event.t)
            case _:
                pass
    gates = _open_times(events)
    speed = _speed((s for response in responses.values() for s in response.segments), gates)
    trained = {uid for event in events if isinstance(event, BatchTaken) and event.t >= at_s for uid in event.uids}
    dropped = {event.uid for event in events if isinstance(event, PromptDropped) and event.t >= at_s}
    lost = 0.0
    for (uid, _), response in responses.items():
        if not any(started_s < sent_s <= at_s for sent_s in response.sent_s):
            continue
        held = _held(response, at_s, gates, speed)
        again = next((segment for segment in response.segments if segment.t > at_s), None)
        if again is not None and any(at_s < sent_s <= again.t for sent_s in response.sent_s):
            lost += max(0.0, held - (again.prompt_tokens - response.prompt_tokens()))
        elif again is None and uid in dropped and uid not in trained:
            lost += held
    return round(lost)


def _held(response: _Response, at_s: float, gates: Sequence[tuple[float, float]], speed: float) -> float:
    """Tokens of a response at a moment, those inside an engine included."""
    before = [segment for segment in response.segments if segment.t <= at_s]
    held = float(before[-1].prompt_tokens - response.prompt_tokens() + before[-1].tokens) if before else 0.0
    sent_s = max((sent_s for sent_s in response.sent_s if sent_s <= at_s), default=NEVER_S)
    if sent_s < NEVER_S and not any(segment.t >= sent_s for segment in before):
        held += speed * _open_s(gates, sent_s, at_s)
    return held


def _open_times(events: Iterable[AnyEvent]) -> list[tuple[float, float]]:
    """From when to when all gates were open, which they are from the start on."""
    times, opened_s = [], 0.0
    for event in sorted((each for each in events if isinstance(each, GateMoved)), key=lambda each: each.t):
        if event.is_open:
            opened_s = event.t
        elif opened_s < NEVER_S:
            times.append((opened_s, event.t - event.seconds))  # the event comes after the drain
            opened_s = NEVER_S
    return [*times, (opened_s, NEVER_S)]


def _open_s(gates: Sequence[tuple[float, float]], from_s: float, to_s: float) -> float:
    return sum(max(0.0, min(to_s, closed_s) - max(from_s, opened_s)) for opened_s, closed_s in gates)


def _speed(segments: Iterable[SegmentEnded], gates: Sequence[tuple[float, float]]) -> float:
    """Tokens that a request gets in a second in an engine, over all requests."""
    timed = [(segment.tokens, _open_s(gates, segment.t - segment.seconds, segment.t)) for segment in segments]
    seconds = sum(open_s for _, open_s in timed)
    return sum(tokens for tokens, _ in timed) / seconds if seconds else 0.0
