from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partial_rollout.errors import WeightMismatch, WeightProtocolError
from partial_rollout.weights.protocol.buckets import (
    ALIGNMENT_BYTES,
    ITEM_BYTES,
    Assembly,
    BucketPlan,
    Fragment,
    TensorSpec,
)

BUFFER = 4 * ALIGNMENT_BYTES
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES), max_size=12).map(
    lambda rows: [TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(rows)]
)


def placements(tensors, buffer_bytes=BUFFER):
    plan = BucketPlan(buffer_bytes)
    return [placement for tensor in tensors for placement in plan.place(tensor)]


def fragment(name="a", shape=(8,), tensor_offset=0, buffer_offset=0, num_bytes=32, dtype="float32"):
    return Fragment(TensorSpec(name, dtype, shape), tensor_offset, buffer_offset, num_bytes)


@given(TENSORS)
def test_fragments_cover_every_tensor_once_and_never_overlap_in_a_bucket(tensors):
    covered = {tensor.name: 0 for tensor in tensors}
    used: dict[int, int] = {}
    for placement in placements(tensors):
        piece = placement.fragment
        assert piece.tensor_offset == covered[piece.tensor.name]
        covered[piece.tensor.name] += piece.num_bytes
        assert piece.buffer_offset % ALIGNMENT_BYTES == 0
        assert piece.buffer_offset >= used.get(placement.bucket, 0)
        used[placement.bucket] = piece.buffer_offset + piece.num_bytes
        assert used[placement.bucket] <= BUFFER
    assert covered == {tensor.name: tensor.num_bytes for tensor in tensors}
    assert sorted(used) == list(range(len(used)))


@given(TENSORS)
def test_what_was_planned_can_be_put_together(tensors):
    assembly = Assembly(BUFFER)
    complete = []
    for placement in placements(tensors):
        assembly.accept(placement.fragment)
        if placement.fragment.is_last:
            complete.append(placement.fragment.tensor)
    assembly.finish()
    assert complete == tensors
    assert (assembly.num_tensors, assembly.num_bytes) == (len(tensors), sum(t.num_bytes for t in tensors))


def test_a_tensor_larger_than_a_bucket_goes_on_in_the_next_ones():
    rows = placements([TensorSpec("small", "uint8", (10,)), TensorSpec("large", "uint8", (2 * BUFFER,))])
    assert [(r.bucket, r.fragment.buffer_offset, r.fragment.num_bytes) for r in rows] == [
        (0, 0, 10),
        (0, 64, BUFFER - 64),
        (1, 0, BUFFER),
        (2, 0, 64),
    ]


def test_a_tensor_that_just_fits_a_bucket_is_in_one_piece():
    rows = placements([TensorSpec("small", "uint8", (10,)), TensorSpec("fits", "uint8", (BUFFER,))])
    assert [(r.bucket, r.fragment.buffer_offset, r.fragment.num_bytes) for r in rows] == [(0, 0, 10), (1, 0, BUFFER)]


@pytest.mark.parametrize("buffer_bytes", [0, -64, 63, 65])
def test_a_buffer_that_is_not_aligned_is_refused(buffer_bytes):
    with pytest.raises(ValueError, match=str(buffer_bytes)):
        BucketPlan(buffer_bytes)


@pytest.mark.parametrize(
    ("second", "error", "text"),
    [
        (fragment(tensor_offset=16, num_bytes=16), WeightProtocolError, "'a' from byte 16 .* 'a' at byte 8"),
        (fragment(name="b"), WeightProtocolError, "'b' from byte 0 .* 'a' at byte 8"),
        (fragment(tensor_offset=8, num_bytes=25), WeightProtocolError, "25 bytes at offset 0"),
        (fragment(tensor_offset=8, buffer_offset=BUFFER, num_bytes=8), WeightProtocolError, f"offset {BUFFER}"),
        (fragment(tensor_offset=8, buffer_offset=8, num_bytes=8), WeightProtocolError, "offset 8"),
        (fragment(tensor_offset=8, buffer_offset=-64, num_bytes=8), WeightProtocolError, "offset -64"),
        (fragment(tensor_offset=8, num_bytes=-1), WeightProtocolError, "-1 bytes"),
        (fragment(tensor_offset=8, dtype="float16"), WeightProtocolError, "'a' from byte 8"),
    ],
)
def test_a_fragment_that_does_not_continue_is_refused(second, error, text):
    assembly = Assembly(BUFFER)
    assembly.accept(fragment(num_bytes=8))
    with pytest.raises(error, match=text):
        assembly.accept(second)


@pytest.mark.parametrize(
    ("spec", "text"), [({"dtype": "complex64"}, "'a': dtype complex64"), ({"shape": (-1, 4)}, "negative")]
)
def test_a_tensor_nobody_can_build_is_named(spec, text):
    with pytest.raises(WeightMismatch, match=text):
        Assembly(BUFFER).accept(fragment(**spec))


def test_a_tensor_sent_twice_is_named():
    assembly = Assembly(BUFFER)
    assembly.accept(fragment())
    with pytest.raises(WeightMismatch, match="'a' was sent twice"):
        assembly.accept(fragment())


def test_an_end_within_a_tensor_is_named():
    assembly = Assembly(BUFFER)
    assembly.accept(fragment(num_bytes=8))
    with pytest.raises(WeightProtocolError, match="'a' at byte 8 of 32"):
        assembly.finish()
