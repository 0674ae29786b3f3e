"""Problems of reasoning-gym with sizes from 3 to 45, and worked solutions of very different lengths.

A problem's size (terms, words or numbers) is log-normal, so the work that it takes has a heavy tail. A solution shows
no work, or work, or work done twice. The model learns all three habits in its supervised start; reinforcement learning
then prefers the habits whose answers are right.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from partial_rollout.run.smollm2_reasoning_gym.packages import reasoning_gym

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

SOURCE_PREFIX = "reasoning_gym/"
"""A row's data source is this and the task's name, so that verl validates each task by itself."""
ANSWER_MARK = "Answer:"
INSTRUCTION = f"\nEnd with '{ANSWER_MARK}' and the answer."
MAX_SEED = 2**31


@dataclass(frozen=True, slots=True)
class Habits:
    """Shares of the demonstrations that show each habit; the rest shows its work once."""

    direct: float = 0.5
    """Answers without any work."""
    twice: float = 0.15
    """Does the work, does it again to check, then answers."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one task's problems: log-normal, in whole numbers, cut at both ends."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        """One size."""
        drawn = self.median * rng.lognormvariate(0.0, self.sigma)
        return min(self.most, max(self.least, round(drawn)))


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: the task's name in reasoning-gym, and the entry that its verifier needs."""

    task: str
    entry: dict[str, Any]

    @property
    def prompt(self) -> str:
        """What the user asks."""
        return self.entry["question"] + INSTRUCTION

    @property
    def answer(self) -> str:
        """An answer that the verifier accepts."""
        return self.entry["answer"]

    @property
    def entry_json(self) -> str:
        """The entry as text, for a column that all tasks share."""
        return json.dumps(self.entry)


def work_chain_sum(entry: dict[str, Any]) -> str:
    """The sum so far, one term a line."""
    first, *rest = entry["metadata"]["expression"].split()
    total, lines = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total} {sign} {term} = {result}")
        total = result
    return "\n".join(lines)


def work_letter_counting(entry: dict[str, Any]) -> str:
    """Each word spelled, with the count so far, one word a line."""
    letter, total, lines = entry["metadata"]["target_letter"], 0, []
    for word in entry["metadata"]["span"]:
        total += word.lower().count(letter)
        lines.append(f"{' '.join(word.lower())}: {total}")
    return "\n".join(lines)


def work_number_sorting(entry: dict[str, Any]) -> str:
    """The next number and what is left after it, one number a line."""
    left, lines = list(entry["metadata"]["original_numbers"]), []
    for number in entry["metadata"]["sorted_numbers"]:
        left.remove(number)
        lines.append(f"{number} | {', '.join(left)}".rstrip())
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Task:
    """How one task of reasoning-gym is used here."""

    sizes: Sizes
    size_keys: tuple[str, str]
    """Least and most size in reasoning-gym's configuration of the task."""
    settings: tuple[tuple[str, Any], ...]
    work: Callable[[dict[str, Any]], str]


TASKS = {
    "chain_sum": Task(
        Sizes(6, 0.8, 3, 40), ("min_terms", "max_terms"), (("min_digits", 1), ("max_digits", 2)), work_chain_sum
    ),
    "letter_counting": Task(Sizes(8, 0.8, 3, 45), ("min_words", "max_words"), (), work_letter_counting),
    "number_sorting": Task(
        Sizes(4.5, 0.5, 3, 14), ("min_numbers", "max_numbers"), (("max_decimals", 0),), work_number_sorting
    ),
}


def draw_problem(rng: random.Random) -> Problem:
    """A random problem of a random task."""
    name = rng.choice(list(TASKS))
    task = TASKS[name]
    size = task.sizes.draw(rng)
    dataset = _dataset(name, size)
    dataset.seed = rng.randrange(MAX_SEED)  # its items are drawn from this seed and their index
    return Problem(name, dataset[0])


def demonstrate(problem: Problem, rng: random.Random, habits: Habits, fits: Callable[[str], bool]) -> str:
    """A right solution with a random habit; work is shown once, or not at all, where more does not fit."""
    answer, drawn = f"{ANSWER_MARK} {problem.answer}", rng.random()
    if drawn < habits.direct:
        return answer
    work = TASKS[problem.task].work(problem.entry)
    once, twice = f"{work}\n{answer}", f"{work}\nCheck:\n{work}\n{answer}"
    wanted = [twice, once] if drawn < habits.direct + habits.twice else [once]
    return next((text for text in wanted if fits(text)), answer)


@cache
def _dataset(name: str, size: int) -> Any:
    task = TASKS[name]
    settings = dict(task.settings) | dict.fromkeys(task.size_keys, size)
    return reasoning_gym().create_dataset(name, seed=0, size=1, **settings)
