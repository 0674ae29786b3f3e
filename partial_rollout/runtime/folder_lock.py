"""A run's folder is one command's at a time: two would overwrite each other's checkpoints, and mix their events."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from typing import TYPE_CHECKING

from partial_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

logger = logging.getLogger(__name__)

NAME = "command.lock"
HELD = (errno.EACCES, errno.EAGAIN)
"""POSIX allows both for a lock that somebody else has."""


@contextlib.contextmanager
def folder_of_one_command(folder: Path, setting: str) -> Iterator[None]:
    """Keep other commands out of `folder`, the value of `setting`, until the block ends or this process dies.

    The lock is the kernel's and this process's alone: nothing of it is left after a kill, also where children go on.
    Closing the file anywhere in this process frees it, so nothing else opens `command.lock`. Where the folder's file
    system has no locks a warning says so.

    Raises:
        ConfigError: another command has the folder; names its host and pid.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        logger.warning("another command in %s=%s would not be noticed: %s", setting, folder, error)
        yield
        return
    try:
        _lock(file, folder, setting)
        yield
    finally:
        os.close(file)


def _lock(file: int, folder: Path, setting: str) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            holder = os.pread(file, 256, 0).decode(errors="replace").strip()
            raise ConfigError(
                f"another command ({holder}) runs in {setting}={folder}, and both would write their events, "
                f"checkpoints and logged responses there. Wait for its end or end it, or set another folder in "
                f"{setting}. If its machine is gone and a file server still holds its lock, remove {folder / NAME}"
            ) from error
        logger.warning("another command in %s=%s would not be noticed: %s", setting, folder, error)
        return
    with contextlib.suppress(OSError):  # the lock holds on a full disk too; only the name of its owner is missing
        os.ftruncate(file, 0)
        os.pwrite(file, f"host {socket.gethostname()}, pid {os.getpid()}\n".encode(), 0)
