"""The buffers of all transports: the sender writes them and the receiver reads them in place.

The life of a buffer, which the sender's state machine charges and the receiver gives back:

    sender: write, write, flush ──Bucket──→ receiver: lease, hand tensors on ... last reference dropped ──Free──→ sender
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from partial_rollout.weights.protocol.wire import Buffers


HUGE_FROM_BYTES = 4 << 20
"""Twice a huge page, so that at least one whole huge page fits wherever the memory begins."""


class BufferWriter(Protocol):
    """The sender's end."""

    @property
    def offer(self) -> Buffers:
        """What the receiver is told of the buffers."""
        ...

    def attached(self, handles: tuple[bytes, ...]) -> None:
        """Note that the receiver has the buffers; `handles` are of buffers that it made."""

    def write(self, buffer: int, offset: int, data: torch.Tensor) -> None:
        """Begin to copy bytes (uint8, 1-d) into a buffer."""

    def flush(self) -> None:
        """Return when everything written can be read."""

    def payload(self, buffer: int, num_bytes: int) -> memoryview | None:
        """The first bytes of a buffer, if they must be sent; None if the receiver sees the buffer."""
        ...

    def close(self) -> None:
        """Remove what is left of the buffers; may be repeated."""


class BufferReader(Protocol):
    """The receiver's end."""

    buffer_bytes: int
    num_buffers: int
    device: torch.device
    handles: tuple[bytes, ...]
    leases: Leases

    def place(self, buffer: int, num_bytes: int) -> memoryview | None:
        """Where the first bytes of a buffer are to be put, if they are sent; None if the sender has written them."""
        ...

    def lease(self, buffer: int) -> torch.Tensor:
        """A buffer's bytes (uint8, 1-d); the buffer is held for as long as any tensor on that memory lives."""
        ...

    def settle(self) -> None:
        """Return when everything begun on buffers that nobody holds any more has ended."""

    def close(self) -> None:
        """Let go of the memory, which stays for as long as somebody holds it."""

    def abandon(self) -> None:
        """After a failure, when the sender may still write: let go of the memory where that is safe."""


class Leases:
    """Buffers that are still held: by a tensor on the buffer, or by any view that a model made of such a tensor."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}

    def begin(self, buffer: int, memory: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Hold `buffer` until `memory`, which torch keeps as long as a tensor on it, is collected; return `tensor`."""
        self._held[buffer] = tensor.untyped_storage().data_ptr()
        # At the interpreter's exit nobody waits for the buffer, and modules may be gone.
        weakref.finalize(memory, self._held.pop, buffer, None).atexit = False
        return tensor

    def is_held(self, buffer: int) -> bool:
        """Whether the bytes of `buffer` may still be read."""
        return buffer in self._held

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in a buffer that is held."""
        return tensor.untyped_storage().data_ptr() in self._held.values()

    @property
    def num_held(self) -> int:
        """Number of buffers whose bytes may still be read."""
        return len(self._held)


def allocate(num_bytes: int) -> torch.Tensor:
    """New host memory (uint8, 1-d) of any content, in huge pages if there are many bytes and the kernel has such pages.

    The first write to new memory is mostly page faults; with huge pages it takes a third of the time.
    """
    if num_bytes < HUGE_FROM_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
