"""A fork of the nursery is what the command would have been: arguments, environment, folder, files, exit status."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[3]
CLIENT = ROOT / "tests/preloaded/client.py"
TIMEOUT_S = 60.0
SCRIPT = """
import os, sys
has_own_group = os.getpgrp() == os.getpid()
print(os.getpid(), has_own_group, os.getcwd(), os.environ["GREETING"], *sys.argv[1:], "wave" in sys.modules, flush=True)
data = sys.stdin.read()
print(data, end="")
sys.exit(7)
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the script by a client; what stands for the raylet ends with the test, and the nursery with it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    sockets = tempfile.mkdtemp(prefix="pr-", dir="/tmp")  # short: paths of sockets are limited to 107 bytes
    raylet = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    environment = {"RAY_RAYLET_PID": str(raylet.pid), "PYTHONPATH": str(ROOT), "PARTIAL_ROLLOUT_TEST_PRELOAD": "wave"}

    def start(*arguments: str, greeting: str = "hello", folder: Path = tmp_path) -> subprocess.Popen[str]:
        command = [sys.executable, "-I", "-S", str(CLIENT), sockets, str(tmp_path / "script.py"), *arguments]
        variables = os.environ | environment | {"GREETING": greeting}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=variables, cwd=folder, stdin=pipe, stdout=pipe, text=True)

    yield start
    nurseries = [
        each for each in psutil.process_iter(["cmdline"]) if "tests.preloaded.nursery" in (each.info["cmdline"] or ())
    ]
    ours = [each for each in nurseries if each.environ().get("RAY_RAYLET_PID") == str(raylet.pid)]
    assert ours
    raylet.communicate(timeout=TIMEOUT_S)
    assert psutil.wait_procs(ours, timeout=TIMEOUT_S)[1] == []
    shutil.rmtree(sockets)


def test_a_process_has_the_clients_arguments_environment_folder_and_files(started, tmp_path: Path) -> None:
    first = started("a", "b")
    out, _ = first.communicate("typed", timeout=TIMEOUT_S)
    pid, *rest = out.split()
    # A process group of its own, because Ray kills the group of a worker that has ended.
    assert rest == ["True", str(tmp_path), "hello", "a", "b", "True", "typed"]
    assert int(pid) != first.pid
    assert first.returncode == 7
    (tmp_path / "other").mkdir()
    second = started(greeting="bye", folder=tmp_path / "other")
    assert second.communicate("", timeout=TIMEOUT_S)[0].split()[2:] == [str(tmp_path / "other"), "bye", "True"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_client_and_process_end_together(started, number: signal.Signals) -> None:
    for whom in ("client", "process"):
        client = started()
        process = psutil.Process(int(client.stdout.readline().split()[0]))
        (client if whom == "client" else process).send_signal(number)
        assert client.wait(TIMEOUT_S) != 0
        assert psutil.wait_procs([process], timeout=TIMEOUT_S)[1] == []
        client.stdin.close()
        client.stdout.close()
