from __future__ import annotations

import os
import subprocess

import pytest
import torch

from partial_rollout.errors import SharedMemoryFull, WeightProtocolError
from partial_rollout.weights.directory import owned_prefix
from partial_rollout.weights.protocol.wire import SharedBuffers
from partial_rollout.weights.shared_buffers import SharedBufferReader, SharedBufferWriter

BUFFER_BYTES = 4096


@pytest.fixture
def buffers(tmp_path):
    writer = SharedBufferWriter(BUFFER_BYTES, 2, folder=tmp_path)
    yield writer
    writer.close()


def test_both_ends_see_the_same_bytes(buffers, tmp_path):
    reader = SharedBufferReader(buffers.offer, folder=tmp_path)
    buffers.write(0, 0, torch.full((BUFFER_BYTES,), 1, dtype=torch.uint8))
    buffers.write(1, 64, torch.full((8,), 2, dtype=torch.uint8))
    assert reader.lease(1)[60:68].tolist() == [0, 0, 0, 0, 2, 2, 2, 2]
    assert set(reader.lease(0).tolist()) == {1}


def test_a_buffer_is_held_for_as_long_as_a_view_of_a_view_of_it(buffers, tmp_path):
    reader = SharedBufferReader(buffers.offer, folder=tmp_path)
    view = reader.lease(1)[64:128].view(torch.float32).reshape(4, 4)[1]
    assert [reader.leases.is_held(buffer) for buffer in (0, 1)] == [False, True]
    reader.close()
    buffers.close()
    assert view.tolist() == [0.0] * 4
    del view
    assert reader.leases.num_held == 0


def test_closed_buffers_are_not_lent(buffers, tmp_path):
    reader = SharedBufferReader(buffers.offer, folder=tmp_path)
    reader.close()
    with pytest.raises(WeightProtocolError, match="closed"):
        reader.lease(0)


def test_only_this_user_may_open_it(buffers, tmp_path):
    assert (tmp_path / buffers.offer.name).stat().st_mode & 0o777 == 0o600


def test_what_is_not_written_takes_no_memory(tmp_path):
    writer = SharedBufferWriter(1 << 30, 2, folder=tmp_path)
    writer.write(0, 0, torch.zeros(10, dtype=torch.uint8))
    assert (tmp_path / writer.offer.name).stat().st_blocks * 512 <= 1 << 16
    writer.close()


def test_closing_twice_is_allowed(buffers, tmp_path):
    buffers.close()
    buffers.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../etc/passwd", "psm_other", "/dev/shm/x", ""])
def test_an_offer_that_is_no_segment_of_ours_is_refused(name, tmp_path):
    with pytest.raises(WeightProtocolError, match="no shared memory segment"):
        SharedBufferReader(SharedBuffers(name, 64, 2), folder=tmp_path)


def test_an_offer_larger_than_its_segment_is_refused(buffers, tmp_path):
    offer = SharedBuffers(buffers.offer.name, BUFFER_BYTES, 3)
    with pytest.raises(WeightProtocolError, match=f"has {2 * BUFFER_BYTES} bytes"):
        SharedBufferReader(offer, folder=tmp_path)


def test_a_link_is_not_followed(buffers, tmp_path):
    name = f"{owned_prefix()}link"
    os.symlink(tmp_path / buffers.offer.name, tmp_path / name)
    with pytest.raises(WeightProtocolError, match="cannot be opened"):
        SharedBufferReader(SharedBuffers(name, BUFFER_BYTES, 2), folder=tmp_path)


def test_a_file_system_without_room_is_named_with_its_free_bytes(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        writer = SharedBufferWriter(1 << 20, 2, folder=tmp_path)
        with pytest.raises(SharedMemoryFull, match=r"no room for 1048576 more bytes .* of 65536 bytes free"):
            writer.write(0, 0, torch.zeros(1 << 20, dtype=torch.uint8))
        writer.close()
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)
