"""Buffers in POSIX shared memory.

The segment has a name only from the offer until the receiver has opened it. Its pages are reserved before they are
written: writing to a page that a full /dev/shm cannot give would kill the process (SIGBUS) instead of raising. The
memory stays for as long as either end, or a tensor on it, has it mapped.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from typing import TYPE_CHECKING

import numpy as np
import torch

from partial_rollout.errors import SharedMemoryFull, WeightProtocolError
from partial_rollout.weights.buffers import Leases
from partial_rollout.weights.directory import OPEN_FLAGS, SHARED_MEMORY, create_locked, owned_prefix
from partial_rollout.weights.protocol.wire import SharedBuffers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME_BYTES = 8


class SharedBufferWriter:
    """The sender's end; creates the segment and removes it."""

    def __init__(
        self,
        buffer_bytes: int,
        num_buffers: int,
        *,
        folder: Path = SHARED_MEMORY,
        reserve: Callable[[int, int, int], None] = os.posix_fallocate,
    ) -> None:
        """Create the segment; pages come with the first write to them."""
        self._buffer_bytes = buffer_bytes
        self._reserve = reserve
        self._reserved_bytes = [0] * num_buffers
        self._path = folder / f"{owned_prefix()}{os.getpid()}-{secrets.token_hex(NAME_BYTES)}"
        self._descriptor = create_locked(self._path)
        os.ftruncate(self._descriptor, buffer_bytes * num_buffers)
        mapping = mmap.mmap(self._descriptor, buffer_bytes * num_buffers)
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self.offer = SharedBuffers(self._path.name, buffer_bytes, num_buffers)

    def write(self, buffer: int, offset: int, data: torch.Tensor) -> None:
        """Copy bytes (uint8, 1-d) into a buffer.

        Raises:
            SharedMemoryFull: the file system has no room.
        """
        self._require_pages(buffer, offset + data.numel())
        start = buffer * self._buffer_bytes + offset
        self._memory[start : start + data.numel()].copy_(data)

    def _require_pages(self, buffer: int, end: int) -> None:
        begin = self._reserved_bytes[buffer]
        if end <= begin:
            return
        try:
            self._reserve(self._descriptor, buffer * self._buffer_bytes + begin, end - begin)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise SharedMemoryFull(self._describe_full(end - begin)) from error
        self._reserved_bytes[buffer] = end

    def _describe_full(self, num_bytes: int) -> str:
        usage = os.statvfs(self._path.parent)
        return (
            f"{self._path.parent} has no room for {num_bytes} more bytes of weights "
            f"({usage.f_bavail * usage.f_frsize} of {usage.f_blocks * usage.f_frsize} bytes free): enlarge it "
            f"(docker: --shm-size), or lower partial_rollout.weights.bucket_mb "
            f"(now {len(self._reserved_bytes)} buffers of {self._buffer_bytes} bytes)"
        )

    def attached(self, handles: tuple[bytes, ...]) -> None:
        """Remove the segment's name, which the receiver has opened."""
        self._path.unlink(missing_ok=True)

    def flush(self) -> None:
        """Nothing to wait for: a copy within the host has ended when it returns."""

    def payload(self, buffer: int, num_bytes: int) -> None:
        """Nothing is sent: the receiver sees the buffer."""

    def close(self) -> None:
        """Remove name and memory; may be repeated."""
        self._path.unlink(missing_ok=True)
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SharedBufferReader:
    """The receiver's end of an offer."""

    def __init__(self, offer: SharedBuffers, *, folder: Path = SHARED_MEMORY) -> None:
        """Open the segment.

        Raises:
            WeightProtocolError: the offer is no segment of this user, or smaller than it says.
        """
        num_bytes = offer.buffer_bytes * offer.num_buffers
        self.buffer_bytes, self.num_buffers = offer.buffer_bytes, offer.num_buffers
        self.device, self.handles, self.leases = torch.device("cpu"), (), Leases()
        if offer.name != os.path.basename(offer.name) or not offer.name.startswith(owned_prefix()):
            raise WeightProtocolError(f"{offer.name!r} is no shared memory segment of the weight channel")
        try:
            descriptor = os.open(folder / offer.name, OPEN_FLAGS)
        except OSError as error:
            raise WeightProtocolError(f"the offered segment {folder / offer.name} cannot be opened: {error}") from error
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.getuid() or status.st_size < num_bytes or num_bytes <= 0:
                raise WeightProtocolError(
                    f"segment {offer.name} has {status.st_size} bytes of user {status.st_uid}, "
                    f"not {num_bytes} of user {os.getuid()}"
                )
            self._mapping: mmap.mmap | None = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)

    def place(self, buffer: int, num_bytes: int) -> None:
        """Nothing is received: the sender has written to the buffer."""

    def lease(self, buffer: int) -> torch.Tensor:
        """A buffer's bytes (uint8, 1-d); the buffer is held for as long as any tensor on that memory lives.

        Raises:
            WeightProtocolError: the buffers are closed.
        """
        if self._mapping is None:
            raise WeightProtocolError("the buffers of this update are closed")
        # numpy's array, unlike a slice of the mapping, can be watched; torch keeps it for as long as the memory.
        memory = np.frombuffer(self._mapping, np.uint8, self.buffer_bytes, buffer * self.buffer_bytes)
        return self.leases.begin(buffer, memory, torch.from_numpy(memory))

    def settle(self) -> None:
        """Nothing to wait for: a read within the host has ended when it returns."""

    def close(self) -> None:
        """Let go of the mapping, which lives for as long as a buffer is held; closing it by hand would fail then."""
        self._mapping = None

    def abandon(self) -> None:
        """Let go of the mapping; the sender has its own."""
        self.close()
