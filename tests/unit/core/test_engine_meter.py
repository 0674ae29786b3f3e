"""What an engine's hand-overs say of its speed."""

from __future__ import annotations

import pytest

from partial_rollout.core.engine_meter import EngineMeter, EngineSpeed


@pytest.mark.parametrize(
    ("batch", "step_s"), [(1, 0.010), (4, 0.010), (12, 0.015), (16, 0.020), (32, 0.040), (64, 0.080)]
)
def test_a_step_between_and_beyond_what_was_measured(batch: int, step_s: float) -> None:
    speed = EngineSpeed(steps=((8.0, 0.010), (16.0, 0.020)))
    assert speed.step_s(batch) == pytest.approx(step_s)
    assert EngineSpeed(steps=((8.0, 0.01),)).step_s(99) == 0.01


def test_a_decode_step_is_what_a_token_takes_at_that_load() -> None:
    meter = EngineMeter()
    for name in ("a", "b", "c"):
        meter.begin(name)
        meter.tokens(name, 1, 1.0)
    for name in ("a", "b", "c"):
        meter.tokens(name, 8, 1.8)
    meter.end("b")
    meter.end("c")
    meter.tokens("a", 8, 2.2)
    assert meter.speed().steps == ((1.0, pytest.approx(0.05)), (3.0, pytest.approx(0.1)))


def test_the_first_tokens_of_a_request_are_not_measured() -> None:
    meter = EngineMeter()
    meter.begin("a")
    meter.tokens("a", 1, 9.0)
    assert meter.speed().steps == ()
    meter.tokens("a", 2, 10.0)
    meter.end("a")
    meter.begin("a")  # it goes on after an interruption
    meter.tokens("a", 1, 99.0)
    assert meter.speed().steps == ((1.0, pytest.approx(0.5)),)


def test_tokens_of_an_unknown_request_are_left_out() -> None:
    meter = EngineMeter()
    meter.tokens("http", 5, 1.0)
    meter.tokens("http", 5, 2.0)
    assert meter.speed().steps == ()


def decode(meter: EngineMeter, seconds: list[float], requests: int = 100, since_s: float = 0.0) -> float:
    """One token of each request after the other, in each decode step; when the last one ended."""
    for step_s in seconds:
        since_s += step_s
        for number in range(requests):
            meter.tokens(str(number), 1, since_s)
    return since_s


def test_one_slow_decode_step_of_many_requests_hardly_counts() -> None:
    """A hundred requests measure it, as one step."""
    meter = EngineMeter()
    for number in range(100):
        meter.begin(str(number))
    ended_s = decode(meter, [0.0, *[0.02] * 60])
    assert meter.speed().steps == ((100.0, pytest.approx(0.02)),)
    ended_s = decode(meter, [0.2], since_s=ended_s)
    assert 0.02 < meter.speed().step_s(100) < 0.025
    decode(meter, [0.03] * 100, since_s=ended_s)
    assert meter.speed().step_s(100) == pytest.approx(0.03, rel=0.1)


def test_the_first_decode_steps_count_alike() -> None:
    meter = EngineMeter()
    for number in range(100):
        meter.begin(str(number))
    decode(meter, [0.0, 0.2, 0.02, 0.02, 0.02])
    assert meter.speed().step_s(100) == pytest.approx(0.065, rel=0.01)


@pytest.mark.parametrize("num_tokens", [1, 8, 500])
def test_tokens_that_are_handed_over_together_are_as_many_steps(num_tokens: int) -> None:
    meter = EngineMeter()
    meter.begin("a")
    for number in range(200):
        meter.tokens("a", 1, number * 0.02)
    meter.tokens("a", num_tokens, 199 * 0.02 + num_tokens * 0.04)
    expected = {1: 0.0204, 8: 0.0232, 500: 0.04}[num_tokens]
    assert meter.speed().step_s(1) == pytest.approx(expected, rel=0.01)
