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
