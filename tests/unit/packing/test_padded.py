"""Plans for padded rows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partial_rollout.errors import ConfigError, PackingError
from partial_rollout.packing import Plan
from partial_rollout.packing.plan import padded_tokens, sample_padding_share
from partial_rollout.packing.planners import PaddedPlanner

BATCHES = st.tuples(st.integers(1, 5), st.integers(1, 12)).flatmap(
    lambda size: st.tuples(
        st.just(size[0]), st.lists(st.integers(1, 3000), min_size=size[0] * size[1], max_size=size[0] * size[1])
    )
)
"""Ranks, and as many samples for each."""


@settings(deadline=None)
@given(BATCHES, st.integers(1, 9000))
def test_rows_stay_under_the_budget_with_their_padding(batch: tuple[int, list[int]], budget: int):
    ranks, lengths = batch
    plan = PaddedPlanner(token_budget=budget).plan(lengths, ranks)
    rows = [row for micro_batch in plan.micro_batches for row in micro_batch]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(len({len(row) for row in micro_batch}) == 1 for micro_batch in plan.micro_batches), "equal counts"
    over = [row for row in rows if padded_tokens(row, lengths) > budget]
    assert all(len(row) == 1 for row in over)
    assert plan.rows_over_budget == len(over)


def test_similar_lengths_share_a_row():
    """Two long samples among short ones: as they came, almost every row is padded to a long one."""
    lengths = [900, 12, 10, 11, 12, 10, 850, 11, 12, 10, 11, 12, 10, 11, 12, 10]
    plan = PaddedPlanner(token_budget=9000).plan(lengths, 2)
    as_they_came = Plan(tuple((tuple(range(at, at + 2)), tuple(range(at + 2, at + 4))) for at in range(0, 16, 4)), (4,))
    assert sample_padding_share(plan, lengths) < 0.1 < 0.4 < sample_padding_share(as_they_came, lengths)


def test_ranks_are_dealt_neighbours_so_that_their_rows_have_one_shape():
    plan = PaddedPlanner(token_budget=9000).plan([85, 80, 75, 70, 65, 60, 55, 50], 2)
    assert plan.micro_batches == (((0, 2, 4, 6), (1, 3, 5, 7)),)


def test_little_padding_is_not_worth_a_micro_batch():
    plan = PaddedPlanner(token_budget=9000).plan([90, 12, 10, 11], 2)
    assert plan.num_micro_batches == 1


def test_mini_batches_keep_their_samples():
    plan = PaddedPlanner(token_budget=100, mini_batch_size=4).plan([9, 90, 8, 80, 7, 70, 6, 60], 2)
    members = [sorted(i for rows in part for row in rows for i in row) for part in plan.mini_batches()]
    assert members == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_samples_that_cannot_be_dealt_evenly_are_told():
    with pytest.raises(PackingError, match="5 samples cannot be dealt evenly to 2 ranks"):
        PaddedPlanner(token_budget=10).plan([1] * 5, 2)


def test_a_budget_below_one_is_told():
    with pytest.raises(ConfigError, match="token_budget=0"):
        PaddedPlanner(token_budget=0)
