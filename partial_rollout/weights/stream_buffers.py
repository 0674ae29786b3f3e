"""Buffers in host memory of both ends, whose bytes are sent over the connection: for an engine on another node.

The sender fills a buffer and sends it uncopied; the receiver puts the bytes into its own buffer of the same number. The
sender writes to a buffer again when the receiver gives it back, as with the memory that both ends see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from partial_rollout.errors import WeightProtocolError
from partial_rollout.weights.buffers import Leases, allocate
from partial_rollout.weights.protocol.wire import StreamBuffers

if TYPE_CHECKING:
    import numpy as np


class StreamBufferWriter:
    """The sender's end."""

    def __init__(self, buffer_bytes: int, num_buffers: int, device: torch.device) -> None:
        """Make buffers for tensors on `device`; a GPU copies to pinned memory by itself."""
        self.offer = StreamBuffers(buffer_bytes, num_buffers)
        self._device = device
        is_pinned = device.type == "cuda"
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) if is_pinned else allocate(buffer_bytes)
            for _ in range(num_buffers)
        ]

    def attached(self, handles: tuple[bytes, ...]) -> None:
        """Nothing to open."""

    def write(self, buffer: int, offset: int, data: torch.Tensor) -> None:
        """Copy bytes (uint8, 1-d) into a buffer."""
        self._buffers[buffer][offset : offset + data.numel()].copy_(data, non_blocking=True)

    def flush(self) -> None:
        """Return when everything written is there."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def payload(self, buffer: int, num_bytes: int) -> memoryview:
        """The first bytes of a buffer."""
        return self._buffers[buffer].numpy()[:num_bytes].data

    def close(self) -> None:
        """Let go of the memory, which stays for as long as some of it is being sent; may be repeated."""
        self._buffers = []


class StreamBufferReader:
    """The receiver's end of an offer."""

    def __init__(self, offer: StreamBuffers) -> None:
        """Make as many buffers."""
        self.buffer_bytes, self.num_buffers = offer.buffer_bytes, offer.num_buffers
        self.device, self.handles, self.leases = torch.device("cpu"), (), Leases()
        self._buffers: list[np.ndarray] = [allocate(offer.buffer_bytes).numpy() for _ in range(offer.num_buffers)]

    def place(self, buffer: int, num_bytes: int) -> memoryview:
        """Where the first bytes of a buffer are to be put.

        Raises:
            WeightProtocolError: a buffer has not so many.
        """
        if not 0 <= num_bytes <= self.buffer_bytes:
            raise WeightProtocolError(f"{num_bytes} bytes were announced for a buffer of {self.buffer_bytes}")
        return self._buffers[buffer][:num_bytes].data

    def lease(self, buffer: int) -> torch.Tensor:
        """A buffer's bytes (uint8, 1-d); the buffer is held for as long as any tensor on that memory lives."""
        memory = self._buffers[buffer][:]  # an array of its own, which torch keeps for as long as the memory
        return self.leases.begin(buffer, memory, torch.from_numpy(memory))

    def settle(self) -> None:
        """Nothing to wait for: a read within the host has ended when it returns."""

    def close(self) -> None:
        """Let go of the buffers, which live for as long as somebody holds them."""
        self._buffers = []

    def abandon(self) -> None:
        """Let go of the buffers; nobody else writes to them."""
        self.close()
