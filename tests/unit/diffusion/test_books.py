"""Groups of images are conserved: each one that was begun is trained once, or not trained yet."""

from __future__ import annotations

import random

import pytest

from partial_rollout.diffusion.books import Books, drawn
from partial_rollout.errors import DataError, IllegalTransition


@pytest.mark.parametrize("seed", range(20))
def test_no_group_is_trained_twice_or_lost_whatever_is_killed(seed):
    """Random groups are taken; at random moments the run dies and goes on from its last checkpoint."""
    draw, books, trained = random.Random(seed), Books(2), list[list[int]]()
    saved, saved_steps = books.as_mapping(), 0
    while books.version < 10:
        while len(books.untrained) < 5:
            books.begin()
        batch = draw.sample(books.untrained, 2)
        books.take(batch)
        if draw.random() < 0.8:
            books.trained()
            trained.append(batch)
        if draw.random() < 0.4:
            saved, saved_steps = books.as_mapping(), len(trained)
        if draw.random() < 0.3:
            books, trained = Books.read(2, saved), trained[:saved_steps]
        elif books._in_training:
            books.trained()
            trained.append(batch)
    once = [number for batch in trained for number in batch]
    assert len(once) == len(set(once)) == books.num_trained
    assert sorted([*once, *books.untrained]) == list(range(books.as_mapping()["next_group"]))


def test_what_cannot_be_taken_is_named():
    books = Books(1)
    books.begin()
    with pytest.raises(IllegalTransition, match=r"groups \[1\] cannot be taken: in flight \[0\]"):
        books.take([1])
    books.take([0])
    with pytest.raises(IllegalTransition, match=r"in training \[0\]"):
        books.take([0])
    books.trained()
    with pytest.raises(IllegalTransition, match="without groups in training"):
        books.trained()


@pytest.mark.parametrize("untrained", [[2], [1, 2, 3], [2, 5]])
def test_books_that_do_not_add_up_are_refused(untrained):
    with pytest.raises(DataError, match="do not add up: 4 groups begun, 2 trained in 1 steps of 2"):
        Books.read(2, {"step": 1, "next_group": 4, "untrained": untrained})


def test_what_a_group_asks_for_depends_on_its_number_and_the_seed():
    asked = [drawn(seed, number, num_prompts=1000, num_images=2) for seed in (0, 1) for number in (0, 1)]
    assert len({(row, *seeds) for row, seeds in asked}) == 4
    row, seeds = asked[0]
    assert 0 <= row < 1000
    assert len(set(seeds)) == 2
