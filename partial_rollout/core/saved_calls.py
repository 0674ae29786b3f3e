"""The generate calls of a trajectory as a checkpoint stores them: each token once. Pure.

The prompt of a later call mostly is the prompt of the call before, its response, and what a tool or a user said to it.
So a stored call has what its prompt adds, and how many tokens it has in common with the call before.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from partial_rollout.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from partial_rollout.core.resume import GenerationState


def fold(calls: Iterable[GenerationState]) -> list[GenerationState]:
    """Leave out of each prompt what the call before has; the calls are those of one trajectory, in order.

    >>> from partial_rollout.core.resume import GenerationState
    >>> def call(prompt_ids, token_ids):
    ...     return GenerationState(prompt_ids, token_ids, None, [], "completed", 0, 0)
    >>> first, second = fold([call([1, 2], [3]), call([1, 2, 3, 9], [4])])
    >>> second.prompt_ids, second.num_shared
    ([9], 3)
    >>> unfold([first, second])[1].prompt_ids
    [1, 2, 3, 9]
    """
    folded: list[GenerationState] = []
    before: list[int] = []
    for call in calls:
        shared = num_shared(before, call.prompt_ids)
        folded.append(replace(call, prompt_ids=call.prompt_ids[shared:], num_shared=shared))
        before = call.prompt_ids + call.token_ids
    return folded


def unfold(calls: Iterable[GenerationState]) -> list[GenerationState]:
    """The calls with their whole prompts; those of release 0.1, which were stored with them, stay as they are.

    Raises:
        DataError: a call has more in common with the call before than that one has.
    """
    whole: list[GenerationState] = []
    before: list[int] = []
    for call in calls:
        if call.num_shared > len(before):
            raise DataError(
                f"a saved generate call shares {call.num_shared} tokens with the call before, which has {len(before)}"
            )
        prompt_ids = before[: call.num_shared] + call.prompt_ids
        whole.append(replace(call, prompt_ids=prompt_ids, num_shared=0))
        before = prompt_ids + call.token_ids
    return whole


def num_shared(before: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    num = min(len(before), len(prompt_ids))
    if before[:num] == prompt_ids[:num]:  # nearly always; a loop over tokens takes fifty times as long
        return num
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, prompt_ids, strict=False)))
