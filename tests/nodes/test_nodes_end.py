"""However the process ends that has made two nodes, nothing on them goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import IO

import psutil
import pytest

from tests.nodes.conftest import processes_of, require_nodes

END_S = 60.0
OWNER = """
import os
import signal
from scripts.two_nodes import two_nodes
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background command ignores it
with two_nodes() as nodes:
    jobs = [node.popen("sleep", "1000") for node in nodes]
    print(*(node.pid for node in nodes), flush=True)
    for job in jobs:
        job.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_nodes_whose_owner_is_ended(number: signal.Signals) -> None:
    """Ctrl-C reaches the owner and its commands; other signals here only the owner."""
    require_nodes()
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        processes = [process for pid in _first_line(owner.stdout).split() for process in processes_of(int(pid))]
        owner.send_signal(number)
        try:
            owner.wait(END_S)
        finally:
            owner.kill()  # else an error would wait for it
    assert len(processes) >= 4  # the first process of each node, and the one that holds the pipe
    assert psutil.wait_procs(processes, timeout=END_S)[1] == []


def _first_line(pipe: IO[str] | None) -> str:
    return pipe.readline() if pipe else ""
