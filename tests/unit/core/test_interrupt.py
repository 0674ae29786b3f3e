from __future__ import annotations

from typing import get_args

import pytest

from partial_rollout.core.interrupt import MODES, Context, Retained, context_of, mode_of
from partial_rollout.settings.block import TailConfig, field_keys

LEFT = Retained("salt", 3, "kept")


def context(mode, *, retained=LEFT, went_on=False, context_len=50, num_cached_tokens=0):
    return context_of(
        MODES[mode],
        5,
        retained=retained,
        went_on=went_on,
        context_len=context_len,
        num_cached_tokens=num_cached_tokens,
    )


def test_every_mode_of_the_configuration_is_known():
    assert ("auto", *MODES) == get_args(field_keys()["tail.interrupt_mode"].annotation)
    assert mode_of(TailConfig()).name == "abort"


@pytest.mark.parametrize("mode", MODES)
def test_a_first_segment_is_fresh_though_it_finds_a_siblings_prompt(mode):
    assert context(mode, retained=None, context_len=0, num_cached_tokens=32) == Context(5, "fresh")


@pytest.mark.parametrize(
    ("mode", "went_on", "num_cached_tokens", "expected"),
    [
        ("abort", False, 0, Context(5, "abort")),
        ("keep_kv", True, 0, Context(3, "keep_kv", 50)),
        ("keep_kv", False, 0, Context(5, "abort")),
        ("keep_kv", False, 32, Context(3, "keep_kv", 32)),
        ("reuse_kv", False, 32, Context(3, "reuse_kv", 32)),
        ("reuse_kv", False, 0, Context(5, "abort")),
        ("offload_kv", False, 48, Context(3, "offload_kv", 48)),
    ],
)
def test_a_context_is_as_old_as_what_was_found_of_it(mode, went_on, num_cached_tokens, expected):
    assert context(mode, went_on=went_on, num_cached_tokens=num_cached_tokens) == expected


def test_what_was_found_without_being_retained_is_of_the_present_weights():
    """A sibling's prompt: the cache was cleared when the request was interrupted."""
    assert context("abort", num_cached_tokens=32) == Context(5, "abort", 32)
    assert context("reuse_kv", retained=None, num_cached_tokens=32) == Context(5, "abort", 32)
