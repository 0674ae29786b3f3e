"""How a stream of tensors is cut into buckets, and how the other end checks that it can be put together again.

A bucket is the content of one buffer of `buffer_bytes`: tensors one after the other, at aligned offsets. A tensor that
fits a buffer is in one piece, so that it can be used where it is; a larger one goes on in the next buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from partial_rollout.errors import WeightMismatch, WeightProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

ALIGNMENT_BYTES = 64
"""A cache line; also a multiple of every element size, so that a buffer can be viewed with any dtype."""
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
"""Element sizes of the dtypes that travel, by torch's name without the prefix."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, dtype and shape of one tensor; its bytes are those of the contiguous tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the contiguous tensor.

        Raises:
            WeightMismatch: a dtype that does not travel, or a negative size.
        """
        if self.dtype not in ITEM_BYTES:
            raise WeightMismatch(f"tensor {self.name!r}: dtype {self.dtype} is unknown; known: {sorted(ITEM_BYTES)}")
        if any(size < 0 for size in self.shape):
            raise WeightMismatch(f"tensor {self.name!r}: shape {self.shape} has a negative size")
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Fragment(msgspec.Struct, frozen=True, array_like=True):
    """`num_bytes` bytes of a tensor from `tensor_offset` on, at `buffer_offset` of a buffer."""

    tensor: TensorSpec
    tensor_offset: int
    buffer_offset: int
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether the fragment is all of the tensor."""
        return self.num_bytes == self.tensor.num_bytes

    @property
    def is_last(self) -> bool:
        """Whether the tensor is complete with this fragment."""
        return self.tensor_offset + self.num_bytes == self.tensor.num_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """A fragment and the number of the bucket it belongs to."""

    bucket: int
    fragment: Fragment


class BucketPlan:
    """Places tensors, in the order in which they come, into buckets 0, 1, 2, ...

    A tensor that fits a buffer is in one piece; a larger one is cut, and its last piece shares a bucket with the next:

    >>> plan = BucketPlan(buffer_bytes=128)
    >>> for placement in [
    ...     *plan.place(TensorSpec("bias", "float32", (4,))),
    ...     *plan.place(TensorSpec("weight", "float32", (40,))),
    ...     *plan.place(TensorSpec("norm", "float32", (4,))),
    ... ]:
    ...     piece = placement.fragment
    ...     print(placement.bucket, piece.tensor.name, piece.tensor_offset, piece.buffer_offset, piece.num_bytes)
    0 bias 0 0 16
    0 weight 0 64 64
    1 weight 64 0 96
    2 norm 0 0 16

    Raises:
        ValueError: `buffer_bytes` is not a positive multiple of the alignment.
    """

    def __init__(self, buffer_bytes: int) -> None:
        if buffer_bytes < ALIGNMENT_BYTES or buffer_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"buffer_bytes={buffer_bytes} must be a positive multiple of {ALIGNMENT_BYTES}")
        self._buffer_bytes = buffer_bytes
        self._bucket = 0
        self._used_bytes = 0

    def place(self, tensor: TensorSpec) -> Iterator[Placement]:
        """Yield the tensor's fragments in order; an empty tensor has one of 0 bytes."""
        total, done = tensor.num_bytes, 0
        if self._buffer_bytes - self._used_bytes < total <= self._buffer_bytes:
            self._bucket, self._used_bytes = self._bucket + 1, 0
        while True:
            if self._used_bytes == self._buffer_bytes:
                self._bucket, self._used_bytes = self._bucket + 1, 0
            size = min(total - done, self._buffer_bytes - self._used_bytes)
            yield Placement(self._bucket, Fragment(tensor, done, self._used_bytes, size))
            self._used_bytes += _aligned(size)
            done += size
            if done == total:
                return


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Assembly:
    """Checks that fragments arrive in order, without gaps, within their buffer, and each tensor once."""

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._names: set[str] = set()
        self._open: TensorSpec | None = None
        self._open_bytes = 0
        self.num_bytes = 0

    @property
    def num_tensors(self) -> int:
        """Tensors begun so far."""
        return len(self._names)

    def accept(self, fragment: Fragment) -> None:
        """Take the next fragment.

        Raises:
            WeightMismatch: an unknown dtype, or a tensor that was sent before.
            WeightProtocolError: the fragment does not continue what came before, or lies outside its buffer.
        """
        tensor = fragment.tensor
        if self._open is None:
            self._begin(tensor)
        if tensor != self._open or fragment.tensor_offset != self._open_bytes:
            raise WeightProtocolError(
                f"tensor {tensor.name!r} from byte {fragment.tensor_offset} arrived where "
                f"{self._describe_open()} was expected to go on"
            )
        self._require_inside(fragment)
        self._open_bytes += fragment.num_bytes
        self.num_bytes += fragment.num_bytes
        if fragment.is_last:
            self._open = None

    def finish(self) -> None:
        """Note the end of the stream.

        Raises:
            WeightProtocolError: the stream ended in the middle of a tensor.
        """
        if self._open is not None:
            raise WeightProtocolError(f"the stream ended within {self._describe_open()} of {self._open.num_bytes}")

    def _begin(self, tensor: TensorSpec) -> None:
        if tensor.name in self._names:
            raise WeightMismatch(f"tensor {tensor.name!r} was sent twice")
        self._names.add(tensor.name)
        self._open, self._open_bytes = tensor, 0

    def _require_inside(self, fragment: Fragment) -> None:
        room = fragment.tensor.num_bytes - fragment.tensor_offset
        end = fragment.buffer_offset + fragment.num_bytes
        inside = 0 <= fragment.num_bytes <= room and fragment.buffer_offset >= 0 and end <= self._buffer_bytes
        if not inside or fragment.buffer_offset % ALIGNMENT_BYTES:
            raise WeightProtocolError(
                f"tensor {fragment.tensor.name!r}: {fragment.num_bytes} bytes at offset {fragment.buffer_offset} do "
                f"not fit a buffer of {self._buffer_bytes} bytes or the tensor's {fragment.tensor.num_bytes}"
            )

    def _describe_open(self) -> str:
        return "no tensor" if self._open is None else f"tensor {self._open.name!r} at byte {self._open_bytes}"
