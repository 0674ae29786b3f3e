"""What a row costs and how even a plan is, against numbers done by hand."""

from __future__ import annotations

import pytest

from partial_rollout.errors import ConfigError
from partial_rollout.packing import CostModel, Plan, plan_statistics

LENGTHS = [3, 1, 2, 2]
PLAN = Plan((((0,), (1, 2)), ((3,), (2,))), (2,), 1)


def test_cost_is_linear_plus_quadratic_per_sequence():
    assert CostModel(10, 2).cost([3, 1]) == (30 + 18) + (10 + 2)


def test_the_setting_of_verl():
    assert CostModel.verl().of(1000) == 24576 * 1000 + 1000**2


def test_coefficients_of_a_model():
    """By hand: queries and output 8 x 12, keys and values 8 x 4 each, three MLP matrices 8 x 10, output 8 x 100."""
    cost = CostModel.from_model(
        hidden_size=8, num_layers=5, num_heads=3, num_kv_heads=1, head_dim=4, intermediate_size=10, vocab_size=100
    )
    assert cost.linear == 2 * (5 * (2 * 96 + 2 * 32 + 3 * 80) + 800)
    assert cost.quadratic == 2 * 5 * 2 * 12 / 2


def test_verls_ratio_comes_out_for_the_model_it_was_made_for():
    """Hidden size 4096, 12 h^2 weights a layer, attention without a causal shortcut."""
    cost = CostModel.from_model(
        hidden_size=4096, num_layers=32, num_heads=32, intermediate_size=8 * 4096 // 3, causal=False
    )
    assert cost.linear / cost.quadratic == pytest.approx(24576, rel=1e-4)


def test_a_causal_kernel_halves_the_quadratic_part():
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 128}
    half, whole = CostModel.from_model(**sizes), CostModel.from_model(**sizes, causal=False)
    assert (2 * half.quadratic, half.linear) == (whole.quadratic, whole.linear)


@pytest.mark.parametrize("name", ["hidden_size", "num_layers", "num_heads", "intermediate_size", "head_dim"])
def test_sizes_below_one_are_refused(name: str):
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 128, name: 0}
    with pytest.raises(ConfigError, match="sizes must be 1 or more"):
        CostModel.from_model(**sizes)


def test_statistics_by_hand():
    """Rows of 3 and 1 + 2 tokens, then 2 and 2: squares 9 and 5, then 4 and 4."""
    statistics = plan_statistics(PLAN, LENGTHS)
    assert statistics.square_imbalance == pytest.approx((4 / 7 + 0) / 2)
    assert statistics.token_imbalance == 0
