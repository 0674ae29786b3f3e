"""Whom a boundary waits for: worked examples, and that no wait is chosen that costs more than it saves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partial_rollout.core.cost_model import (
    EngineProgress,
    EngineSpeed,
    RunningRequest,
    boundary_in_s,
    expected_left,
    given_speed,
    is_worth_starting,
    plan_boundary,
    why_not_start,
    with_siblings,
)

FLAT = EngineSpeed(steps=((1.0, 0.01), (64.0, 0.01)), prefill_tokens_per_s=10_000)
"""A step takes 10 ms, however many requests it has: weights are what is read."""
LINEAR = EngineSpeed(steps=((1.0, 0.001), (64.0, 0.064)), prefill_tokens_per_s=10_000)
"""Every request adds 1 ms: an engine that empties loses nothing."""


def request(name: str, *, done: int = 0, context: int = 1000, left: int = 1000, owner: str = "p") -> RunningRequest:
    return RunningRequest(name, owner, context, done, left)


@pytest.mark.parametrize(
    ("batch", "step_s"), [(1, 0.010), (4, 0.010), (12, 0.015), (16, 0.020), (32, 0.040), (64, 0.080)]
)
def test_a_step_between_and_beyond_what_was_measured(batch: int, step_s: float) -> None:
    speed = EngineSpeed(steps=((8.0, 0.010), (16.0, 0.020)), prefill_tokens_per_s=1)
    assert speed.step_s(batch) == pytest.approx(step_s)
    assert EngineSpeed(steps=((8.0, 0.01),)).step_s(99) == 0.01


def test_what_is_given_comes_before_what_is_measured() -> None:
    speed = given_speed(FLAT, 5.0, 0.5, None)
    assert (speed.step_s(10), speed.step_s(40)) == pytest.approx((0.010, 0.025))
    assert speed.prefill_tokens_per_s == FLAT.prefill_tokens_per_s
    assert given_speed(FLAT, None, None, 7.0).prefill_s(14) == 2.0
    assert given_speed(FLAT, None, None, 7.0).steps == FLAT.steps


@pytest.mark.parametrize(
    ("done", "siblings", "history", "left"),
    [
        (0, [], [], None),
        (100, [], [50, 120, 140, 400], 40),
        (100, [105], [50, 120, 140, 400], 5),
        (100, [90], [50, 120, 140, 400], 40),
        (300, [310], [50, 120, 140], 10),
        (500, [310], [50, 120, 140], None),
        (0, [], [5000], 1000),
    ],
    ids=[
        "nothing known",
        "longer ones",
        "a sibling",
        "a shorter sibling",
        "only a sibling",
        "longest so far",
        "budget",
    ],
)
def test_expected_tokens_to_the_end(done: int, siblings: list[int], history: list[int], left: float | None) -> None:
    assert expected_left(request("a", done=done), siblings, history) == left


def test_siblings_count_wherever_they_were_generated() -> None:
    one, other = EngineProgress(finished={"p": [3]}, history=[3, 9]), EngineProgress(finished={"p": [5]}, history=[4])
    for engine in with_siblings([one, other]):
        assert (sorted(engine.finished["p"]), engine.history) == ([3, 5], [3, 4, 9])


def test_a_request_about_to_end_is_let_end_and_a_long_one_is_interrupted() -> None:
    """7 requests with 2 tokens left: 20 ms of waiting against 700 ms of prefill. One with 900 left would be 9 s."""
    running = [request(f"r{index}", done=98, owner=f"p{index}") for index in range(7)]
    running.append(request("long", done=100, owner="q"))
    plan = plan_boundary(EngineProgress(FLAT, tuple(running), {"q": [1000]}, history=[100] * 5), num_slots=64)
    assert plan.ends == tuple(f"r{index}" for index in range(7))
    assert plan.wait_s == pytest.approx(0.02)
    assert plan.decisions[0].reason == "wait: 2 tokens left, prefilling 1000 again takes 0.100 s"
    assert plan.decisions[-1].reason == "interrupt: 900 tokens left, prefilling 1000 again takes 0.100 s"


def test_a_wait_that_costs_more_than_the_prefill_is_not_made() -> None:
    plan = plan_boundary(EngineProgress(FLAT, (request("a", done=70),), history=[100]), num_slots=64)
    assert (plan.ends, plan.wait_s, plan.gain_s) == ((), 0.0, 0.0)
    assert plan.decisions[0].reason.startswith("interrupt: 30 tokens left")


def test_where_waiting_loses_no_throughput_everything_ends() -> None:
    plan = plan_boundary(EngineProgress(LINEAR, (request("a", done=70),), history=[100]), num_slots=1)
    assert plan.ends == ("a",)


def test_kv_that_is_retained_is_no_reason_to_wait() -> None:
    retained = EngineSpeed(FLAT.steps, FLAT.prefill_tokens_per_s, reprefilled_share=0.0)
    plan = plan_boundary(EngineProgress(retained, (request("a", done=99),), history=[100]), num_slots=64)
    assert plan.ends == ()


def test_nothing_is_decided_before_speeds_are_known() -> None:
    plan = plan_boundary(EngineProgress(EngineSpeed(), (request("a"),)), num_slots=4)
    assert (plan.ends, plan.reason) == ((), "speeds are not measured yet")


def test_a_request_longer_than_all_that_ended_is_interrupted_whatever_is_left_of_its_budget() -> None:
    """It shares the steps of those that are waited for."""
    running = (request("longest", done=100, left=1), request("a", done=98))
    plan = plan_boundary(EngineProgress(LINEAR, running, history=[100]), num_slots=64)
    assert plan.ends == ("a",)
    assert plan.wait_s == pytest.approx(2 * 0.002)
    assert plan.decisions[1].reason == "interrupt: no response was longer, prefilling 1000 again takes 0.100 s"


def test_the_boundary_is_expected_when_the_last_missing_prompt_has_its_last_response() -> None:
    running = (
        request("a0", owner="a", done=90),
        request("a1", owner="a", done=60),
        request("b0", owner="b", done=80),
    )
    engine = EngineProgress(FLAT, running, history=[100])
    assert boundary_in_s([engine], 0) == 0.0
    assert boundary_in_s([engine], 1) == pytest.approx(0.20)
    assert boundary_in_s([engine], 2) == pytest.approx(0.40)
    assert boundary_in_s([engine], 3) is None
    assert (
        boundary_in_s([EngineProgress(FLAT, (*running, request("c0", owner="c", done=100)), history=[100])], 3) is None
    )
    assert boundary_in_s([EngineProgress(EngineSpeed(), running)], 1) is None


def test_a_prompt_shortly_before_the_boundary_makes_fewer_tokens_than_it_costs() -> None:
    assert is_worth_starting(FLAT, 10.0, 1000, 8)
    assert not is_worth_starting(FLAT, 0.5, 1000, 8)


def test_why_no_prompt_starts() -> None:
    near = EngineProgress(FLAT, (request("a", done=95, context=1095),), history=[100])
    assert why_not_start([near], 0.05, 8) == "the batch is expected in 0.05 s, too soon for a prompt of 1000 tokens"
    assert why_not_start([near], 10.0, 8) == ""
    assert why_not_start([near], None, 8) == why_not_start([EngineProgress(FLAT)], 0.05, 8) == ""


REQUESTS = st.lists(
    st.tuples(st.integers(1, 400), st.integers(0, 3000)).map(
        lambda pair: request("r", done=0, context=pair[1], left=pair[0])
    ),
    max_size=12,
)


@given(running=REQUESTS, step_ms=st.floats(0.1, 20), request_ms=st.floats(0.001, 2), slots=st.integers(1, 64))
def test_a_chosen_wait_gains_and_no_other_gains_more(
    running: list[RunningRequest], step_ms: float, request_ms: float, slots: int
) -> None:
    """All that ended was longer than the budget, which is what is expected: every wait can be reckoned step by step."""
    speed = given_speed(FLAT, step_ms, request_ms, None)
    plan = plan_boundary(EngineProgress(speed, tuple(running), history=[1000]), slots)
    full_s = speed.step_s(max(slots, len(running))) / max(slots, len(running), 1)

    def gain(num_steps: int) -> float:
        seconds = made = 0.0
        for step in range(num_steps):
            batch = sum(each.num_left > step for each in running)
            seconds, made = seconds + speed.step_s(batch), made + batch
        ended = [each for each in running if each.num_left <= num_steps]
        more = num_steps * (len(running) - len(ended)) if num_steps else 0
        return speed.prefill_s(sum(each.num_context for each in ended) - more) + made * full_s - seconds

    best = max((gain(steps) for steps in {0, *(each.num_left for each in running)}), default=0.0)
    assert plan.gain_s == pytest.approx(best, abs=1e-9)
    assert plan.gain_s >= 0
