"""What an engine's hand-overs say of its speed and of its requests."""

from __future__ import annotations

import pytest

from partial_rollout.core.cost_model import RunningRequest
from partial_rollout.core.engine_meter import NOBODY, NUM_LENGTHS, NUM_OWNERS, EngineMeter, Origin


def test_progress_counts_the_tokens_of_all_segments() -> None:
    meter = EngineMeter()
    meter.begin("r", 0.0, Origin("p", 30), num_prompt=130, max_tokens=70)
    meter.tokens("r", 1, 1.0)
    meter.tokens("r", 4, 2.0)
    assert meter.progress().running == (RunningRequest("r", "p", num_context=135, num_done=35, num_left=65),)
    meter.end("r", 3.0, is_complete=True)
    progress = meter.progress()
    assert (progress.running, progress.finished, progress.history) == ((), {"p": [35]}, (35,))


def test_an_interrupted_response_has_no_length() -> None:
    meter = EngineMeter()
    meter.begin("r", 0.0, Origin("p"), num_prompt=1, max_tokens=9)
    meter.end("r", 1.0, is_complete=False)
    assert (meter.progress().finished, meter.progress().history) == ({}, ())


def test_a_decode_step_is_what_a_token_takes_at_that_load() -> None:
    meter = EngineMeter()
    for name in ("a", "b", "c"):
        meter.begin(name, 0.0, NOBODY, num_prompt=10, max_tokens=99)
        meter.tokens(name, 1, 1.0)
    for name in ("a", "b", "c"):
        meter.tokens(name, 8, 1.8)
    meter.end("b", 1.8, is_complete=True)
    meter.end("c", 1.8, is_complete=True)
    meter.tokens("a", 8, 2.2)
    assert meter.speed().steps == ((1.0, pytest.approx(0.05)), (3.0, pytest.approx(0.1)))


def test_prefill_is_measured_while_anybody_waits_for_a_first_token() -> None:
    meter = EngineMeter()
    assert meter.speed().prefill_tokens_per_s is None
    meter.begin("a", 0.0, NOBODY, num_prompt=100, max_tokens=9)
    meter.begin("b", 0.0, NOBODY, num_prompt=300, max_tokens=9)
    meter.tokens("a", 1, 1.0)
    meter.tokens("b", 1, 2.0)
    meter.begin("c", 10.0, NOBODY, num_prompt=100, max_tokens=9)
    meter.tokens("c", 1, 10.5)
    assert meter.speed().prefill_tokens_per_s == pytest.approx(500 / 2.5)
    meter.begin("d", 20.0, NOBODY, num_prompt=100, max_tokens=9)
    meter.end("d", 22.5, is_complete=False)  # its prefill was cut off
    assert meter.speed().prefill_tokens_per_s == pytest.approx(500 / 5)


def test_what_is_found_in_a_cache_or_never_left_the_engine_is_not_prefilled() -> None:
    """Eight siblings of 1,000 tokens: one computes the prompt. Another request goes on where it was, at once."""
    meter = EngineMeter()
    for index in range(8):
        meter.begin(f"r{index}", 0.0, NOBODY, num_prompt=1000, max_tokens=9)
    for index in range(8):
        meter.tokens(f"r{index}", 1, 0.1, num_cached=1000 if index else 0)
        meter.end(f"r{index}", 0.1, is_complete=True)
    meter.begin("kept", 1.0, NOBODY, num_prompt=5000, max_tokens=9, stayed=True)
    meter.tokens("kept", 1, 3.0)
    meter.tokens("kept", 1, 3.5)
    assert meter.speed().prefill_tokens_per_s == pytest.approx(10_000)
    assert meter.speed().steps == ((1.0, pytest.approx(0.5)),)
    meter.end("kept", 3.5, is_complete=True)
    meter.begin("gone", 4.0, NOBODY, num_prompt=5000, max_tokens=9, stayed=True)
    meter.end("gone", 5.0, is_complete=False)
    meter.begin("r", 5.0, NOBODY, num_prompt=1000, max_tokens=9)
    meter.tokens("r", 1, 5.1)
    assert meter.speed().prefill_tokens_per_s == pytest.approx(10_000)


def test_the_share_that_is_computed_again() -> None:
    meter = EngineMeter()
    assert meter.speed().reprefilled_share == 1.0
    meter.resumed(100, 0)
    meter.resumed(100, 100)
    assert meter.speed().reprefilled_share == 0.5


def test_tokens_of_an_unknown_request_are_left_out() -> None:
    meter = EngineMeter()
    meter.tokens("http", 5, 1.0)
    assert meter.progress().running == ()


def test_memory_is_bounded() -> None:
    meter = EngineMeter()
    for index in range(NUM_OWNERS + 10):
        meter.begin("r", 0.0, Origin(f"p{index}"), num_prompt=1, max_tokens=9)
        meter.tokens("r", index, 1.0)
        meter.end("r", 1.0, is_complete=True)
    progress = meter.progress()
    assert len(progress.finished) == NUM_OWNERS
    assert list(progress.history) == list(range(NUM_OWNERS + 10))[-NUM_LENGTHS:]
