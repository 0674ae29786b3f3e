"""Writes the files of the log of rollouts, in a thread of its own: no caller ever waits for the disk."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from partial_rollout.core.rollout_log import frame

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path
    from typing import BinaryIO

logger = logging.getLogger(__name__)

SYNC_S = 5.0
"""What the machine's loss of power can cost. A process that dies costs what its thread has not written yet."""
MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Bytes of records that wait for the disk: more means that the disk stands still, or is slower than the engines."""
MAX_FILE_BYTES = 32 * 1024 * 1024 * 1024
"""Bytes of a file: the records of one process since the last checkpoint. Hours between two checkpoints stay below."""


class _Removal(NamedTuple):
    folder: Path
    but: frozenset[str]


class LogWriter:
    """Appends records to a file; another file may follow.

    open -> append ... -> open -> append ... -> close
                 |
                 +--> the disk is full, too slow, or fails: one warning, and nothing is written any more

    What was appended is handed to the kernel as soon as the thread has no more to write, and is put on the disk every
    `SYNC_S` seconds and at `close`. Any thread may call all methods; none of them waits, but `close`.
    """

    def __init__(
        self,
        who: str,
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        max_file_bytes: int = MAX_FILE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`who` writes, for the warning."""
        self._who, self._max_waiting, self._max_file, self._clock = who, max_waiting_bytes, max_file_bytes, clock
        self._jobs: queue.SimpleQueue[Path | bytes | _Removal | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._num_waiting = self._num_bytes = 0
        self._is_off = self._is_closed = False
        self._file: BinaryIO | None = None
        self._synced_s: float | None = None
        """When the file's content was put on the disk last; None: all of it is there."""

    @property
    def is_on(self) -> bool:
        """Whether a file was opened, and none has failed."""
        return self._thread is not None and not self._is_off and not self._is_closed

    def open(self, path: Path) -> None:
        """What is appended from now on goes into this new file; its folder is made if it is missing."""
        with self._lock:
            if self._is_off or self._is_closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"log of rollouts of {self._who}", daemon=True)
                self._thread.start()
            self._num_bytes = 0
            self._jobs.put(path)

    def append(self, payload: bytes) -> None:
        """Write a record down, some time soon or never."""
        with self._lock:
            if not self.is_on:
                return
            self._num_waiting += len(payload)
            self._num_bytes += len(payload)
            waiting, written = self._num_waiting, self._num_bytes
            if waiting <= self._max_waiting and written <= self._max_file:
                self._jobs.put(payload)
                return
            self._is_off = True
        why = (
            f"{waiting >> 20} MB wait for the disk" if waiting > self._max_waiting else f"{written >> 20} MB in a file"
        )
        self._warn(f"{why}, which is the limit")
        self._jobs.put(None)

    def remove(self, folder: Path, but: Collection[str] = ()) -> None:
        """Remove what is in a folder, `but` not these names; without any, the folder too.

        What was appended before is written before.
        """
        with self._lock:
            if self.is_on:
                self._jobs.put(_Removal(folder, frozenset(but)))

    def close(self, timeout_s: float) -> None:
        """Put all on the disk; one that stands still is left after `timeout_s`, so that it does not hold up the end."""
        with self._lock:
            if self._thread is None or self._is_closed:
                return
            self._is_closed = True
            self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._next():
                pass
            self._sync()
        except OSError as error:
            with self._lock:
                self._is_off = True
            self._warn(str(error))
        finally:
            if self._file is not None:
                with contextlib.suppress(OSError):  # a full disk fails again
                    self._file.close()

    def _next(self) -> bool:
        """Do what is asked for next; False: nothing more will be."""
        wait_s = None if self._synced_s is None else max(0.0, self._synced_s + SYNC_S - self._clock())
        try:
            job = self._jobs.get(timeout=wait_s)
        except queue.Empty:
            self._sync()
            return True
        if job is None or self._is_off:
            return False
        if isinstance(job, bytes):
            self._write(job)
        elif isinstance(job, _Removal):
            inside = [path for path in job.folder.glob("*") if path.name not in job.but]
            for folder in inside if job.but else [job.folder]:
                shutil.rmtree(folder, ignore_errors=True)
        else:
            self._turn_to(job)
        return True

    def _write(self, payload: bytes) -> None:
        if self._file is None:  # `append` does nothing before `open`
            return
        self._file.write(frame(payload))
        if self._synced_s is None:
            self._synced_s = self._clock()
        with self._lock:
            self._num_waiting -= len(payload)
        if self._jobs.empty():
            self._file.flush()
        if self._clock() >= self._synced_s + SYNC_S:
            self._sync()

    def _sync(self) -> None:
        self._synced_s = None
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def _turn_to(self, path: Path) -> None:
        self._sync()
        if self._file is not None:
            self._file.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb")

    def _warn(self, why: str) -> None:
        logger.warning(
            "the log of rollouts of %s ends here, the run goes on without it: %s. After a death that training cannot "
            "go on without, responses that are not in the log are generated again",
            self._who,
            why,
        )
