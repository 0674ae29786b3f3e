from __future__ import annotations

import pytest

from partial_rollout.errors import ConfigError
from partial_rollout.weights.directory import ChannelAddress, ChannelDirectory


def test_only_this_user_may_enter(channels):
    assert channels.path.stat().st_mode & 0o777 == 0o700


def test_every_server_has_a_secret_of_its_own(channels, tmp_path):
    other = ChannelDirectory(tmp_path)
    assert other.address.secret != channels.address.secret
    assert len(other.address.secret) == 32
    other.remove()


def test_the_secret_is_not_printed(channels):
    assert channels.address.secret.hex() not in repr(channels.address)
    assert repr(channels.address.secret) not in repr(channels.address)


def test_child_processes_inherit_the_address(channels, monkeypatch):
    monkeypatch.setattr("os.environ", {})
    channels.address.export()
    assert ChannelAddress.inherited() == channels.address


def test_channels_and_updates_have_sockets_of_their_own(channels):
    paths = {channels.address.socket_path(name, update_number) for name in ("a/0", "a/1") for update_number in (1, 2)}
    assert len(paths) == 4
    assert all(path.parent == channels.path for path in paths)


def test_a_folder_too_deep_for_a_socket_is_the_users_to_change():
    with pytest.raises(ConfigError, match="TMPDIR"):
        ChannelAddress("/tmp/" + "x" * 90, b"").socket_path("a", 1)


def test_removing_twice_is_allowed(tmp_path):
    directory = ChannelDirectory(tmp_path)
    directory.remove()
    directory.remove()
    assert list(tmp_path.iterdir()) == []
