from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from partial_rollout.packing import imbalance
from partial_rollout.packing.balance import TOLERANCE, Rows, fill_by_count, fill_by_tokens, fill_tightly

FALLING = st.lists(st.integers(1, 50), min_size=1, max_size=60).map(lambda lengths: sorted(lengths, reverse=True))


def row_costs(rows: list[list[int]], costs: list[int]) -> list[int]:
    return [sum(costs[i] for i in row) for row in rows]


@given(FALLING, st.integers(1, 8))
def test_exchanges_never_make_rows_less_even(lengths, num_rows):
    assume(len(lengths) >= num_rows)
    costs = [length**2 for length in lengths]
    rows = fill_by_count(costs, num_rows)
    before, counts = row_costs(rows, costs), [len(row) for row in rows]
    Rows(rows, costs, lengths).even_out()
    after = row_costs(rows, costs)
    assert max(after) <= max(before)
    assert min(after) >= min(before)
    assert [len(row) for row in rows] == counts
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))


def test_the_best_exchange_closes_the_gap():
    """16 against 8: of all pairs only 9 for 5 makes them equal."""
    costs = [9, 7, 5, 3]
    rows = [[0, 1], [2, 3]]
    Rows(rows, costs, costs).even_out()
    assert rows == [[1, 2], [0, 3]]


def test_the_best_partner_may_be_dearer_than_wanted():
    """24 against 20: giving 20 for 19 leaves 23 against 21, giving 4 for 0.5 leaves 20.5 against 23.5."""
    costs = [20, 19, 4, 0.5, 0.5]
    rows = [[0, 2], [1, 3, 4]]
    Rows(rows, costs, [1] * 5).even_out()
    assert rows == [[1, 2], [0, 3, 4]]


def test_rows_even_within_the_tolerance_are_left_alone():
    """10,004 against 9,997: exchanging 4 for 1 would help, by less than matters."""
    assert TOLERANCE * 10_000 > 7
    costs = [10_000, 9_996, 4, 1]
    rows = [[0, 2], [1, 3]]
    Rows(rows, costs, costs).even_out()
    assert rows == [[0, 2], [1, 3]]


def test_an_exchange_keeps_the_budget():
    """9 for 5 would even the rows out, and put 12 tokens into the second; 7 for 5 puts 10 there."""
    lengths = [9, 7, 5, 3]
    rows = [[0, 1], [2, 3]]
    Rows(rows, lengths, lengths).even_out(11)
    assert rows == [[0, 2], [1, 3]]


def test_the_spare_sample_joins_the_cheapest_row():
    assert fill_by_count([9, 8, 1], 2) == [[0], [1, 2]]


def test_greedy_gives_up_where_best_fit_does_not():
    lengths = [6, 6, 5, 5, 4, 4, 3, 3, 3]
    assert fill_by_tokens([length**2 for length in lengths], lengths, 4, 10) is None
    assert len(fill_tightly(lengths, 10)) == 4


def test_a_row_found_full_takes_a_shorter_sample_later():
    """The first row is cheapest but has no room for 5; it has for 2."""
    assert fill_by_tokens([1, 50, 40, 1], [8, 5, 5, 2], 2, 10) == [[0, 3], [1, 2]]


@given(FALLING, st.integers(1, 60))
def test_tight_rows_keep_the_budget(lengths, budget):
    for row in fill_tightly(lengths, budget):
        assert len(row) == 1 or sum(lengths[i] for i in row) <= budget


def test_imbalance_is_spread_over_mean():
    assert imbalance([1, 2, 3]) == pytest.approx(1.0)
