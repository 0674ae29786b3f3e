"""An engine that stands still is told apart from one that is idle, paused or slow."""

from __future__ import annotations

import pytest

from partial_rollout.core.progress import FIRST_TOKENS, Progress

STALL_S = 30.0


def moving() -> Progress:
    """Progress of an engine that took 4 s for its tokens at most, and handed over 8 at 4 s."""
    progress = Progress(STALL_S)
    progress.look(requests=2, tokens=0, now_s=0.0)
    progress.look(requests=2, tokens=8, now_s=4.0)
    return progress


def test_an_engine_that_stands_still_is_stuck_after_its_longest_pause_and_the_limit() -> None:
    progress = moving()
    assert progress.look(requests=2, tokens=8, now_s=4.0 + STALL_S + 3.9) == pytest.approx(33.9)
    assert not progress.is_stuck
    progress.look(requests=2, tokens=8, now_s=4.0 + STALL_S + 4.0)
    assert progress.is_stuck


def test_requests_that_keep_coming_are_no_progress() -> None:
    progress = moving()
    for now_s in range(5, 40):
        progress.look(requests=now_s, tokens=8, now_s=float(now_s))
    assert progress.is_stuck


@pytest.mark.parametrize("pause_s", [STALL_S, 100 * STALL_S])
def test_an_engine_without_requests_or_one_that_is_paused_does_not_stand_still(pause_s: float) -> None:
    progress = moving()
    progress.look(requests=0, tokens=8, now_s=5.0)
    assert progress.look(requests=0, tokens=8, now_s=5.0 + pause_s) == 0.0
    assert progress.look(requests=2, tokens=8, now_s=6.0 + pause_s) == 0.0
    assert progress.limit_s == STALL_S + 4.0


def test_before_its_first_tokens_an_engine_may_take_longer() -> None:
    progress = Progress(STALL_S)
    progress.look(requests=1, tokens=0, now_s=0.0)
    progress.look(requests=1, tokens=0, now_s=STALL_S * FIRST_TOKENS - 1)
    assert not progress.is_stuck
    progress.look(requests=1, tokens=0, now_s=STALL_S * FIRST_TOKENS)
    assert progress.is_stuck


@pytest.mark.parametrize("before", [0, 2])
def test_first_tokens_count_when_the_engine_was_idle_at_a_look_beside_them(before: int) -> None:
    """A step may be shorter than the time between two looks."""
    progress = Progress(STALL_S)
    progress.look(requests=before, tokens=0, now_s=0.0)
    progress.look(requests=2 - before, tokens=8, now_s=1.0)
    assert progress.limit_s == pytest.approx(STALL_S + before / 2)
    progress.look(requests=2, tokens=8, now_s=2.0)
    progress.look(requests=2, tokens=8, now_s=2.0 + progress.limit_s)
    assert progress.is_stuck


def test_the_longest_pause_counts_and_not_the_last_one() -> None:
    progress = moving()
    progress.look(requests=2, tokens=9, now_s=5.0)
    progress.look(requests=2, tokens=10, now_s=6.0)
    assert progress.limit_s == STALL_S + 4.0


def test_one_token_is_progress() -> None:
    progress = moving()
    progress.look(requests=2, tokens=8, now_s=30.0)
    assert progress.look(requests=2, tokens=9, now_s=33.0) == 0.0
    assert progress.limit_s == STALL_S + 29.0


def test_a_warning_comes_after_a_tenth_of_what_is_beyond_the_longest_pause_but_not_within_seconds() -> None:
    progress = Progress(stall_s=30.0)
    assert progress.warn_s == 30.0  # of 300, until the first tokens
    progress.look(requests=1, tokens=0, now_s=0.0)
    progress.look(requests=1, tokens=8, now_s=2.0)
    assert progress.warn_s == 10.0
    progress.look(requests=1, tokens=16, now_s=42.0)
    assert progress.warn_s == 43.0
    assert Progress(stall_s=0.4).warn_s == 2.0


def test_time_in_which_nobody_could_take_tokens_in_is_no_pause() -> None:
    progress = moving()
    limit_s = progress.limit_s
    progress.look(requests=2, tokens=8, now_s=30.0)
    progress.put_off(600.0)
    assert progress.look(requests=2, tokens=8, now_s=631.0) < limit_s
    assert not progress.is_stuck
    progress.put_off(600.0)
    progress.look(requests=2, tokens=9, now_s=1232.0)
    assert progress.limit_s < 2 * limit_s
    idle = Progress(STALL_S)
    idle.put_off(600.0)
    assert idle.look(requests=2, tokens=0, now_s=601.0) == 0.0
