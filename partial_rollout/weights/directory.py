"""The private folder of one server, in which its weight channels have their sockets."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from partial_rollout.errors import ConfigError
from partial_rollout.weights.ownership import abandoned, create_locked, is_overdue, owned_prefix
from partial_rollout.weights.shared_buffers import remove_abandoned_segments

LOCK_NAME = "owner"
SECRET_BYTES = 32
MAX_SOCKET_PATH_BYTES = 107
"""Of a Unix socket's address on Linux."""
DIRECTORY_VARIABLE = "PARTIAL_ROLLOUT_WEIGHTS_DIRECTORY"
SECRET_VARIABLE = "PARTIAL_ROLLOUT_WEIGHTS_SECRET"
"""vLLM's worker processes inherit both from the server; only processes of the same user can read them there."""


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where a channel's two ends meet and how they know each other; travels by Ray and the environment only."""

    directory: str
    secret: bytes = field(repr=False)

    def socket_path(self, channel: str, update_number: int) -> Path:
        """Address of one update of one channel; both ends compute it.

        Raises:
            ConfigError: the folder's path is too long for a socket.
        """
        # verl's names for a channel are long and hold slashes.
        short = hashlib.sha256(channel.encode()).hexdigest()[:12]
        path = Path(self.directory) / f"{short}-{update_number}.sock"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"{path} is too long for a socket: set TMPDIR to a shorter path than {self.directory}")
        return path

    def export(self) -> None:
        """Let processes started from here on find it."""
        os.environ[DIRECTORY_VARIABLE] = self.directory
        os.environ[SECRET_VARIABLE] = self.secret.hex()

    @classmethod
    def inherited(cls) -> ChannelAddress:
        """What the server exported; KeyError in a process that no server of ours started."""
        return cls(os.environ[DIRECTORY_VARIABLE], bytes.fromhex(os.environ[SECRET_VARIABLE]))


class ChannelDirectory:
    """Mode 0700, under a random name, locked by this process; `remove` deletes it."""

    def __init__(self, base: Path | None = None) -> None:
        """Create it, and delete what killed processes of this user left in the same place."""
        base = Path(tempfile.gettempdir()) if base is None else base
        remove_abandoned_directories(base)
        self.path = Path(tempfile.mkdtemp(prefix=owned_prefix(), dir=base))
        self._lock = create_locked(self.path / LOCK_NAME)
        self.address = ChannelAddress(str(self.path), secrets.token_bytes(SECRET_BYTES))

    def remove(self) -> None:
        """Delete the folder; a second call does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def open_channels() -> ChannelDirectory:
    """A server's folder, for its workers to inherit; what killed processes of this user left goes."""
    remove_abandoned_segments()
    channels = ChannelDirectory()
    channels.address.export()
    return channels


def remove_abandoned_directories(base: Path) -> list[Path]:
    """Delete folders of this user whose owner has died; return them."""
    removed: list[Path] = []
    for path in sorted(base.glob(f"{owned_prefix()}*/{LOCK_NAME}")):
        with abandoned(path) as is_abandoned:
            if is_abandoned:
                shutil.rmtree(path.parent, ignore_errors=True)
                removed.append(path.parent)
    for path in sorted(base.glob(f"{owned_prefix()}*/")):
        # Nobody's lock is in it; `rmtree` of another user's folder would fail.
        if path not in removed and not (path / LOCK_NAME).exists() and is_overdue(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed
