"""One end is killed (SIGKILL): the other says so at once, and nothing is left for good."""

from __future__ import annotations

import os

import pytest
import torch

from partial_rollout.errors import WeightPeerLost
from partial_rollout.weights.directory import (
    UNLOCKED_SUFFIX,
    ChannelDirectory,
    owned_prefix,
    remove_abandoned_directories,
    remove_abandoned_segments,
)
from partial_rollout.weights.shared_buffers import SharedBufferWriter
from tests.unit.weights.support import Peer, exchange, make_receiver, make_weights, over, segments, send_all

pytestmark = pytest.mark.slow

SENDER = """
send_all(address, make_weights(8))
"""
RECEIVER = """
with make_receiver(address) as receiver:
    for _ in receiver.tensors():
        say("streaming")
        stall()
"""


@pytest.fixture(params=["ipc", "tcp"])
def channels(request, channels):
    """Within a node, and between nodes."""
    return over(request.param, channels)


def test_a_killed_sender_is_named_at_once_and_leaves_no_segment(channels):
    kept = list(channels.path.glob("*"))
    with Peer(channels.address, SENDER) as peer, make_receiver(channels.address) as receiver:
        tensors = receiver.tensors()
        next(tensors)
        peer.kill()
        with pytest.raises(WeightPeerLost, match="training worker of channel test is gone"):
            list(tensors)
        assert segments(peer.process.pid) == []
    sent, received = exchange(channels.address, make_weights(2))
    assert (sent.num_tensors, len(received)) == (2, 2)
    assert list(channels.path.glob("*")) == kept


def test_a_killed_receiver_is_named_at_once_and_leaves_nothing(channels):
    before = segments()

    def weights(peer):
        yield from make_weights(1)
        yield "small", torch.zeros(1)  # with it the first one's last bucket leaves
        peer.wait_for("streaming")
        peer.kill()
        yield from make_weights(8, seed=1)

    with (
        Peer(channels.address, RECEIVER) as peer,
        pytest.raises(WeightPeerLost, match="engine's worker for channel test is gone"),
    ):
        send_all(channels.address, (("x" + name, tensor) for name, tensor in weights(peer)))
    assert segments() == before


@pytest.mark.parametrize("channels", ["ipc"], indirect=True)
def test_a_segment_of_a_killed_sender_goes_with_the_next_start_and_one_in_use_stays(channels, tmp_path):
    body = "from pathlib import Path\nfrom partial_rollout.weights.shared_buffers import SharedBufferWriter\n"
    body += f"buffers = SharedBufferWriter(4096, 2, folder=Path({str(tmp_path)!r}))\nsay(buffers.offer.name)\nstall()"
    in_use = SharedBufferWriter(4096, 2, folder=tmp_path)
    with Peer(channels.address, body) as peer:
        name = peer.process.stdout.readline().strip()
        assert remove_abandoned_segments(tmp_path) == []
    assert (tmp_path / name).exists()
    assert remove_abandoned_segments(tmp_path) == [tmp_path / name]
    assert [path.name for path in tmp_path.iterdir()] == [in_use.offer.name]
    in_use.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("channels", ["ipc"], indirect=True)
def test_a_folder_of_a_killed_server_goes_with_the_next_start_and_one_in_use_stays(channels, tmp_path):
    body = "from pathlib import Path\nfrom partial_rollout.weights.directory import ChannelDirectory\n"
    body += f"directory = ChannelDirectory(Path({str(tmp_path)!r}))\n"
    body += "(directory.path / 'x.sock').touch()\nsay(directory.path)\nstall()"
    in_use = ChannelDirectory(tmp_path)
    with Peer(channels.address, body) as peer:
        killed = peer.process.stdout.readline().strip()
        assert remove_abandoned_directories(tmp_path) == []
    following = ChannelDirectory(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([in_use.path, following.path])
    assert killed not in map(str, tmp_path.iterdir())
    in_use.remove()
    following.remove()


def test_a_segment_that_is_about_to_be_locked_is_not_taken_for_abandoned(tmp_path):
    new = tmp_path / f"{owned_prefix()}1-ab{UNLOCKED_SUFFIX}"
    new.touch()
    assert remove_abandoned_segments(tmp_path) == []
    assert new.exists()
    os.utime(new, (0, 0))
    assert remove_abandoned_segments(tmp_path) == [new]


def test_a_folder_whose_maker_was_killed_before_it_locked_it_goes_when_it_is_old(tmp_path):
    folder = tmp_path / f"{owned_prefix()}abc"
    folder.mkdir()
    (folder / f"owner{UNLOCKED_SUFFIX}").touch()
    assert remove_abandoned_directories(tmp_path) == []
    os.utime(folder, (0, 0))
    assert remove_abandoned_directories(tmp_path) == [folder]
