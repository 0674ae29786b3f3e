"""Which groups of images a job has begun and trained, so that none is trained twice and none is lost. Pure.

    begin -> in flight -> take -> in training -> trained: gone
                ^                     |
                +--- a new start -----+      what is not trained is generated again

Groups have numbers, from 0. What a group asks for is a function of the run's seed and its number: after a new start it
asks for the same prompt with the same noise. So a checkpoint holds numbers, and no state of a random generator.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from partial_rollout.errors import DataError, IllegalTransition

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

SEED_LIMIT = 2**31


class Books:
    """The groups of one run, over all its starts.

    >>> books = Books(batch_size=2)
    >>> [books.begin() for _ in range(3)]
    [0, 1, 2]
    >>> books.take([0, 2])
    >>> books.untrained  # half a step counts as none
    [0, 1, 2]
    >>> books.trained()
    >>> books.version, books.untrained
    (1, [1])
    >>> Books.read(2, books.as_mapping()).as_mapping() == books.as_mapping()
    True
    """

    def __init__(self, batch_size: int) -> None:
        """Nothing is begun; `batch_size` groups are trained in a step."""
        self._batch_size = batch_size
        self.version = 0
        """Steps that were trained; also the version of the trained weights."""
        self._next = 0
        self._in_flight: set[int] = set()
        self._in_training: set[int] = set()

    @property
    def untrained(self) -> list[int]:
        """Groups that were begun and are not trained, in their order."""
        return sorted(self._in_flight | self._in_training)

    @property
    def num_trained(self) -> int:
        """Groups that were trained."""
        return self.version * self._batch_size

    def begin(self) -> int:
        """The number of a new group."""
        number, self._next = self._next, self._next + 1
        self._in_flight.add(number)
        return number

    def take(self, numbers: Collection[int]) -> None:
        """Put groups into training: the step that begins trains them.

        Raises:
            IllegalTransition: one of them is not in flight, or another step has not ended.
        """
        known = self._in_flight.issuperset(numbers) and not self._in_training
        if not known or len(set(numbers)) != self._batch_size:
            raise IllegalTransition(
                f"books: groups {sorted(numbers)} cannot be taken: in flight {sorted(self._in_flight)}, in training "
                f"{sorted(self._in_training)}, {self._batch_size} a step"
            )
        self._in_flight.difference_update(numbers)
        self._in_training = set(numbers)

    def trained(self) -> None:
        """The step has trained what it took.

        Raises:
            IllegalTransition: no step is under way.
        """
        if not self._in_training:
            raise IllegalTransition("books: event 'trained' without groups in training")
        self._in_training = set()
        self.version += 1

    def as_mapping(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"step": self.version, "next_group": self._next, "untrained": self.untrained}

    @classmethod
    def read(cls, batch_size: int, mapping: Mapping[str, Any]) -> Books:
        """Books from a checkpoint, with nothing in training.

        Raises:
            DataError: they do not add up: groups begun are groups trained and groups that are not.
        """
        books = cls(batch_size)
        books.version, books._next = int(mapping["step"]), int(mapping["next_group"])
        books._in_flight = set(mapping["untrained"])
        accounted = books.num_trained + len(books._in_flight)
        if accounted != books._next or any(not 0 <= number < books._next for number in books._in_flight):
            raise DataError(
                f"the books of the checkpoint do not add up: {books._next} groups begun, {books.num_trained} trained "
                f"in {books.version} steps of {batch_size}, not trained: {books.untrained}"
            )
        return books


def drawn(run_seed: int, number: int, *, num_prompts: int, num_images: int) -> tuple[int, list[int]]:
    """What group `number` asks for: the row of its prompt, and the seed of each image's noise.

    >>> drawn(0, 7, num_prompts=100, num_images=2) == drawn(0, 7, num_prompts=100, num_images=2)
    True
    """
    # Seeded with a string, which Random hashes with SHA-512; a tuple's hash differs between processes.
    draw = random.Random(repr(("group", run_seed, number)))
    return draw.randrange(num_prompts), [draw.randrange(SEED_LIMIT) for _ in range(num_images)]
