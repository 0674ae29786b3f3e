"""New memory of this process for a tensor that is put together from pieces."""

from __future__ import annotations

import contextlib
import mmap

import torch

HUGE_FROM_BYTES = 4 << 20
"""Twice a huge page: at least one fits whole."""


def allocate(num_bytes: int) -> torch.Tensor:
    """Bytes (uint8, 1-d) of any content, in huge pages if they are many and the kernel has such pages.

    The first write to fresh memory is mostly page faults: a third of the time with huge pages.
    """
    if num_bytes < HUGE_FROM_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
