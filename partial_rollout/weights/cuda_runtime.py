"""The few calls of NVIDIA's runtime that memory shared by two processes needs, and torch around that memory.

Plain cudaMalloc, not torch's allocator: what that gives out cannot be shared by all of its settings (expandable
segments), and vLLM's sleep mode swaps it.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from partial_rollout.errors import DeviceMemoryFull, WeightUpdateError

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLE_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE; the handle's own class hides its bytes in some versions of the bindings."""


class DeviceMemory:
    """Bytes on a GPU, for torch; `owner` lives as long as a tensor on them."""

    def __init__(self, pointer: int, num_bytes: int, owner: object = None) -> None:
        """Describe memory that somebody else allocates and frees."""
        self.pointer, self.num_bytes, self.owner = pointer, num_bytes, owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of Numba's description of device memory, which torch reads."""
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}


class CudaRuntime:
    """Raises WeightUpdateError with the name of the call that failed; devices have a number."""

    def __init__(self) -> None:
        """Load the bindings; ImportError where they are not installed (torch for CUDA brings them since 2.10)."""
        from cuda.bindings import runtime  # pyright: ignore[reportMissingImports] - comes with torch for CUDA only

        self._runtime: Any = runtime

    def identify(self, device: torch.device) -> str:
        """UUID of the GPU, which is the same in every process, unlike its number; empty for another device."""
        return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        """Address of new memory.

        Raises:
            DeviceMemoryFull: also when torch has returned all that it kept for later.
        """
        out_of_memory = self._runtime.cudaError_t.cudaErrorMemoryAllocation
        with self._on(device):
            error, pointer = self._runtime.cudaMalloc(num_bytes)
            if error == out_of_memory:
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
        self._runtime.cudaGetLastError()
        _, text = self._runtime.cudaGetErrorString(error)
        raise WeightUpdateError(f"{call} failed: {error.name}: {text.decode()}")
