"""Waits for tools and rewards end at their deadlines, and no others do."""

from __future__ import annotations

import math
import random

from partial_rollout.core.deadlines import Deadlines, Late

LIMITS = {"tool": 100.0, "reward": 50.0}


def over(deadlines: Deadlines[str], now_s: float) -> list[str]:
    return [late.key for late in deadlines.look(now_s) if late.is_over]


def test_each_wait_ends_once_at_its_own_limit():
    deadlines = Deadlines[str](LIMITS)
    deadlines.begin("a", "tool", 0.0)
    deadlines.begin("b", "reward", 10.0)
    assert over(deadlines, 59.9) == []
    assert over(deadlines, 60.0) == ["b"]
    assert over(deadlines, 100.0) == ["a"]
    assert over(deadlines, 1e6) == []


def test_progress_puts_the_deadline_off():
    deadlines = Deadlines[str](LIMITS)
    deadlines.begin("a", "tool", 0.0)
    deadlines.begin("a", "engine", 90.0)  # the tool has answered, and the agent loop asks for tokens
    assert deadlines.next_s == math.inf
    deadlines.begin("a", "tool", 95.0)
    assert over(deadlines, 194.0) == []
    assert over(deadlines, 195.0) == ["a"]


def test_a_wait_that_has_ended_is_never_overdue():
    deadlines = Deadlines[str](LIMITS)
    deadlines.begin("a", "tool", 0.0)
    deadlines.end("a")
    deadlines.end("a")
    assert deadlines.look(1e6) == []


def test_time_in_which_nobody_could_go_on_does_not_count():
    deadlines = Deadlines[str](LIMITS)
    deadlines.begin("a", "tool", 0.0)
    deadlines.put_off(1000.0)
    assert over(deadlines, 1099.0) == []
    assert over(deadlines, 1100.0) == ["a"]


def test_the_oldest_of_many_late_waits_is_named_after_a_tenth_and_again_after_twice_as_long():
    deadlines = Deadlines[str](LIMITS)
    for number in range(20):
        deadlines.begin(f"a{number}", "tool", number / 10)
    said: list[Late[str]] = []
    for now_s in range(100):
        said += deadlines.look(float(now_s))
    assert [(late.key, late.waited_s, late.num_late) for late in said] == [
        ("a0", 10.0, 1),
        ("a0", 20.0, 20),
        ("a0", 40.0, 20),
        ("a0", 80.0, 20),
    ]


def test_whoever_looks_at_the_announced_times_misses_nothing():
    """Any waits: each that is not ended in time is overdue at its deadline exactly."""
    draw = random.Random(7)
    deadlines, due = Deadlines[int](LIMITS), dict[int, float]()
    now_s, ended = 0.0, dict[int, float]()
    for key in range(500):
        now_s += draw.random() * 5
        while deadlines.next_s <= now_s:
            at_s = deadlines.next_s
            ended |= {late.key: at_s for late in deadlines.look(at_s) if late.is_over}
        phase = draw.choice(["tool", "reward", "engine"])
        deadlines.begin(key, phase, now_s)
        if phase in LIMITS:
            due[key] = now_s + LIMITS[phase]
        if draw.random() < 0.5 and key not in ended:
            deadlines.end(key)
            due.pop(key, None)
    while deadlines.next_s < math.inf:
        at_s = deadlines.next_s
        ended |= {late.key: at_s for late in deadlines.look(at_s) if late.is_over}
    assert ended == due
