"""The quickstart problem: which letter comes N places after a given one, with wrap-around?

A prompt `x+03` is worked out one place at a time, letter and places left, then answered: `y02z01a00#a`.
Most N are small and a few are large, so response lengths are heavy-tailed however good the policy is. Demonstrations
mix right work with two faults (a misread start, giving up early), which reinforcement learning can unlearn, and with a
harmless habit (doing the work twice before the answer).
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

LETTERS = string.ascii_lowercase
ANSWER_MARK = "#"
NUM_PLACES_SHORT = (3, 16)
NUM_PLACES_LONG = (40, 99)
LONG_FRACTION = 0.12
"""Above 5 %, so that the 95th percentile of lengths lies among the long ones."""


@dataclass(frozen=True, slots=True)
class Habits:
    """How often the demonstrations show each behaviour."""

    misread: float = 0.55
    """Starts from a letter other than the given one, and so answers wrongly."""
    give_up: float = 0.08
    """Answers with the letter reached so far."""
    redo: float = 0.10
    """Writes the whole work a second time before answering: right, but long."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Move `num_places` (1 to 99) forward from `start`."""

    start: str
    num_places: int

    @property
    def prompt(self) -> str:
        """What the user asks."""
        return f"{self.start}+{self.num_places:02d}"

    @property
    def answer(self) -> str:
        """The letter that is right."""
        return shift(self.start, self.num_places)


def shift(letter: str, num_places: int) -> str:
    """The letter `num_places` after `letter`; a follows z."""
    return LETTERS[(LETTERS.index(letter) + num_places) % len(LETTERS)]


def draw_problem(rng: random.Random) -> Problem:
    """A random problem: mostly with short work, sometimes with very long work."""
    low, high = NUM_PLACES_LONG if rng.random() < LONG_FRACTION else NUM_PLACES_SHORT
    return Problem(start=rng.choice(LETTERS), num_places=rng.randint(low, high))


def work(start: str, num_places: int, *, num_done: int | None = None) -> str:
    """The first `num_done` places (default: all) of the work from `start`."""
    done = num_places if num_done is None else num_done
    return "".join(f"{shift(start, place)}{num_places - place:02d}" for place in range(1, done + 1))


def demonstrate(problem: Problem, rng: random.Random, *, habits: Habits, max_chars: int) -> str:
    """One response in the style of a random habit, at most `max_chars` long unless the plain work is longer."""
    start = _misread(problem.start, rng) if rng.random() < habits.misread else problem.start
    if rng.random() < habits.give_up:
        done = rng.randint(1, problem.num_places - 1)
        return f"{work(start, problem.num_places, num_done=done)}{ANSWER_MARK}{shift(start, done)}"
    text = work(start, problem.num_places)
    if rng.random() < habits.redo and 2 * len(text) + 2 <= max_chars:
        text += text
    return f"{text}{ANSWER_MARK}{shift(start, problem.num_places)}"


def _misread(letter: str, rng: random.Random) -> str:
    return shift(letter, rng.randint(1, len(LETTERS) - 1))
