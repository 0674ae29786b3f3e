"""The log's thread: what is appended is on the disk in the end, and a bad disk ends the log and nothing else."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

from partial_rollout.core.rollout_log import FrameReader
from partial_rollout.runtime import log_writer
from partial_rollout.runtime.log_writer import LogWriter

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

LONG_S = 60.0


def payloads(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        return [payload for _, payload in FrameReader(file)]


def test_records_are_in_the_file_that_was_open_when_they_were_appended(tmp_path: Path) -> None:
    first, second = tmp_path / "a/1.log", tmp_path / "b/1.log"
    writer = LogWriter("w")
    writer.append(b"before any file")
    writer.open(first)
    for number in range(100):
        writer.append(b"%d" % number)
    writer.open(second)
    writer.append(b"later")
    writer.close(LONG_S)
    assert payloads(first) == [b"%d" % number for number in range(100)]
    assert payloads(second) == [b"later"]


def test_a_folder_is_removed_after_what_came_before(tmp_path: Path) -> None:
    writer = LogWriter("w")
    writer.open(tmp_path / "old/1.log")
    writer.append(b"one")
    writer.open(tmp_path / "new/1.log")
    (tmp_path / "older").mkdir()
    writer.remove(tmp_path, but={"new", "never was"})
    writer.remove(tmp_path / "never was")
    writer.append(b"two")
    writer.close(LONG_S)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert payloads(tmp_path / "new/1.log") == [b"two"]


def test_a_full_disk_ends_the_log_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = LogWriter("worker-0")
    writer.open(tmp_path / "1.log")
    writer.append(b"one")
    writer.close(LONG_S)
    monkeypatch.setattr(os, "fsync", full)
    writer = LogWriter("worker-0")
    writer.open(tmp_path / "2.log")
    writer.append(b"two")
    writer.open(tmp_path / "3.log")  # puts the file before on the disk
    assert writer._thread is not None
    writer._thread.join(LONG_S)
    assert not writer.is_on
    writer.append(b"three")
    writer.open(tmp_path / "4.log")
    writer.close(LONG_S)
    (warning,) = caplog.records
    assert "log of rollouts of worker-0 ends here" in warning.message
    assert "No space left on device" in warning.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.log", "2.log"]


def test_a_disk_that_stands_still_costs_the_log_and_no_caller_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reached, goes_on = threading.Event(), threading.Event()

    def stands_still(number: int) -> None:
        reached.set()
        goes_on.wait(LONG_S)

    monkeypatch.setattr(os, "fsync", stands_still)
    writer = LogWriter("worker-0", max_waiting_bytes=100)
    writer.open(tmp_path / "1.log")
    writer.open(tmp_path / "2.log")
    assert reached.wait(LONG_S)
    for _ in range(10):
        writer.append(b"x" * 40)
    assert not writer.is_on
    writer.close(timeout_s=0.0)
    assert "wait for the disk" in caplog.text
    assert len(caplog.records) == 1
    goes_on.set()
    assert writer._thread is not None
    writer._thread.join(LONG_S)


def test_a_file_has_a_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = LogWriter("worker-0", max_file_bytes=100)
    writer.open(tmp_path / "1.log")
    for _ in range(3):
        writer.append(b"x" * 40)
    writer.close(LONG_S)
    assert (writer.is_on, len(caplog.records)) == (False, 1)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 100


def test_what_was_written_is_put_on_the_disk_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, now_s = threading.Event(), [0.0]
    monkeypatch.setattr(os, "fsync", lambda number: synced.set())
    writer = LogWriter("w", clock=lambda: now_s[0])
    writer.open(tmp_path / "1.log")
    writer.append(b"one")
    now_s[0] = log_writer.SYNC_S
    writer.append(b"two")
    assert synced.wait(LONG_S)
    writer.close(LONG_S)
