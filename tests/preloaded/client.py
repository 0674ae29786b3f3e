"""Stands in for one process of a nursery: `python -I -S client.py SOCKET SCRIPT ARGS`, without any import of ours.

It sends its arguments, environment, folder, niceness and open files, and waits for the exit status. If it is killed,
the nursery kills the process; SIGTERM and SIGINT are passed on. It ends as its process did, by the same signal if by
one.

A worker of Ray comes from the nursery of its raylet and job, which the first such client asks the first nursery for.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import signal
import socket
import struct
import sys

RAYLET, JOB = "RAY_RAYLET_PID", "RAY_JOB_ID"
"""Variables of Ray's workers, which Ray's library reads when it is loaded."""
HIGH = 300
"""Number of a nursery's first file."""


def main() -> int:
    """Exit status of the process; 1 if the nursery is gone."""
    address, environment = sys.argv[1], os.environ
    if RAYLET in environment and JOB in environment:
        address = _of_the_job(address, f"{environment[RAYLET]}-{environment[JOB]}")
    server = _asked(address, sys.argv[2:], {number: number for number in _open_files()})
    answer = server.recv(4, socket.MSG_WAITALL)
    if len(answer) < 4:
        return 1
    (pid,) = struct.unpack("!I", answer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    answer = server.recv(4, socket.MSG_WAITALL)
    (status,) = struct.unpack("!i", answer) if len(answer) == 4 else (1,)
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _open_files() -> list[int]:
    candidates = (int(name) for name in os.listdir("/proc/self/fd"))
    return sorted(fd for fd in candidates if os.path.exists(f"/proc/self/fd/{fd}"))


def _asked(address: str, argv: list[str], files: dict[int, int], *, is_own: bool = True) -> socket.socket:
    """A connection to the nursery, which has the request: `files` by the numbers that they have in the process.

    The process ends with the connection if `is_own`.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect(address)
    request = {"argv": argv, "environment": dict(os.environ), "folder": os.getcwd(), "files": list(files)}
    request["niceness"] = os.getpriority(os.PRIO_PROCESS, 0)
    text = json.dumps(request | {"is_own": is_own}).encode()
    # With the first byte the files arrive.
    server.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files.values()))])
    server.sendall(struct.pack("!I", len(text)) + text)
    return server


def _of_the_job(first: str, name: str) -> str:
    """Address of the nursery for a job's workers."""
    address = f"{first}-{name}"
    with open(f"{first}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(address):
            _start_nursery(first, address)
    return address


def _start_nursery(first: str, address: str) -> None:
    """Start the nursery: it listens from here on, and answers when it has imported; it ends with the raylet."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    with open(f"{address}.log", "wb") as log, open(os.devnull) as nothing:
        standard = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno()}
        own = {HIGH: listener.fileno(), HIGH + 1: os.pidfd_open(int(os.environ[RAYLET]))}
        words = ["-m", "tests.preloaded.nursery", *map(str, own), os.path.dirname(first), "job"]
        _asked(first, words, standard | own, is_own=False).close()


if __name__ == "__main__":
    sys.exit(main())
