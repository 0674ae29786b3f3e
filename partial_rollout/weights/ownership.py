"""Files that tell, across process and container boundaries, whether their owner is still alive.

The owner holds a file lock, which the kernel drops when the process ends, however it ends. So what is left behind by a
killed process is provably nobody's, which a process id in the name could not prove (ids are reused, and differ between
containers that share a folder).
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PREFIX = "prw-"
UNLOCKED_SUFFIX = ".new"
"""A file has this until it is locked, so that nobody takes it for abandoned in between."""
GRACE_S = 60.0
"""From making a file or folder to locking it takes far less; what is older and not locked was never going to be."""
OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


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
