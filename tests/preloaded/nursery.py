"""The process that forks: everything is imported in it, and it has one thread of Python."""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MODULES = (
    "ray._private.workers.default_worker",
    "vllm.v1.engine.async_llm",
    "verl.trainer.main_ppo",
    "verl.experimental.reward_loop",
    "partial_rollout.train.task_runner",
    "partial_rollout.train.trainer",
    "partial_rollout.train.workers",
    "partial_rollout.rollout.server",
    "partial_rollout.agent_loop.worker",
)
CHOICE = "PARTIAL_ROLLOUT_TEST_PRELOAD"
"""Variable with other modules than these."""
MAX_FILES = 250
"""Of one message; the kernel allows 253."""
HIGH = 900
"""Files of a new process lie from here on until their own numbers are free."""


@dataclass(frozen=True)
class Request:
    """What the client was started with."""

    argv: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]


class Nursery:
    """Forks on request until the raylet that its processes belong to has ended."""

    def __init__(self, listener: socket.socket, raylet: int) -> None:
        self._listener, self._raylet = listener, raylet
        self._clients: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> Request | None:
        """In the nursery: None when the raylet has ended. In each fork of it: the request that the fork is for."""
        for source in (self._listener, self._wake, self._raylet):
            self._selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._raylet:
                    return None
                if key.fileobj is self._listener:
                    request = self._fork(self._listener.accept()[0])
                    if request is not None:
                        return request
                elif key.fileobj is self._wake:
                    self._reap()
                else:
                    self._lost(key.data)

    def _fork(self, client: socket.socket) -> Request | None:
        request, files = _receive(client)
        pid = os.fork()
        if pid == 0:
            self._leave(client, request, files)
            return request
        for fd in files:
            os.close(fd)
        client.sendall(struct.pack("!I", pid))
        self._clients[pid] = client
        self._selector.register(client, selectors.EVENT_READ, data=pid)
        return None

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                code = os.waitstatus_to_exitcode(status)
                client = self._clients.pop(pid, None)
                if client is not None:
                    self._selector.unregister(client)
                    with contextlib.suppress(OSError):
                        client.sendall(struct.pack("!i", code if code >= 0 else 128 - code))
                    client.close()

    def _lost(self, pid: int) -> None:
        client = self._clients.pop(pid, None)
        if client is not None:  # otherwise the process has ended in the meantime
            self._selector.unregister(client)
            client.close()
            os.kill(pid, signal.SIGKILL)

    def _leave(self, client: socket.socket, request: Request, files: list[int]) -> None:
        """Become a process as if started by itself: signals, files, environment and folder of the client."""
        os.setpgid(0, 0)  # when a worker has ended, Ray kills what is left of its process group
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        high = [os.dup2(fd, HIGH + place, inheritable=False) for place, fd in enumerate(files)]
        self._selector.close()
        for each in (self._listener, self._wake, self._woken, client, *self._clients.values()):
            each.close()
        os.close(self._raylet)
        for fd in files:
            os.close(fd)
        for fd, number in zip(high, request.files, strict=True):
            os.dup2(fd, number, inheritable=True)
            os.close(fd)
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)


def _receive(client: socket.socket) -> tuple[Request, list[int]]:
    fds = array.array("i")
    _, messages, _, _ = client.recvmsg(1, socket.CMSG_LEN(MAX_FILES * fds.itemsize))
    for _, _, data in messages:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    (size,) = struct.unpack("!I", client.recv(4, socket.MSG_WAITALL))
    fields: dict[str, Any] = json.loads(client.recv(size, socket.MSG_WAITALL))
    return Request(**fields), list(fds)


def run(request: Request) -> None:
    """Run the requested script as `python SCRIPT ARGS` would."""
    random.seed()
    np.random.seed()
    sys.argv = request.argv
    sys.path[0] = str(Path(request.argv[0]).resolve().parent)
    runpy.run_path(request.argv[0], run_name="__main__")


def main() -> None:
    """Import, then fork; the listening socket is inherited."""
    chosen = os.environ.get(CHOICE)
    for module in chosen.split(",") if chosen else MODULES:
        importlib.import_module(module)
    nursery = Nursery(socket.socket(fileno=int(sys.argv[1])), os.pidfd_open(int(os.environ["RAY_RAYLET_PID"])))
    request = nursery.serve()
    if request is None:
        os._exit(0)
    run(request)


if __name__ == "__main__":
    main()
