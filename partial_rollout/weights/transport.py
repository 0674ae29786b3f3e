"""Chooses the buffers of an update.

The GPU's own memory if both ends are on one GPU, else the host's shared memory; between nodes the connection itself.
"""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003 - a dataclass reads it
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from partial_rollout.errors import WeightProtocolError
from partial_rollout.weights.cuda_buffers import CudaBufferReader, CudaBufferWriter, CudaRuntime
from partial_rollout.weights.protocol.wire import CudaBuffers, StreamBuffers
from partial_rollout.weights.shared_buffers import SharedBufferReader, SharedBufferWriter
from partial_rollout.weights.stream_buffers import StreamBufferReader, StreamBufferWriter

if TYPE_CHECKING:
    from partial_rollout.weights.buffers import BufferReader, BufferWriter
    from partial_rollout.weights.protocol.wire import Buffers

NUM_BUFFERS = 3
"""One is filled, one is on its way or emptied, one is in the hands of a model that keeps a layer until it is whole."""
SHARED_BUFFER_BYTES = 8 << 20
"""Three stay in a processor's cache, and a matrix of a small model fits one."""
CUDA_BUFFER_BYTES = 256 << 20
"""A copy of one takes long enough to hide the messages and the launches for the next."""


def find_cuda() -> CudaRuntime | None:
    """The CUDA runtime, or None where torch has no GPU or the bindings are not installed."""
    if not torch.cuda.is_available():
        return None
    try:
        return CudaRuntime()
    except ImportError:
        return None


def numbered(device: torch.device | None) -> torch.device:
    """The device with its number; the host for None."""
    if device is None or device.type != "cuda" or device.index is not None:
        return device or torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True, slots=True)
class Transports:
    """The transports that this process has; tests give it other parts."""

    cuda: CudaRuntime | None = field(default_factory=find_cuda)
    make_shared: Callable[[int, int], SharedBufferWriter] = SharedBufferWriter

    def identify(self, device: torch.device) -> str:
        """UUID of the GPU that buffers can be on, or an empty string."""
        return self.cuda.identify(device) if self.cuda is not None else ""

    def writer(
        self, device: torch.device, peer_device: str, buffer_bytes: int | None, *, is_stream: bool = False
    ) -> BufferWriter:
        """Buffers for tensors on `device` and a receiver on the GPU `peer_device`; `buffer_bytes` None: our choice.

        With `is_stream` the receiver is on another node.
        """
        if is_stream:
            return StreamBufferWriter(buffer_bytes or SHARED_BUFFER_BYTES, NUM_BUFFERS, device)
        if self.cuda is not None and self.identify(device) and peer_device:
            options = {"device": device, "peer_device": peer_device, "runtime": self.cuda}
            return CudaBufferWriter(buffer_bytes or CUDA_BUFFER_BYTES, NUM_BUFFERS, **options)
        return self.make_shared(buffer_bytes or SHARED_BUFFER_BYTES, NUM_BUFFERS)

    def reader(self, offer: Buffers, device: torch.device) -> BufferReader:
        """The receiver's end of the offered buffers.

        Raises:
            WeightUpdateError: the offer cannot be taken.
        """
        if isinstance(offer, StreamBuffers):
            return StreamBufferReader(offer)
        if not isinstance(offer, CudaBuffers):
            return SharedBufferReader(offer)
        if self.cuda is None:
            raise WeightProtocolError("buffers on a GPU were offered, and this process has no CUDA bindings")
        return CudaBufferReader(offer, device=device, runtime=self.cuda)
