"""Buffers on a GPU that the training worker and the engine worker share (CUDA IPC).

The receiver makes them, each an allocation of its own, and the sender writes straight into them: one copy on the device
for every byte. So the memory is the receiver's own, and goes with the last tensor on it, however long its model keeps
that; the sender's death takes nothing away.

    receiver                              sender
    allocate, export ──Attached: handles──→ open
                                            copies begun on its stream, wait for all   ──Bucket──→
    tensors on the buffer, last one dropped,
    wait for all that reads it              ──Free──→
                                            close                                ──Done──→
    free, when nothing refers to it
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from partial_rollout.errors import WeightProtocolError
from partial_rollout.weights.buffers import Leases
from partial_rollout.weights.cuda_runtime import CudaRuntime, DeviceMemory
from partial_rollout.weights.protocol.wire import CudaBuffers

if TYPE_CHECKING:
    import torch


class CudaBufferWriter:
    """The sender's end."""

    def __init__(
        self, buffer_bytes: int, num_buffers: int, *, device: torch.device, peer_device: str, runtime: CudaRuntime
    ) -> None:
        """Ask for buffers on `device`.

        Raises:
            WeightProtocolError: the receiver is on another GPU.
        """
        self._device, self._runtime = device, runtime
        identity = runtime.identify(device)
        if identity != peer_device:
            raise WeightProtocolError(
                f"the training worker's weights are on GPU {identity}, the engine's worker is on GPU {peer_device}: "
                "the weight channel needs both on one GPU, or set partial_rollout.weights.backend=verl"
            )
        self._pointers: list[int] = []
        self._buffers: list[torch.Tensor] = []
        self.offer = CudaBuffers(identity, buffer_bytes, num_buffers)

    def attached(self, handles: tuple[bytes, ...]) -> None:
        """Open what the receiver has made.

        Raises:
            WeightProtocolError: not as many buffers as asked for.
            WeightUpdateError: the GPU's driver refuses a handle.
        """
        if len(handles) != self.offer.num_buffers:
            raise WeightProtocolError(f"the receiver made {len(handles)} buffers, not {self.offer.num_buffers}")
        for handle in handles:
            self._pointers.append(self._runtime.open(self._device, handle))
            memory = DeviceMemory(self._pointers[-1], self.offer.buffer_bytes)
            self._buffers.append(self._runtime.tensor(self._device, memory))

    def write(self, buffer: int, offset: int, data: torch.Tensor) -> None:
        """Begin to copy bytes (uint8, 1-d) into a buffer."""
        self._buffers[buffer][offset : offset + data.numel()].copy_(data, non_blocking=True)

    def flush(self) -> None:
        """Return when everything written is there."""
        self._runtime.synchronize(self._device)

    def close(self) -> None:
        """Let go of the buffers; may be repeated."""
        self._buffers.clear()
        if self._pointers:
            self._runtime.synchronize(self._device)
        while self._pointers:
            self._runtime.close(self._device, self._pointers.pop())


class _Block:
    """One buffer's memory, freed with the last reference."""

    def __init__(self, runtime: CudaRuntime, device: torch.device, num_bytes: int) -> None:
        self.pointer = runtime.allocate(device, num_bytes)
        weakref.finalize(self, runtime.free, device, self.pointer).atexit = False


ABANDONED: list[_Block] = []
"""Buffers of failed updates."""


class CudaBufferReader:
    """The receiver's end."""

    def __init__(self, offer: CudaBuffers, *, device: torch.device, runtime: CudaRuntime) -> None:
        """Make the buffers.

        Raises:
            WeightProtocolError: they are wanted on another GPU, or there are none.
            DeviceMemoryFull: there is no room.
        """
        identity = runtime.identify(device)
        if offer.device != identity or min(offer.buffer_bytes, offer.num_buffers) <= 0:
            raise WeightProtocolError(
                f"the sender wants {offer.num_buffers} buffers of {offer.buffer_bytes} bytes on GPU {offer.device!r}, "
                f"the engine's worker is on GPU {identity!r}"
            )
        self.buffer_bytes, self.num_buffers, self.device = offer.buffer_bytes, offer.num_buffers, device
        self.leases = Leases()
        self._runtime = runtime
        self._blocks = [_Block(runtime, device, offer.buffer_bytes) for _ in range(offer.num_buffers)]
        self.handles = tuple(runtime.export(block.pointer) for block in self._blocks)

    def lease(self, buffer: int) -> torch.Tensor:
        """A buffer's bytes (uint8, 1-d); it is held for as long as any tensor on that memory lives."""
        block = self._blocks[buffer]
        memory = DeviceMemory(block.pointer, self.buffer_bytes, owner=block)
        return self.leases.begin(buffer, memory, self._runtime.tensor(self.device, memory))

    def settle(self) -> None:
        """Return when everything begun on the GPU has ended."""
        self._runtime.synchronize(self.device)

    def close(self) -> None:
        """Let go of the memory, which stays for as long as somebody holds it; the sender has closed it by now."""
        self._blocks.clear()

    def abandon(self) -> None:
        """Leave the memory to the end of this process: freeing what another one has open is undefined in CUDA.

        The engine generates no more after a failed update, so there is nothing else to have it for.
        """
        ABANDONED.extend(self._blocks)
