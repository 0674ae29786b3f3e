from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, example, given, reject
from hypothesis import strategies as st

from partial_rollout.errors import ConfigError, PackingError
from partial_rollout.packing import (
    CostModel,
    GlobalPlanner,
    Plan,
    Planner,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTHS = st.lists(st.integers(1, 40) | st.integers(1, 400) | st.just(400), min_size=1, max_size=80)
RANKS = st.integers(1, 5)
BUDGETS = st.integers(1, 600)
COSTS = st.sampled_from([CostModel.squares(), CostModel.verl(), CostModel(1, 0)])


@st.composite
def planners(draw: st.DrawFn, mini_batch_size: int | None = None) -> Planner:
    return GlobalPlanner(draw(BUDGETS), draw(COSTS), mini_batch_size=mini_batch_size)


def plan_of(planner: Planner, lengths: list[int], num_ranks: int) -> Plan:
    """The plan; under a budget there may be none, but only for samples that are no multiple of the ranks."""
    assume(len(lengths) >= num_ranks)
    if len(lengths) % num_ranks == 0:
        return planner.plan(lengths, num_ranks)
    try:
        return planner.plan(lengths, num_ranks)
    except PackingError:
        reject()


def rows_of(plan: Plan) -> list[tuple[int, ...]]:
    return [row for rows in plan.micro_batches for row in rows]


def test_contract_of_positional_arguments():
    assert GlobalPlanner(100).cost == CostModel.verl()
    assert GlobalPlanner(100, CostModel(1, 2), mini_batch_size=4).cost == CostModel(1, 2)


# The four faults found in earlier implementations, one test each.


@given(planners(), LENGTHS, RANKS)
def test_every_sample_is_in_exactly_one_row_the_last_partial_micro_batch_included(planner, lengths, num_ranks):
    plan = plan_of(planner, lengths, num_ranks)
    assert sorted(index for row in rows_of(plan) for index in row) == list(range(len(lengths)))


@given(planners(), LENGTHS, RANKS)
def test_no_row_is_empty(planner, lengths, num_ranks):
    assert all(rows_of(plan_of(planner, lengths, num_ranks)))


@given(planners(), LENGTHS, RANKS)
def test_every_rank_has_the_same_number_of_micro_batches(planner, lengths, num_ranks):
    plan = plan_of(planner, lengths, num_ranks)
    assert {len(rows) for rows in plan.micro_batches} == {num_ranks}
    assert {len(plan.for_rank(rank)) for rank in range(num_ranks)} == {plan.num_micro_batches}
    assert sum(plan.micro_batches_per_mini_batch) == plan.num_micro_batches


@given(BUDGETS, COSTS, LENGTHS, RANKS)
def test_a_row_over_the_budget_is_one_longer_sample_and_is_counted(budget, cost, lengths, num_ranks):
    plan = plan_of(GlobalPlanner(budget, cost), lengths, num_ranks)
    over = [row for row in rows_of(plan) if sum(lengths[i] for i in row) > budget]
    assert all(len(row) == 1 for row in over)
    assert plan.rows_over_budget == len(over) == sum(length > budget for length in lengths)


@st.composite
def tight_batches(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Lengths, ranks and a budget of half to three of the longest: exchanges within the ranks' rows must heed it."""
    num_ranks, per_rank = draw(st.integers(2, 4)), draw(st.integers(2, 10))
    lengths = draw(st.lists(st.integers(1, 400), min_size=num_ranks * per_rank, max_size=num_ranks * per_rank))
    longest = max(lengths)
    return lengths, num_ranks, draw(st.integers((longest + 1) // 2, 3 * longest))


@given(tight_batches(), COSTS)
@example(([281, 106, 16, 190, 66, 55, 105, 323, 383, 114], 2, 508), CostModel.squares())
@example(([12, 1, 12, 6, 3, 2, 6, 8, 9], 3, 21), CostModel.squares())
def test_exchanges_stay_under_the_budget(batch, cost):
    lengths, num_ranks, budget = batch
    plan = GlobalPlanner(budget, cost).plan(lengths, num_ranks)
    over = [row for row in rows_of(plan) if sum(lengths[i] for i in row) > budget]
    assert all(len(row) == 1 for row in over)
    assert plan.rows_over_budget == len(over)


@given(planners(), LENGTHS, RANKS)
def test_same_input_same_plan(planner, lengths, num_ranks):
    assert plan_of(planner, lengths, num_ranks) == plan_of(planner, list(lengths), num_ranks)


@given(st.data(), LENGTHS, RANKS, st.integers(1, 30))
def test_nothing_moves_across_mini_batches(data, lengths, num_ranks, size):
    assume(size >= num_ranks and size % num_ranks == 0 and (len(lengths) % size) % num_ranks == 0)
    plan = plan_of(data.draw(planners(mini_batch_size=size)), lengths, num_ranks)
    parts = [sorted(i for rows in micro_batches for row in rows for i in row) for micro_batches in plan.mini_batches()]
    assert parts == [list(range(len(lengths)))[at : at + size] for at in range(0, len(lengths), size)]


@given(BUDGETS, LENGTHS, RANKS)
def test_every_rank_has_as_many_samples(budget, lengths, num_ranks):
    plan = plan_of(GlobalPlanner(budget), lengths, num_ranks)
    counts = [sum(map(len, plan.for_rank(rank))) for rank in range(num_ranks)]
    assert max(counts) - min(counts) == (len(lengths) % num_ranks > 0)


@pytest.mark.parametrize(
    ("lengths", "budget", "num_ranks", "expected"),
    [
        ([100] * 8, 400, 2, 1),
        ([100] * 10, 400, 2, 2),
        ([500, 500, 10, 10], 100, 2, 2),  # two longer than the budget: one row each
        ([1] * 100, 1000, 4, 1),
        ([6, 6, 5, 5, 4, 4, 3, 3, 3], 10, 1, 4),  # the greedy does not find it, best fit does
    ],
)
def test_as_few_micro_batches_as_the_budget_allows(lengths, budget, num_ranks, expected):
    assert GlobalPlanner(budget).plan(lengths, num_ranks).num_micro_batches == expected


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to put the items into rows."""
    if not items:
        yield []
        return
    for rows in partitions(items[1:]):
        yield [[items[0]], *rows]
        yield from ([*rows[:at], [items[0], *rows[at]], *rows[at + 1 :]] for at in range(len(rows)))


@given(st.lists(st.integers(1, 10), min_size=1, max_size=6), st.integers(10, 13))
def test_small_batches_of_one_rank_against_exhaustive_search(lengths, budget):
    """The planner makes as few micro-batches as possible for all of these batches."""
    fitting = [len(rows) for rows in partitions(lengths) if max(map(sum, rows)) <= budget]
    assert GlobalPlanner(budget).plan(lengths, 1).num_micro_batches == min(fitting)


def test_tight_rows_are_split_until_nobody_is_idle():
    """One rank needs 21 rows; for the other one the greedy finds no 21, and best fit puts its samples into 20."""
    lengths = [25] * 11 + [24, 23, 21, 21, 20, 19, 18] + [16] * 6 + [14] * 4 + [13] * 2 + [12] * 6 + [11] * 2
    lengths += [10] * 9 + [9] * 2 + [8] * 8 + [7] * 8 + [6] * 5 + [4] * 4 + [3] * 2 + [2] * 4 + [1] * 8
    plan = GlobalPlanner(25).plan(lengths, 2)
    assert [len(rows) for rows in plan.micro_batches] == [2] * 21
    assert max(sum(lengths[i] for i in row) for row in rows_of(plan)) <= 25


@given(LENGTHS)
def test_a_budget_of_one_token_puts_every_sample_alone(lengths):
    plan = plan_of(GlobalPlanner(1), lengths, 1)
    assert plan.num_micro_batches == len(lengths)
    assert plan.rows_over_budget == sum(length > 1 for length in lengths)


def test_a_large_plan_ends_with_a_micro_batch_for_every_sample_if_it_must():
    """Steps over numbers of micro-batches must not step over the last one, which always works."""
    lengths = [51] * 400
    assert GlobalPlanner(100).plan(lengths, 2).num_micro_batches == 200


def published_lengths(num: int, seed: int) -> list[int]:
    """Completions log-normal with median 700 and sigma 0.9, about 10 % at 4,096; prompts around 256."""
    rng = random.Random(seed)
    completions = (4096 if rng.random() < 0.077 else min(4096, rng.lognormvariate(6.551, 0.9)) for _ in range(num))
    return [1 + int(completion) + int(rng.lognormvariate(5.545, 0.4)) for completion in completions]


def step_cost(plan: Plan, lengths: list[int], cost: CostModel) -> float:
    """Time of a step in which ranks wait for each other in every micro-batch: the sum of the slowest rows."""
    return sum(max(cost.cost(lengths[i] for i in row) for row in rows) for rows in plan.micro_batches)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("per_rank", "budget", "share"), [(16, 16_384, 0.005), (128, 8192, 0.01)])
def test_global_rows_cost_the_same_in_the_model_they_are_told(seed: int, per_rank, budget, share):
    """The slowest rows of all micro-batches add up to hardly more than a perfect split."""
    lengths, cost = published_lengths(8 * per_rank, seed), CostModel(10_000, 1)
    plan = GlobalPlanner(budget, cost).plan(lengths, 8)
    assert step_cost(plan, lengths, cost) <= (1 + share) * cost.cost(lengths) / 8


def test_ranks_even_out_over_micro_batches():
    """Rows of 10 and 8 tokens in both micro-batches: nobody has the longer one twice."""
    plan = GlobalPlanner(10).plan([10, 8, 10, 9], 2)
    totals = [sum([10, 8, 10, 9][i] for row in plan.for_rank(rank) for i in row) for rank in range(2)]
    assert sorted(totals) == [18, 19]


@pytest.mark.parametrize(
    ("planner", "lengths", "num_ranks", "message"),
    [
        (GlobalPlanner(9), [], 1, "no samples"),
        (GlobalPlanner(9), [5, 5], 3, "2 samples from index 0 on for 3 data-parallel ranks"),
        (GlobalPlanner(9, mini_batch_size=2), [5] * 5, 2, "1 samples from index 4 on for 2"),
        (GlobalPlanner(9), [5, 0], 1, "sample 1 has 0 tokens"),
        (GlobalPlanner(9, mini_batch_size=2), [5, 5, -1, 5], 2, "sample 2 has -1 tokens"),
        (GlobalPlanner(5), [5, 5, 5], 2, "3 samples of 5 to 5 tokens into rows of at most 5.*multiple of 2"),
    ],
)
def test_samples_without_a_plan_are_refused(planner: Planner, lengths, num_ranks, message):
    with pytest.raises(PackingError, match=message):
        planner.plan(lengths, num_ranks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GlobalPlanner(0), "token_budget=0"),
        (lambda: GlobalPlanner(-5), "token_budget=-5"),
        (lambda: GlobalPlanner(5, mini_batch_size=0), "mini_batch_size=0"),
        (lambda: GlobalPlanner(1).plan([1], 0), "num_ranks=0"),
        (lambda: CostModel(0, 0), "linear=0, quadratic=0"),
        (lambda: CostModel(-1, 1), "linear=-1"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
