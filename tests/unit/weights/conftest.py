from __future__ import annotations

import pytest


@pytest.fixture
def channels():
    """A private folder for a test's sockets; nothing may be left in it but its lock."""
    from partial_rollout.weights.directory import ChannelDirectory

    directory = ChannelDirectory()
    yield directory
    left = sorted(path.name for path in directory.path.iterdir()) if directory.path.exists() else ["owner"]
    directory.remove()
    assert left == ["owner"]
