"""What a blow cost, counted on streams made by hand (tests/faults/measured.py)."""

from __future__ import annotations

import pytest

from partial_rollout.observability.events import (
    AnyEvent,
    BatchTaken,
    Fault,
    GateMoved,
    PromptDropped,
    RequestSent,
    SegmentEnded,
    StageBegan,
    StepEnded,
    Warned,
)
from partial_rollout.observability.stages import RAY, TRAINING
from tests.faults.measured import Cost, cost_of, tokens_lost

BLOW_S = 20.0
PROMPT = 5


def sent(t: float, uid: str = "a") -> RequestSent:
    return RequestSent(t=t, uid=uid, session=0, server="s")


def segment(t: float, tokens: int, *, before: int = 0, uid: str = "a", seconds: float = 1.0) -> SegmentEnded:
    """`tokens` after `before` of the same response."""
    return SegmentEnded(
        t=t, uid=uid, session=0, server="s", version=1, seconds=seconds, prompt_tokens=PROMPT + before, tokens=tokens
    )


def batch(t: float, *uids: str) -> BatchTaken:
    names = list(uids)
    return BatchTaken(t=t, step=1, uids=names, source_index=[], deferrals=[], interruptions=[])


def gate(t: float, *, is_open: bool, seconds: float = 0.0) -> GateMoved:
    return GateMoved(t=t, step=1, version=1, is_open=is_open, seconds=seconds)


def test_a_response_that_goes_on_after_its_tokens_has_lost_none() -> None:
    events = [sent(10), segment(15, 40), sent(21), segment(25, 10, before=40)]
    assert tokens_lost(events, BLOW_S) == 0


def test_a_request_that_a_blow_does_not_touch_has_lost_none() -> None:
    assert tokens_lost([sent(10), segment(25, 40)], BLOW_S) == 0


def test_a_response_that_begins_again_has_lost_what_it_had() -> None:
    events: list[AnyEvent] = [
        sent(10),
        segment(15, 40),
        sent(16),
        segment(19, 20, before=40),
        sent(21),
        segment(30, 90),
    ]
    assert tokens_lost(events, BLOW_S) == 60
    again = segment(30, 90, before=40)
    assert tokens_lost([*events[:-1], again], BLOW_S) == 20


def test_a_request_that_was_cut_off_counts_its_seconds_in_an_engine() -> None:
    speed = [sent(0, "b"), segment(10, 100, uid="b", seconds=10.0)]  # 10 tokens a second
    cut_off = [sent(14), sent(21), segment(31, 100, seconds=10.0)]
    assert tokens_lost([*speed, *cut_off], BLOW_S) == 60
    closed = [gate(15, is_open=False), gate(18, is_open=True)]
    assert tokens_lost([*speed, *cut_off, *closed], BLOW_S) == 30
    drained = [gate(17, is_open=False, seconds=2.0), gate(18, is_open=True)]
    assert tokens_lost([*speed, *cut_off, *drained], BLOW_S) == 30


def test_what_an_earlier_start_had_is_lost_once() -> None:
    speed = [sent(0, "b"), segment(10, 100, uid="b", seconds=10.0)]  # 10 tokens a second
    cut_off = [sent(14), StageBegan(t=22, number=2, total=5, name=RAY), sent(40), segment(50, 100, seconds=10.0)]
    assert tokens_lost([*speed, *cut_off], BLOW_S) == 60
    assert tokens_lost([*speed, *cut_off], 30.0) == 0


def test_tokens_of_a_prompt_that_is_dropped_are_lost_and_those_of_a_trained_one_are_not() -> None:
    events = [sent(10), segment(15, 40)]
    assert tokens_lost([*events, PromptDropped(t=22, uid="a", source_index="", reason="r")], BLOW_S) == 40
    assert tokens_lost([*events, batch(22, "a")], BLOW_S) == 0
    assert tokens_lost(events, BLOW_S) == 0  # the run ended with it


@pytest.mark.parametrize(("until_s", "charged"), [(float("inf"), 2), (24.0, 1), (22.0, 0)])
def test_the_cost_of_a_blow_ends_with_the_next_one(until_s: float, charged: int) -> None:
    step = StepEnded(t=26, step=2, total=9, metrics={})
    events = [
        StepEnded(t=19, step=1, total=9, metrics={}),
        Fault(t=20.5, role="engine", text=""),
        Warned(t=23, text="attempt 1 of prompt x (extra_info.index=3) failed (reward)"),
        PromptDropped(t=25, uid="x", source_index="3", reason="agent_loop_failed"),
        step,
    ]
    step_done_s = 6.0 if until_s > step.t else None
    assert cost_of(events, BLOW_S, until_s) == Cost(
        noticed_s=0.5, step_done_s=step_done_s, tokens_lost=0, charged=charged, starts=0
    )
    assert cost_of([], BLOW_S) == Cost(noticed_s=None, step_done_s=None, tokens_lost=0, charged=0, starts=0)


@pytest.mark.parametrize(("trained", "step_done_s"), [(None, 1.0), (2, 7.0), (3, 1.0)])
def test_the_report_of_a_step_that_was_trained_before_the_blow_is_not_the_next_step(
    trained: int | None, step_done_s: float
) -> None:
    ended = [StepEnded(t=t, step=step, total=9, metrics={}) for t, step in ((21, 2), (27, 3), (29, 4))]
    assert cost_of(ended, BLOW_S, trained=trained).step_done_s == step_done_s


def test_a_step_that_a_new_start_trains_again_is_the_next_one() -> None:
    start = StageBegan(t=23, number=2, total=5, name=RAY)
    ended = [StepEnded(t=t, step=2, total=9, metrics={}) for t in (21, 26)]
    assert cost_of([start, *ended], BLOW_S, trained=2).step_done_s == 6.0


def test_new_starts_of_training_after_a_blow_are_counted() -> None:
    starts: list[AnyEvent] = [StageBegan(t=t, number=2, total=5, name=RAY) for t in (1, 22, 28)]
    others = [StageBegan(t=23, number=3, total=5, name=TRAINING)]
    assert cost_of([*starts, *others], BLOW_S).starts == 2
    assert cost_of([*starts, *others], BLOW_S, 24).starts == 1
