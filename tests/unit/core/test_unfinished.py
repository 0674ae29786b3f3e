"""Tokens of unfinished trajectories in the log: whatever is left of the records, no token is a wrong one."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partial_rollout.core.interrupt import FRESH, Context
from partial_rollout.core.replay import History, Place
from partial_rollout.core.resume import ABORTED, STOPPED, GenerationState, ResumableGeneration, Segment
from partial_rollout.core.rollout_log import (
    GivenUp,
    Interrupted,
    checksum,
    decode,
    encode,
    frame,
    pack_ids,
    read_interrupted,
    unpack_log_probs,
)
from partial_rollout.core.saved_calls import fold, unfold
from partial_rollout.core.unfinished import Written, join
from partial_rollout.errors import DataError
from tests.unit.core.test_replay import BASE, admitted, opened, plan, taken, told

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.core.replay import Plan

BUDGET = 64


def segment(*token_ids: int, end: str = ABORTED, version: int = 3) -> Segment:
    return Segment(list(token_ids), [-0.5] * len(token_ids), end, version, version, Context(version, FRESH))


def interrupted(
    key: str, *versions: int, claim_id: int = 5, first: int = 10, prompt: Sequence[int] = (1, 2)
) -> list[bytes]:
    """The records of a response that got a token of each of these weight versions."""
    generation, written = ResumableGeneration(list(prompt), BUDGET), Written()
    payloads: list[bytes | None] = []
    for token, version in enumerate(versions, first):
        generation.add(segment(token, version=version))
        payloads.append(written.more(key, claim_id, [generation]))
    return [payload for payload in payloads if payload is not None]


def tell(history: History, payloads: Sequence[bytes], number: int = 1) -> History:
    """Tell the history of the payloads as the reader of a worker's file does."""
    for payload in payloads:
        record = decode(payload)
        assert record is not None
        place = Place(f"file {number}", PAYLOADS.setdefault(payload, len(PAYLOADS)), len(payload), checksum(payload))
        history.tell_of_worker(record, number, place)
    return history


PAYLOADS: dict[bytes, int] = {}
"""Where each payload stands."""


def goes_on_from(found: Plan, key: str) -> list[GenerationState]:
    """What a worker reads."""
    at = {number: payload for payload, number in PAYLOADS.items()}
    places = found.unfinished[key]
    records = read_interrupted([frame(at[p.offset]) for p in places], key, [p.checksum for p in places])
    return unfold(join(records))


def tokens(found: Plan, key: str = "a_0") -> list[int]:
    (state,) = goes_on_from(found, key)
    return state.token_ids


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[list[bytes], list[list[GenerationState]]]:
    """Records of a trajectory of several turns, and its generate calls at each of them."""
    written, calls, payloads, moments = (
        Written(),
        list[ResumableGeneration](),
        list[bytes](),
        list[list[GenerationState]](),
    )
    prompt, version = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)), itertools.count(1)
    for _ in range(draw(st.integers(1, 3))):
        calls.append(ResumableGeneration(prompt, BUDGET, settings=draw(st.sampled_from(["", "temperature=1.0"]))))
        for end in [*[ABORTED] * draw(st.integers(0, 3)), STOPPED]:
            calls[-1].add(segment(*draw(st.lists(st.integers(0, 3), max_size=2)), end=end, version=next(version)))
            payload = written.more("a_0", 5, calls)
            if payload is not None:
                payloads.append(payload)
                moments.append([call.state() for call in calls])
        # A tool's answer; or the agent loop leaves part of what was said out of the next prompt.
        kept = draw(st.integers(0, len(prompt)))
        prompt = prompt[:kept] + calls[-1].token_ids + draw(st.lists(st.integers(0, 3), min_size=1, max_size=2))
    return payloads, moments


@given(trajectories())
def test_the_first_records_are_the_calls_of_their_moment(made: tuple[list[bytes], list[list[GenerationState]]]) -> None:
    payloads, moments = made
    for num, moment in enumerate(moments, 1):
        records = [decode(payload) for payload in payloads[:num]]
        folded = join(record for record in records if isinstance(record, Interrupted))
        assert unfold(folded) == moment
        assert folded == fold(moment)


@given(trajectories(), st.data())
def test_whatever_is_left_of_the_records_in_whatever_order_is_a_moment_of_the_trajectory(
    made: tuple[list[bytes], list[list[GenerationState]]], data: st.DataObject
) -> None:
    payloads, moments = made
    left = data.draw(st.lists(st.sampled_from(payloads), max_size=8)) if payloads else []
    history = tell(told(History(), 1, *(taken(step) for step in range(BASE + 1, 40))), left)
    found = plan(history, unfinished=("a",))
    assert ("a_0" in found.unfinished) == (bool(payloads) and payloads[0] in left)
    if found.unfinished:
        assert goes_on_from(found, "a_0") in moments


def test_each_token_is_written_once_and_a_call_that_ends_by_itself_writes_nothing() -> None:
    written, first, second = Written(), ResumableGeneration([1, 2], 8), ResumableGeneration([1, 2, 5, 9], 8)
    assert written.more("a_0", 1, [first]) is None
    first.add(segment(5, end=STOPPED))
    assert written.more("a_0", 1, [first]) is None
    assert written.more("a_0", 1, [first, second]) is None  # nothing of the second one was generated yet
    second.add(segment(6, 7))
    told_first, told_second = _record(written.more("a_0", 1, [first, second])).calls
    assert (told_first.token_ids, told_first.stop_reason) == (pack_ids([5]), STOPPED)
    assert (told_second.prompt_ids, told_second.num_shared) == (pack_ids([9]), 3)
    second.add(segment(8))
    (more,) = _record(written.more("a_0", 1, [first, second])).calls
    assert (more.number, more.prompt_ids, more.token_ids) == (1, b"", pack_ids([8]))
    assert unpack_log_probs(more.log_probs or b"") == [-0.5]
    assert written.more("a_0", 1, [first, second]) is None


def test_two_calls_at_once_are_told_of_each_with_its_own_tokens() -> None:
    written, first, second = Written(), ResumableGeneration([1], 8), ResumableGeneration([2], 8)
    first.add(segment(5))
    one = _record(written.more("a_0", 1, [first, second]))
    second.add(segment(6))
    first.add(segment(7, end=STOPPED))
    two = _record(written.more("a_0", 1, [first, second]))
    assert [state.token_ids for state in join([one, two])] == [[5, 7], [6]]
    assert [state.stop_reason for state in join([one, two])] == [STOPPED, None]


def test_an_interrupted_response_of_a_waiting_prompt_goes_on_from_all_its_records() -> None:
    history = tell(told(History(), 1, admitted("b"), taken(5)), [*interrupted("a_0", 4, 5), *interrupted("b_1", 5)])
    found = plan(history, unfinished=("a",))
    assert (tokens(found), tokens(found, "b_1")) == ([10, 11], [10])
    assert (found.num_unfinished_tokens, found.num_tokens) == (3, 0)


def test_what_has_ended_or_left_the_queue_or_was_trained_goes_on_from_nothing() -> None:
    records = [payload for uid in ("ended", "gone", "trained") for payload in interrupted(f"{uid}_0", 3)]
    history = tell(told(History(), 1, taken(5, "trained"), ended={"ended": 3, "trained": 3}), records)
    found = plan(history, unfinished=("ended", "trained"))
    assert (found.unfinished, sorted(found.places)) == ({}, ["ended_0", "ended_1", "trained_0", "trained_1"])


def test_an_end_that_does_not_count_lets_the_trajectory_go_on_from_what_does() -> None:
    history = tell(told(History(), 1, taken(5), ended={"a": 6}), interrupted("a_0", 4, 5, 6))
    found = plan(history, unfinished=("a",))
    assert (found.places, tokens(found)) == ({}, [10, 11])


def test_tokens_of_weights_that_will_not_be_again_are_left_out_and_what_follows_them() -> None:
    assert tokens(plan(tell(told(History(), 1), interrupted("a_0", 3, 4, 5, 4)), unfinished=("a",))) == [10, 11]
    assert plan(tell(told(History(), 1), interrupted("a_0", 5)), unfinished=("a",)).unfinished == {}


def test_a_start_that_has_left_the_history_hides_what_came_after_from_later_starts() -> None:
    history = tell(told(History(), 1, taken(5), taken(6)), [*interrupted("a_0", 4, 5, 6), *interrupted("b_0", 6)])
    told(history, 2, opened(2, through=5), taken(6))
    found = plan(history, unfinished=("a", "b"))
    assert (found.through, list(found.unfinished), tokens(found)) == (6, ["a_0"], [10, 11])
    # Nor does a record that has come later follow one that is hidden.
    tell(history, interrupted("a_0", 4, 5, 6, 6)[3:])
    assert tokens(plan(history, unfinished=("a",))) == [10, 11]


def test_of_several_claims_and_starts_the_latest_counts() -> None:
    earlier, later = interrupted("a_0", 3, 3, claim_id=9), interrupted("a_0", 4, claim_id=5, first=50)
    history = tell(told(History(), 1), [*interrupted("a_0", 3, 3, 3, claim_id=4), *earlier])
    assert tokens(plan(history, unfinished=("a",))) == [10, 11]
    tell(told(history, 2, opened(2)), later, number=2)
    assert tokens(plan(history, unfinished=("a",))) == [50]


@pytest.mark.parametrize(
    ("voids", "expected"),
    [
        ([(1, 3)], [10]), ([(1, 4)], [10]), ([(1, 5)], None), ([(1, 5), (1, 2)], None), ([(2, 0)], None),
    ],
)  # fmt: skip
def test_nothing_goes_on_from_an_attempt_that_was_given_up(voids: list[tuple[int, int]], expected: list[int]) -> None:
    """In whichever file of the start it is said, and whenever a worker that was thought dead writes on."""
    history = told(History(), 1)
    for number, claim_id in voids:
        tell(history, [encode(GivenUp(uid="a", claim_id=claim_id))], number)
    tell(history, [*interrupted("a_0", 3, claim_id=4, first=70), *interrupted("a_0", 3, claim_id=5)])
    found = plan(history, unfinished=("a",))
    assert (tokens(found) if found.unfinished else None) == expected


def test_records_that_are_others_than_planned_are_refused() -> None:
    records, others = interrupted("a_0", 3, 3), interrupted("a_0", 3, 3, first=50)
    checks = [checksum(payload) for payload in records]
    framed = [frame(payload) for payload in records]
    assert [record.num_tokens for record in read_interrupted(framed, "a_0", checks)] == [1, 1]
    with pytest.raises(DataError, match="record 1 of unfinished trajectory b_0"):
        read_interrupted(framed, "b_0", checks)
    for wrong in ([frame(others[0]), framed[1]], [framed[0], framed[1][:-1]], [framed[0], framed[0]], framed[::-1]):
        with pytest.raises(DataError, match="of unfinished trajectory a_0 is not whole, or not its own"):
            read_interrupted(wrong, "a_0", checks)
    with pytest.raises(DataError, match="record 1 of unfinished trajectory a_0"):
        read_interrupted(framed[1:], "a_0", checks[1:])
    other_claim = encode(msgspec.structs.replace(_record(records[1]), claim_id=6))
    with pytest.raises(DataError, match="records of claims 5 and 6"):
        read_interrupted([framed[0], frame(other_claim)], "a_0", [checks[0], checksum(other_claim)])


def test_a_call_that_follows_a_missing_one_is_refused() -> None:
    record = _record(interrupted("a_0", 3)[0])
    (call,) = record.calls
    with pytest.raises(DataError, match="generate call 1 comes after 0 others"):
        join([msgspec.structs.replace(record, calls=[msgspec.structs.replace(call, number=1)])])


def _record(payload: bytes | None) -> Interrupted:
    record = decode(payload or b"")
    assert isinstance(record, Interrupted)
    return record
