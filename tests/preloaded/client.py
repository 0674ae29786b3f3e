"""Stands in for one process of the nursery: `python -I -S client.py FOLDER SCRIPT ARGS`, without any import of ours.

It sends its arguments, environment, folder and open files, and waits for the exit status. If it is killed, the
nursery kills the process; SIGTERM and SIGINT are passed on. The first client of a folder starts the nursery: Ray's
library reads its environment when it is imported, and that of all workers of one job on one node is the same.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys


def _open_files(own: int) -> list[int]:
    candidates = (int(name) for name in os.listdir("/proc/self/fd"))
    return sorted(fd for fd in candidates if fd != own and os.path.exists(f"/proc/self/fd/{fd}"))


ROOM = "." * 1000
"""An argument of the nursery. Ray writes a process's title over its arguments and, where they are shorter than the
title, over the environment that tests find a job's processes by."""


def _start_nursery(folder: str) -> None:
    """It listens from here on, and answers when it has imported."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{folder}/socket")
    listener.listen(64)
    with open(f"{folder}/log", "wb") as log:
        subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded.nursery", str(listener.fileno()), ROOM],
            pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    listener.close()


def _connected(folder: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with open(f"{folder}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(f"{folder}/socket"):
            _start_nursery(folder)
        server.connect(f"{folder}/socket")
    return server


def main() -> int:
    """Exit status of the process, 128 + the signal's number after a signal."""
    server = _connected(sys.argv[1])
    files = _open_files(server.fileno())
    request = {"argv": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
    text = json.dumps(request).encode()
    # With the first byte the files arrive.
    server.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    server.sendall(struct.pack("!I", len(text)) + text)
    (pid,) = struct.unpack("!I", server.recv(4, socket.MSG_WAITALL))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = server.recv(4, socket.MSG_WAITALL)
    return struct.unpack("!i", status)[0] if len(status) == 4 else 1


if __name__ == "__main__":
    sys.exit(main())
