"""The weight channel's files: a server's private folder of sockets, shared memory, and whose file is whose.

A file tells, across process and container boundaries, whether its owner is still alive: the owner holds a file lock,
which the kernel drops when the process ends, however it ends. So what a killed process leaves is provably nobody's. A
process id in the name could not prove that: ids are reused, and differ between containers that share a folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from partial_rollout.errors import ConfigError
from partial_rollout.weights.line import IPC

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "prw-"
UNLOCKED_SUFFIX = ".new"
"""Ending of a file's name until it is locked, so that nobody takes it for abandoned in between."""
GRACE_S = 60.0
"""A file or folder that is older than this and not locked is abandoned: locking takes far less time."""
OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
LOCK_NAME = "owner"
"""The file that a server keeps locked in its folder."""
SECRET_BYTES = 32
MAX_SOCKET_PATH_BYTES = 107
"""Linux takes no longer address of a Unix socket."""
DIRECTORY_VARIABLE = "PARTIAL_ROLLOUT_WEIGHTS_DIRECTORY"
SECRET_VARIABLE = "PARTIAL_ROLLOUT_WEIGHTS_SECRET"
"""vLLM's worker processes inherit both from the server; only processes of the same user can read them there."""


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where a channel's two ends meet and how they know each other; travels by Ray and the environment only."""

    directory: str
    secret: bytes = field(repr=False)
    node_id: str = ""
    """Ray's name of the server's node; empty where nobody asks."""

    def endpoint(self, channel: str, update_number: int) -> str:
        """Where the two ends of one update of one channel meet on this node; both ends compute it."""
        return f"{IPC}{self.socket_path(channel, update_number)}"

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
        # The folder holds no lock file, so no server owns it; `rmtree` of another user's folder would fail.
        if path not in removed and not (path / LOCK_NAME).exists() and is_overdue(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def remove_abandoned_segments(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Delete segments of this user whose sender was killed before the receiver had opened them; return them."""
    removed: list[Path] = []
    for path in sorted(folder.glob(f"{owned_prefix()}*")):
        if path.name.endswith(UNLOCKED_SUFFIX) and not is_overdue(path):
            continue  # its owner is about to lock it
        with abandoned(path) as is_abandoned:
            if is_abandoned and path.is_file():
                path.unlink(missing_ok=True)
                removed.append(path)
    return removed


def is_overdue(path: Path) -> bool:
    """Whether what stands here has been waiting to be locked for too long: its maker was killed before it could."""
    try:
        return time.time() - path.stat().st_mtime > GRACE_S
    except FileNotFoundError:
        return False


def owned_prefix() -> str:
    """How names of this user's files and folders begin."""
    return f"{PREFIX}{os.getuid()}-"


def create_locked(path: Path) -> int:
    """Create a new file, readable by this user only; return its descriptor, which holds the lock until closed.

    Raises:
        FileExistsError: somebody else made a file of that name.
    """
    unlocked = path.with_name(path.name + UNLOCKED_SUFFIX)
    descriptor = os.open(unlocked, OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(unlocked, path)
    return descriptor


@contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Whether the owner of a file of ours is gone; while the block runs nobody else comes to the same conclusion."""
    try:
        descriptor = os.open(path, OPEN_FLAGS)
    except OSError:
        yield False  # removed meanwhile, or not ours
        return
    try:
        yield os.fstat(descriptor).st_uid == os.getuid() and _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
