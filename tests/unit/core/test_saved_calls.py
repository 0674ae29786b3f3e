"""What a checkpoint stores of a trajectory's calls: every token once, and nothing lost."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partial_rollout.core.resume import GenerationState
from partial_rollout.core.saved_calls import fold, unfold
from partial_rollout.errors import DataError
from partial_rollout.types import VersionSpan

RESPONSE_LEN, TOOL_LEN, PROMPT_LEN = 100, 20, 100


def call(prompt_ids: list[int], token_ids: list[int]) -> GenerationState:
    log_probs = [-0.1 * (token % 7 + 0.5) for token in token_ids]
    return GenerationState(prompt_ids, token_ids, log_probs, [VersionSpan(3, len(token_ids))], "completed", 1, 7, "t=1")


def conversation(num_turns: int) -> list[GenerationState]:
    """Calls as verl's tool agent makes them: it asks with all that was said before, and the tool's answer to it."""
    prompt, calls = [50_000 + i for i in range(PROMPT_LEN)], []
    for turn in range(num_turns):
        response = [100_000 + turn * RESPONSE_LEN + i for i in range(RESPONSE_LEN)]
        calls.append(call(prompt, response))
        prompt = [*prompt, *response, *range(1_000, 1_000 + TOOL_LEN)]
    return calls


def bytes_a_token(calls: list[GenerationState]) -> float:
    return len(msgspec.msgpack.encode(calls)) / sum(len(each.token_ids) for each in calls)


tokens = st.lists(st.integers(0, 3), max_size=6)


@given(st.lists(st.tuples(tokens, tokens, st.integers(0, 12)), max_size=8))
def test_any_calls_come_back_as_they_were(drawn: list[tuple[list[int], list[int], int]]) -> None:
    """A prompt goes on from the call before, or from a part of it, or is another one."""
    calls, before = [], []
    for added, response, num_kept in drawn:
        calls.append(call(before[:num_kept] + added, response))
        before = calls[-1].prompt_ids + response
    folded = fold(calls)
    assert unfold(folded) == calls
    assert fold(unfold(folded)) == folded
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(folded), type=list[GenerationState]) == folded
    stored = sum(len(each.prompt_ids) for each in folded)
    assert stored <= sum(len(each.prompt_ids) for each in calls)


def test_sixty_turns_take_no_more_bytes_a_token_than_one() -> None:
    one, sixty = conversation(1), conversation(60)
    assert bytes_a_token(sixty) > 5 * bytes_a_token(one)
    assert bytes_a_token(fold(sixty)) < 1.1 * bytes_a_token(fold(one))
    assert max(bytes_a_token(fold(one)), bytes_a_token(fold(sixty))) < 19  # docs/operations.md
    assert [len(each.prompt_ids) for each in fold(sixty)] == [PROMPT_LEN] + [TOOL_LEN] * 59


def test_a_call_that_asks_something_else_keeps_what_it_has_in_common() -> None:
    _, other = fold([call([1, 2, 3], [4]), call([1, 2, 9, 4], [5])])
    assert (other.prompt_ids, other.num_shared) == ([9, 4], 2)


def test_the_calls_of_an_old_checkpoint_have_whole_prompts() -> None:
    calls = conversation(3)
    assert unfold(calls) == calls


def test_a_call_without_the_one_before_is_told() -> None:
    _, second = fold(conversation(2))
    with pytest.raises(DataError, match="shares 200 tokens with the call before, which has 0"):
        unfold([second])
    with pytest.raises(DataError, match="shares 201 tokens"):
        unfold([*fold(conversation(1)), replace(second, num_shared=201)])
