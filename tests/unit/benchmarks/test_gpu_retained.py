"""What the comparison of interrupted with uninterrupted requests calls right."""

from __future__ import annotations

import pytest

from benchmarks.gpu import retained
from benchmarks.gpu.retained import BLOCK_SIZE, NUM_PROMPT, NUM_REQUESTS, TOLERANCE, difference, is_right, num_equal

SENT = 3200
RIGHT = {
    "sent_again": SENT,
    "found": SENT - NUM_REQUESTS,
    "max_difference": TOLERANCE / 2,
    "equal_tokens": 100,
    "equal_tokens_after_others": 4,
    "of_tokens": 100,
}


def test_log_probs_count_up_to_the_first_other_token():
    wanted = [5, 6, 7], [-1.0, -2.0, -3.0]
    assert difference(([5, 6, 7], [-1.0, -2.5, -3.0]), wanted) == 0.5
    assert difference(([5, 9, 7], [-1.0, -2.25, -9.0]), wanted) == 0.25
    assert difference(([5], [-1.125]), wanted) == 0.125
    assert num_equal([([5, 9, 7], []), ([5], [])], [wanted, wanted]) == 3


def test_what_is_right():
    assert is_right(RIGHT, retains_kv=True)
    assert is_right(RIGHT | {"found": NUM_REQUESTS * NUM_PROMPT}, retains_kv=False)


def test_what_a_gpu_computes_again_is_not_judged_but_may_not_be_found(monkeypatch):
    other = RIGHT | {"found": 0, "max_difference": 9.0}
    monkeypatch.setattr(retained, "HAS_GPU", True)
    assert is_right(other, retains_kv=False) is None
    assert is_right(other | {"found": SENT}, retains_kv=False) is False
    assert is_right(other | {"found": SENT}, retains_kv=True) is False


@pytest.mark.parametrize(
    ("wrong", "retains_kv"),
    [
        ({"max_difference": 2 * TOLERANCE}, True),
        ({"max_difference": 2 * TOLERANCE, "found": 0}, False),
        ({"equal_tokens": 90}, True),
        ({"equal_tokens_after_others": 51}, True),
        ({"found": SENT - NUM_REQUESTS * BLOCK_SIZE - 1}, True),
        ({"found": NUM_REQUESTS * NUM_PROMPT + 1}, False),
    ],
    ids=[
        "other log-probs",
        "computed again to other log-probs",
        "other tokens",
        "would not be seen",
        "not found",
        "old KV is found",
    ],
)
def test_what_is_not_right(wrong, retains_kv):
    assert not is_right(RIGHT | wrong, retains_kv=retains_kv)
