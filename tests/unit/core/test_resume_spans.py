from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from partial_rollout.core.resume import extend, kv_lags
from partial_rollout.types import ContextSpan, VersionSpan


def spans_of(tokens, make):
    spans = []
    for token in tokens:
        extend(spans, make(*token, 1))
    return spans


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_lags_are_those_of_the_single_tokens(tokens):
    versions = spans_of([(version,) for version, _ in tokens], VersionSpan)
    contexts = spans_of([(kv, "keep_kv") for _, kv in tokens], ContextSpan)
    assert all(one.version != next_one.version for one, next_one in zip(versions, versions[1:], strict=False))
    lags = [lag for lag, count in kv_lags(versions, contexts) for _ in range(count)]
    assert lags == [version - kv for version, kv in tokens]


def test_what_only_one_side_knows_is_left_out():
    assert list(kv_lags([VersionSpan(4, 5)], [ContextSpan(3, "keep_kv", 2)])) == [(1, 2)]
    assert list(kv_lags([VersionSpan(4, 5)], [])) == []
    assert list(kv_lags([], [ContextSpan(3, "keep_kv", 2)])) == []
