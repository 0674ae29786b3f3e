from __future__ import annotations

import pytest

from partial_rollout.core.time_mean import TimeWeightedMean


def test_values_count_for_as_long_as_they_hold():
    mean = TimeWeightedMean(10.0)
    mean.change(+4, 10.0)
    mean.change(-2, 13.0)
    assert mean.mean(14.0) == pytest.approx((4 * 3 + 2 * 1) / 4)


def test_restart_keeps_the_value_and_forgets_the_past():
    mean = TimeWeightedMean(0.0, 8.0)
    mean.change(-5, 2.0)
    mean.restart(2.0)
    assert mean.mean(2.0) == 3.0
    assert mean.mean(4.0) == 3.0


def test_time_does_not_go_back():
    mean = TimeWeightedMean(5.0)
    with pytest.raises(ValueError, match=r"from 5\.0 to 4\.0"):
        mean.change(1, 4.0)
