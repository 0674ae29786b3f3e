"""The log's format: what was written is read back, and what was damaged is never taken for something else."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partial_rollout.core.rollout_log import (
    HEADER,
    MAX_RECORD_BYTES,
    Admitted,
    Call,
    End,
    Finished,
    FrameReader,
    GivenUp,
    Group,
    Interrupted,
    Opened,
    Output,
    Taken,
    checksum,
    decode,
    encode,
    frame,
    pack_ids,
    pack_log_probs,
    pack_mask,
    read_finished,
    stamped,
    unpack_ids,
    unpack_log_probs,
    unpack_mask,
)
from partial_rollout.errors import DataError
from partial_rollout.types import ContextSpan, TrajectorySummary, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence


def summary(uid: str, session: int = 0, *, version: int = 3) -> TrajectorySummary:
    return TrajectorySummary(
        f"{uid}_{session}_0", 2, 3, version, version,
        version_spans=(VersionSpan(version, 3),), context_spans=(ContextSpan(version, "fresh", 3),),
    )  # fmt: skip


def finished(uid: str, session: int = 0, *, version: int = 3, tokens: Sequence[int] = (7, 8, 9)) -> Finished:
    output = Output(pack_ids([1, 2]), pack_ids(tokens), pack_mask([1, 0, 1]), pack_log_probs([-0.5] * 3), b"\x80")
    return Finished(
        key=f"{uid}_{session}", claim_id=5, outputs=[output], summaries=[summary(uid, session, version=version)]
    )


def interrupted(uid: str, *, after: int = 0, tokens: Sequence[int] = (7, 8, 9)) -> Interrupted:
    call = Call(
        number=0, num_shared=0, prompt_ids=pack_ids([1, 2]), token_ids=pack_ids(tokens),
        log_probs=pack_log_probs([-0.5] * len(tokens)), spans=[VersionSpan(3, 3)],
        context_spans=[ContextSpan(3, "fresh", 3)], stop_reason=None, num_interruptions=1, num_reprefilled_tokens=0,
        settings="temperature=1.0",
    )  # fmt: skip
    return Interrupted(key=f"{uid}_0", claim_id=5, after=after, calls=[call])


RECORDS = [
    Opened(format=1, number=2, role="trainer", base_step=4, world={"data.seed": "1"}, holds_through=4),
    Admitted(first=8, uids=["a", "b"], prompts=["0:x", "1:y"]),
    finished("a"),
    finished("b", tokens=(10, 11, 12)),
    interrupted("a"),
    interrupted("a", after=checksum(encode(interrupted("a"))), tokens=[10, 11]),
    GivenUp(uid="b", claim_id=6),
    Taken(step=5, groups=[Group("a", [("a_0_0", 17)])]),
]
PAYLOADS = [encode(record) for record in RECORDS]
FILE = b"".join(frame(payload) for payload in PAYLOADS)


def read(content: bytes) -> tuple[list[bytes], End]:
    reader = FrameReader(io.BytesIO(content))
    return [payload for _, payload in reader], reader.end


def test_records_are_read_as_they_were_written() -> None:
    payloads, end = read(FILE)
    assert ([decode(payload) for payload in payloads], end) == (RECORDS, End.WHOLE)


def test_frames_say_where_they_begin() -> None:
    for offset, payload in FrameReader(io.BytesIO(FILE)):
        assert FILE[offset : offset + HEADER.size + len(payload)] == frame(payload)


@given(st.integers(0, len(FILE)))
def test_a_file_that_was_cut_off_has_its_first_records(num_bytes: int) -> None:
    payloads, end = read(FILE[:num_bytes])
    assert payloads == PAYLOADS[: len(payloads)]
    whole = sum(HEADER.size + len(payload) for payload in payloads)
    assert end is (End.WHOLE if whole == num_bytes else End.TORN)
    assert num_bytes - whole < HEADER.size + (len(PAYLOADS[len(payloads)]) if len(payloads) < len(PAYLOADS) else 1)


@given(st.integers(0, 8 * len(FILE) - 1))
def test_a_flipped_bit_ends_the_file_before_the_record_that_it_is_in(bit: int) -> None:
    content = bytearray(FILE)
    content[bit // 8] ^= 1 << bit % 8
    payloads, end = read(bytes(content))
    assert payloads == PAYLOADS[: len(payloads)]
    starts = [offset for offset, _ in FrameReader(io.BytesIO(FILE))]
    assert len(payloads) == max(number for number, start in enumerate(starts) if start <= bit // 8)
    assert end is not End.WHOLE


@given(st.binary(max_size=200), st.integers(0, len(FILE)))
def test_no_bytes_make_the_reader_fail_or_add_a_record(noise: bytes, where: int) -> None:
    for content in (noise, FILE[:where] + noise + FILE[where:], FILE[:where] + noise):
        payloads, _ = read(content)
        assert set(payloads) <= set(PAYLOADS)


@given(st.permutations(range(len(PAYLOADS))))
def test_whole_records_in_another_order_are_the_same_records(order: list[int]) -> None:
    payloads, end = read(b"".join(frame(PAYLOADS[number]) for number in order))
    assert (payloads, end) == ([PAYLOADS[number] for number in order], End.WHOLE)


@given(st.binary(max_size=100))
def test_bytes_that_are_no_record_are_refused(noise: bytes) -> None:
    with contextlib.suppress(DataError):
        assert decode(noise) is None or noise in PAYLOADS


def test_a_length_beyond_all_records_is_damage_and_is_not_waited_for() -> None:
    assert read(HEADER.pack(MAX_RECORD_BYTES + 1, 0)) == ([], End.DAMAGED)


def test_a_kind_of_a_later_release_is_skipped() -> None:
    assert decode(msgspec.msgpack.encode({"kind": "of_tomorrow", "more": 1})) is None


def test_a_record_that_does_not_say_how_many_prompts_had_been_admitted_is_refused() -> None:
    with pytest.raises(DataError, match="admitted"):
        decode(msgspec.msgpack.encode({"kind": "abandoned", "holds_through": 3}))


@pytest.mark.parametrize("key", ["b_0", "a_1"])
def test_a_record_of_another_trajectory_is_refused(key: str) -> None:
    payload = encode(finished("a"))
    assert read_finished(frame(payload), "a_0", checksum(payload)) == finished("a")
    with pytest.raises(DataError, match=f"trajectory {key}"):
        read_finished(frame(payload), key, checksum(payload))
    other = encode(finished("a", tokens=(1, 1, 1)))
    with pytest.raises(DataError, match="a_0"):
        read_finished(frame(other), "a_0", checksum(payload))
    with pytest.raises(DataError, match="torn"):
        read_finished(frame(payload)[:-1], "a_0", checksum(payload))


@given(
    st.lists(st.integers(0, 2**31 - 1)), st.lists(st.floats(width=32, allow_nan=False)), st.lists(st.integers(0, 255))
)
def test_tokens_masks_and_log_probs_come_back(ids: list[int], values: list[float], mask: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert unpack_log_probs(pack_log_probs(values)) == values
    assert unpack_mask(pack_mask(mask)) == mask


def test_a_stamped_summary_says_of_which_record_it_is() -> None:
    record = finished("a")
    (stamp,) = stamped(record.summaries, encode(record))
    assert stamp.log_checksum == checksum(encode(record)) != checksum(encode(finished("a", version=4)))
