from __future__ import annotations

import errno
import mmap

import pytest
import torch

from partial_rollout.weights import buffers
from partial_rollout.weights.buffers import HUGE_FROM_BYTES, allocate


@pytest.mark.parametrize("num_bytes", [0, 3, HUGE_FROM_BYTES - 1, HUGE_FROM_BYTES, HUGE_FROM_BYTES + 1])
def test_memory_can_be_written_as_a_whole_and_outlives_its_maker(num_bytes):
    memory = allocate(num_bytes)
    assert (memory.dtype, memory.shape) == (torch.uint8, (num_bytes,))
    assert bool((memory.fill_(7) == 7).all())


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch):
    asked = []

    class OldKernel(mmap.mmap):
        def madvise(self, option):
            asked.append(option)
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(buffers.mmap, "mmap", OldKernel)
    assert allocate(HUGE_FROM_BYTES).fill_(1).sum() == HUGE_FROM_BYTES
    assert asked == [mmap.MADV_HUGEPAGE]
