"""Tokens of unfinished trajectories in the log of rollouts: each record has what the ones before it lack. Pure.

    first record of a trajectory in a file    all of its generate calls so far
    each further one                          new tokens and calls; it names the record before by its checksum

So a file has each token of an unfinished trajectory once. Records that are lost at the end of a file cost their own
tokens only, and a record whose predecessor is missing is not used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from partial_rollout.core.resume import GenerationState
from partial_rollout.core.rollout_log import (
    Call,
    Interrupted,
    checksum,
    encode,
    pack_ids,
    pack_log_probs,
    unpack_ids,
    unpack_log_probs,
)
from partial_rollout.core.saved_calls import num_shared
from partial_rollout.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from partial_rollout.core.resume import ResumableGeneration


class Written:
    """What a file of the log has of a trajectory that has not ended.

    >>> from partial_rollout.core.interrupt import FRESH, Context
    >>> from partial_rollout.core.resume import ABORTED, ResumableGeneration, Segment
    >>> from partial_rollout.core.rollout_log import decode
    >>> generation, written = ResumableGeneration([1, 2], 8), Written()
    >>> for version, token in enumerate([5, 6]):
    ...     segment = Segment([token], [-0.5], ABORTED, version, version, Context(version, FRESH))
    ...     _ = generation.add(segment)
    ...     record = decode(written.more("a_0", 1, [generation]))
    ...     unpack_ids(record.calls[0].prompt_ids), unpack_ids(record.calls[0].token_ids)
    ([1, 2], [5])
    ([], [6])
    >>> written.more("a_0", 1, [generation]) is None  # the file has it all
    True
    """

    def __init__(self) -> None:
        """Nothing."""
        self._calls: list[tuple[int, bool]] = []
        """By generate call: how many of its tokens, and whether it has ended."""
        self._last = 0
        """Checksum of the last record."""

    def more(
        self, key: str, claim_id: int, calls: Sequence[ResumableGeneration], *, between_calls: bool = False
    ) -> bytes | None:
        """The record to write now; None if no unfinished call has tokens that the file lacks.

        `between_calls`: an ended call counts too.

        Raises:
            TypeError, ValueError, OverflowError: a token or log-prob that no record can hold.
        """
        num_known = [num for num, _ in self._calls] + [0] * (len(calls) - len(self._calls))
        lacks = (len(call.token_ids) > num for call, num in zip(calls, num_known, strict=True))
        if not any(lack and (between_calls or not call.finished) for call, lack in zip(calls, lacks, strict=True)):
            return None
        now = [(len(call.token_ids), call.finished) for call in calls]
        changed = [number for number in range(len(calls)) if self._calls[number : number + 1] != [now[number]]]
        added = [self._call(calls, number, first=num_known[number]) for number in changed]
        payload = encode(Interrupted(key=key, claim_id=claim_id, after=self._last, calls=added))
        self._calls, self._last = now, checksum(payload)
        return payload

    def _call(self, calls: Sequence[ResumableGeneration], number: int, first: int) -> Call:
        call, is_new = calls[number], number >= len(self._calls)
        before = calls[number - 1].prompt_ids + calls[number - 1].token_ids if is_new and number else []
        shared = num_shared(before, call.prompt_ids)
        return Call(
            number=number,
            num_shared=shared,
            prompt_ids=pack_ids(call.prompt_ids[shared:] if is_new else []),
            token_ids=pack_ids(call.token_ids[first:]),
            log_probs=None if call.log_probs is None else pack_log_probs(call.log_probs[first:]),
            spans=call.spans,
            context_spans=call.context_spans,
            stop_reason=call.stop_reason,
            num_interruptions=call.num_interruptions,
            num_reprefilled_tokens=call.num_reprefilled_tokens,
            settings=call.settings if is_new else "",
        )


def join(records: Iterable[Interrupted]) -> list[GenerationState]:
    """The generate calls of a trajectory from its records in their order, folded as a checkpoint has them.

    Raises:
        DataError: the records do not follow each other.
    """
    calls: list[GenerationState] = []
    for record in records:
        for call in record.calls:
            if call.number > len(calls):
                raise DataError(f"trajectory {record.key}: generate call {call.number} comes after {len(calls)} others")
            if call.number == len(calls):
                calls.append(_begun(call))
            calls[call.number] = _longer(calls[call.number], call)
    return calls


def _begun(call: Call) -> GenerationState:
    return GenerationState(
        prompt_ids=unpack_ids(call.prompt_ids),
        token_ids=[],
        log_probs=None,
        spans=[],
        stop_reason=None,
        num_interruptions=0,
        num_reprefilled_tokens=0,
        settings=call.settings,
        num_shared=call.num_shared,
    )


def _longer(state: GenerationState, call: Call) -> GenerationState:
    log_probs = state.log_probs
    if call.log_probs is not None:
        log_probs = (log_probs or []) + unpack_log_probs(call.log_probs)
    return replace(
        state,
        token_ids=state.token_ids + unpack_ids(call.token_ids),
        log_probs=log_probs,
        spans=call.spans,
        context_spans=call.context_spans,
        stop_reason=call.stop_reason,
        num_interruptions=call.num_interruptions,
        num_reprefilled_tokens=call.num_reprefilled_tokens,
    )
