"""One command at a time in a run's folder."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from partial_rollout.errors import ConfigError
from partial_rollout.runtime.folder_lock import folder_of_one_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETTING = "trainer.default_local_dir"
HOLDS = (
    "import os, sys, pathlib\n"
    "from partial_rollout.runtime.folder_lock import folder_of_one_command\n"
    f"with folder_of_one_command(pathlib.Path(sys.argv[1]), {SETTING!r}):\n"
    "    child = os.fork()\n"
    "    print(child or '', end='\\n' if child else '', flush=True)\n"
    "    sys.stdin.read()\n"
)
"""Holds a folder, as does its child by what it has inherited, until its input ends."""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", HOLDS, str(tmp_path / "run")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_second_command_is_refused_and_told_who_has_the_folder(holder: subprocess.Popen[str], tmp_path: Path):
    assert holder.stdout is not None
    holder.stdout.readline()
    with (
        pytest.raises(
            ConfigError,
            match=rf"\(host \S+, pid {holder.pid}\) runs in {SETTING}=.*/run, and both would write their events",
        ),
        folder_of_one_command(tmp_path / "run", SETTING),
    ):
        pytest.fail("two commands have the folder")


def test_a_killed_command_has_no_folder_though_its_child_goes_on(holder: subprocess.Popen[str], tmp_path: Path):
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    holder.kill()
    holder.wait()
    os.kill(child, 0)
    with folder_of_one_command(tmp_path / "run", SETTING):
        assert (tmp_path / "run/command.lock").read_text().endswith(f"pid {os.getpid()}\n")


def test_a_command_that_has_ended_has_no_folder(holder: subprocess.Popen[str], tmp_path: Path):
    holder.communicate("")
    (tmp_path / "run/command.lock").write_text("host with-a-longer-name.than-this-one.example.org, pid 1234567\n")
    with folder_of_one_command(tmp_path / "run", SETTING):
        assert (tmp_path / "run/command.lock").read_text() == f"host {platform.node()}, pid {os.getpid()}\n"


def test_without_locks_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with folder_of_one_command(tmp_path, SETTING):
        pass
    assert "would not be noticed: [Errno 37] No locks available" in caplog.text


def test_a_folder_that_cannot_be_made_is_told_of_and_not_refused_here(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    (tmp_path / "file").touch()
    with folder_of_one_command(tmp_path / "file/run", SETTING):
        pass
    assert "would not be noticed" in caplog.text
