"""The device module that verl uses on the CPU platform, in place of `torch.cuda`.

`is_available` says whether there is an accelerator: False, and verl skips its statistics of accelerator memory. verl
reads some counters without asking first; they are 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import get_rng_state, set_rng_state
from torch.cpu import Stream, current_stream, set_device, stream

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Stream",
    "current_device",
    "current_stream",
    "device_count",
    "empty_cache",
    "get_device_name",
    "get_rng_state",
    "ipc_collect",
    "is_available",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "stream",
    "synchronize",
]


def is_available() -> bool:
    """Whether there is an accelerator: never."""
    return False


def device_count() -> int:
    """One: the host."""
    return 1


def current_device() -> str:
    """Return the name `torch` places tensors by; the CPU has no device index."""
    return "cpu"


def get_device_name(device: object = None) -> str:
    """Return a name for logs and FLOPs tables."""
    return "CPU"


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Return (free, total) accelerator bytes."""
    return 0, 0


def _no_op(device: object = None) -> None:
    """Nothing is queued, cached or shared between processes on a CPU."""


def _zero_bytes(device: object = None) -> int:
    return 0


synchronize = empty_cache = ipc_collect = _no_op
reset_peak_memory_stats = reset_accumulated_memory_stats = _no_op
memory_allocated: Callable[..., int] = _zero_bytes
memory_reserved = max_memory_allocated = max_memory_reserved = _zero_bytes
