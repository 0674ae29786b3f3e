"""Buffers on a GPU that the training worker and the engine worker share (CUDA IPC).

The receiver makes them, each an allocation of its own, and the sender writes straight into them: one copy on the device
for every byte. So the memory is the receiver's own and is freed with the last tensor on it, however long the model
keeps that tensor; the sender's death takes nothing away.

    receiver                              sender
    allocate, export ──Attached: handles──→ open
                                            copies begun on its stream, wait for all   ──Bucket──→
    tensors on the buffer, last one dropped,
    wait for all that reads it              ──Free──→
                                            close                                ──Done──→
    free, when nothing refers to it

The memory is plain cudaMalloc's, not that of torch's allocator: what torch gives out cannot be shared under all of its
settings (expandable segments), and vLLM's sleep mode swaps it.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from partial_rollout.errors import DeviceMemoryFull, WeightProtocolError, WeightUpdateError
from partial_rollout.weights.buffers import Leases
from partial_rollout.weights.protocol.wire import CudaBuffers

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLE_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE; the handle's own class hides its bytes in some versions of the bindings."""


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
            # Kept at once: `close` lets go of it, whatever fails next.
            self._pointers.append(self._runtime.open(self._device, handle))
            memory = DeviceMemory(self._pointers[-1], self.offer.buffer_bytes)
            self._buffers.append(self._runtime.tensor(self._device, memory))

    def write(self, buffer: int, offset: int, data: torch.Tensor) -> None:
        """Begin to copy bytes (uint8, 1-d) into a buffer."""
        self._buffers[buffer][offset : offset + data.numel()].copy_(data, non_blocking=True)

    def flush(self) -> None:
        """Return when everything written is there."""
        self._runtime.synchronize(self._device)

    def payload(self, buffer: int, num_bytes: int) -> None:
        """Nothing is sent: the buffer is the receiver's own."""

    def close(self) -> None:
        """Let go of the buffers; may be repeated."""
        self._buffers.clear()
        # Copies may still be under way; closing takes the memory from under them.
        if self._pointers:
            self._runtime.synchronize(self._device)
        while self._pointers:
            self._runtime.close(self._device, self._pointers.pop())


class _Block:
    """One buffer's memory, freed with the last reference."""

    def __init__(self, runtime: CudaRuntime, device: torch.device, num_bytes: int) -> None:
        self.pointer = runtime.allocate(device, num_bytes)
        # Not at the end of the process: CUDA may be gone by then, and the driver frees all of its memory.
        weakref.finalize(self, runtime.free, device, self.pointer).atexit = False


ABANDONED: list[_Block] = []
"""Buffers of failed updates, which live until this process ends."""


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

    def place(self, buffer: int, num_bytes: int) -> None:
        """Nothing is received: the sender has written to the buffer."""

    def lease(self, buffer: int) -> torch.Tensor:
        """A buffer's bytes (uint8, 1-d); the buffer is held for as long as any tensor on that memory lives."""
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


class DeviceMemory:
    """Bytes on a GPU, described for torch; `owner` lives as long as a tensor on the bytes."""

    def __init__(self, pointer: int, num_bytes: int, owner: object = None) -> None:
        """Describe memory that somebody else allocates and frees."""
        self.pointer, self.num_bytes, self.owner = pointer, num_bytes, owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of Numba's description of device memory, which torch reads."""
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}


class CudaRuntime:
    """The few calls of NVIDIA's runtime that memory shared by two processes needs, and torch around that memory.

    Raises WeightUpdateError with the name of the call that failed. Devices have a number.
    """

    def __init__(self) -> None:
        """Load the bindings; ImportError where they are not installed (torch for CUDA brings them since 2.10)."""
        from cuda.bindings import runtime  # pyright: ignore[reportMissingImports] - comes with torch for CUDA only

        self._runtime: Any = runtime

    def identify(self, device: torch.device) -> str:
        """UUID of the GPU, which unlike its number is the same in every process; empty for a device that is no GPU."""
        return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        """Address of new memory.

        Raises:
            DeviceMemoryFull: there is no room, even after torch has returned what it kept for later.
        """
        out_of_memory = self._runtime.cudaError_t.cudaErrorMemoryAllocation
        with self._on(device):
            error, pointer = self._runtime.cudaMalloc(num_bytes)
            if error == out_of_memory:
                # torch keeps freed memory for later; cudaMalloc sees it as taken.
                torch.cuda.empty_cache()
                error, pointer = self._runtime.cudaMalloc(num_bytes)
        if error == out_of_memory:
            self._runtime.cudaGetLastError()  # it would surface in an unrelated call of torch
            free, total = torch.cuda.mem_get_info(device)
            raise DeviceMemoryFull(
                f"{device} has no room for a buffer of {num_bytes} bytes of weights ({free} of {total} bytes free): "
                "lower partial_rollout.weights.bucket_mb or the engine's gpu_memory_utilization"
            )
        self._require(error, "cudaMalloc")
        return pointer

    def free(self, device: torch.device, pointer: int) -> None:
        """Give `allocate`d memory back; waits for what the GPU does with it."""
        with self._on(device):
            self._require(self._runtime.cudaFree(pointer)[0], "cudaFree")

    def export(self, pointer: int) -> bytes:
        """What another process needs to open the memory."""
        error, handle = self._runtime.cudaIpcGetMemHandle(pointer)
        self._require(error, "cudaIpcGetMemHandle")
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def open(self, device: torch.device, exported: bytes) -> int:
        """Address in this process of memory that another one has exported."""
        if len(exported) != HANDLE_BYTES:
            raise WeightUpdateError(f"a CUDA IPC handle has {HANDLE_BYTES} bytes, not {len(exported)}")
        handle = self._runtime.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), exported, HANDLE_BYTES)
        with self._on(device):
            error, pointer = self._runtime.cudaIpcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess)
        self._require(error, "cudaIpcOpenMemHandle")
        return pointer

    def close(self, device: torch.device, pointer: int) -> None:
        """Let go of `open`ed memory."""
        with self._on(device):
            self._require(self._runtime.cudaIpcCloseMemHandle(pointer)[0], "cudaIpcCloseMemHandle")

    def tensor(self, device: torch.device, memory: DeviceMemory) -> torch.Tensor:
        """The bytes as uint8, 1-d; keeps `memory` alive."""
        return torch.as_tensor(memory, device=device)

    def synchronize(self, device: torch.device) -> None:
        """Wait for all that this process has begun on the GPU, whatever the stream."""
        torch.cuda.synchronize(device)

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        with torch.cuda.device(device):
            # The bindings have a copy of the runtime of their own, which need not follow torch's.
            self._require(self._runtime.cudaSetDevice(device.index)[0], "cudaSetDevice")
            yield

    def _require(self, error: Any, call: str) -> None:
        if error == self._runtime.cudaError_t.cudaSuccess:
            return
        self._runtime.cudaGetLastError()  # as in `allocate`
        _, text = self._runtime.cudaGetErrorString(error)
        raise WeightUpdateError(f"{call} failed: {error.name}: {text.decode()}")
