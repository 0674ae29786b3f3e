from __future__ import annotations

import random
from collections import Counter

import pytest

from partial_rollout.run.quickstart.problem import (
    LETTERS,
    Habits,
    Problem,
    demonstrate,
    draw_problem,
    shift,
    work,
)
from partial_rollout.run.quickstart.reward import DATA_SOURCE, compute_score

FAULTLESS = Habits(misread=0.0, give_up=0.0, redo=0.0)
MAX_CHARS = 319


def score(text: str, problem: Problem) -> object:
    return compute_score(DATA_SOURCE, text, problem.answer)


def test_the_work_ends_at_the_answer():
    assert work("x", 3) == "y02z01a00"
    assert Problem("x", 3).prompt == "x+03"
    assert Problem("x", 3).answer == "a"
    assert [shift("a", places) for places in (0, 25, 26, 27)] == ["a", "z", "a", "b"]


def test_faultless_demonstrations_are_right_and_fit():
    rng = random.Random(0)
    for _ in range(500):
        problem = draw_problem(rng)
        text = demonstrate(problem, rng, habits=FAULTLESS, max_chars=MAX_CHARS)
        assert score(text, problem) == 1.0
        assert len(text) <= MAX_CHARS


@pytest.mark.parametrize("habits", [Habits(misread=1.0, give_up=0.0, redo=0.0), Habits(misread=0.0, give_up=1.0)])
def test_each_fault_makes_the_answer_wrong(habits: Habits):
    rng = random.Random(0)
    for _ in range(300):
        problem = draw_problem(rng)
        right = score(demonstrate(problem, rng, habits=habits, max_chars=MAX_CHARS), problem)
        # Giving up a whole turn of the alphabet early is right by luck, so only for long problems.
        assert right == 0.0 or (habits.give_up and problem.num_places > len(LETTERS))


def test_redoing_the_work_is_right_and_twice_as_long():
    problem = Problem("c", 4)
    text = demonstrate(problem, random.Random(0), habits=Habits(0.0, 0.0, 1.0), max_chars=MAX_CHARS)
    assert text == "d03e02f01g00d03e02f01g00#g"
    assert score(text, problem) == 1.0
    assert demonstrate(problem, random.Random(0), habits=Habits(0.0, 0.0, 1.0), max_chars=20) == "d03e02f01g00#g"


def test_lengths_are_heavy_tailed_whatever_the_habits():
    rng = random.Random(0)
    for habits in (FAULTLESS, Habits()):
        texts = [demonstrate(draw_problem(rng), rng, habits=habits, max_chars=MAX_CHARS) for _ in range(4000)]
        lengths = sorted(map(len, texts))
        assert lengths[int(0.95 * len(lengths))] >= 4 * lengths[len(lengths) // 2]


def test_start_letters_are_all_used():
    rng = random.Random(0)
    assert set(Counter(draw_problem(rng).start for _ in range(2000))) == set(LETTERS)
