"""CUDA's runtime without a GPU: memory of this process, and a log of who did what."""

from __future__ import annotations

import numpy as np
import torch

from partial_rollout.errors import DeviceMemoryFull

FREED = 0xEE


class FakeGpu:
    """The part that both ends share: memory by address, and the log."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.log: list[tuple[str, ...]] = []

    def of(self, call: str) -> list[str]:
        """Who made a call, in order."""
        return [entry[0] for entry in self.log if entry[1] == call]


class FakeCuda:
    """One process's runtime."""

    def __init__(self, gpu: FakeGpu, role: str, identity: str = "gpu-a", room: int = 1 << 30) -> None:
        self._gpu, self._role, self._identity, self._room = gpu, role, identity, room

    def identify(self, device) -> str:
        return self._identity

    def allocate(self, device, num_bytes: int) -> int:
        if num_bytes > self._room:
            raise DeviceMemoryFull(f"no room for {num_bytes} bytes")
        self._room -= num_bytes
        self._say("allocate")
        block = np.zeros(num_bytes, np.uint8)
        self._gpu.memory[block.ctypes.data] = block
        return block.ctypes.data

    def free(self, device, pointer: int) -> None:
        self._say("free")
        self._gpu.memory[pointer][:] = FREED

    def export(self, pointer: int) -> bytes:
        return pointer.to_bytes(64, "little")

    def open(self, device, exported: bytes) -> int:
        self._say("open")
        return int.from_bytes(exported, "little")

    def close(self, device, pointer: int) -> None:
        self._say("close")

    def tensor(self, device, memory) -> torch.Tensor:
        return torch.from_numpy(np.asarray(_Array(memory)))

    def synchronize(self, device) -> None:
        self._say("synchronize")

    def _say(self, call: str) -> None:
        self._gpu.log.append((self._role, call))


class _Array:
    """Numpy's array keeps this, and so the memory, alive."""

    def __init__(self, memory) -> None:
        self.memory = memory
        self.__array_interface__ = memory.__cuda_array_interface__
