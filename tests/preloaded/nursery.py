"""The process that forks: everything is imported in it, and it has one thread of Python."""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from setproctitle import setproctitle

from tests.preloaded import FIRST, JOB, LEFT_BY_IMPORTS, MARKS, ROOM, write_command

MAX_FILES = 250
"""File descriptors in one message; the kernel allows 253."""
ENV_START = 50
"""Number of the field of /proc/PID/stat that says where the environment lies (`man 5 proc`)."""
HIGH = 900
"""Files of a new process lie from here on until their own numbers are free."""


@dataclass(frozen=True)
class Request:
    """What the client was started with."""

    argv: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]
    niceness: int
    """Ray's workers are nicer than others, and so is what they start: an engine must not outrun its agent loops."""
    is_own: bool
    """Whether the process ends with its client."""

    @property
    def is_ray_worker(self) -> bool:
        """Whether the process may start an engine: a script of Ray's, which starts nothing by itself."""
        return self.argv[0].endswith("default_worker.py")


class Mark:
    """The variables `MARKS` where others read them: in /proc/PID/environ, which a fork has from the nursery."""

    def __init__(self) -> None:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._env_start = int(fields[ENV_START - 3])
        # Once for all forks: the first title wipes everything there, the later ones what the title before had.
        setproctitle(f"{__spec__.name} {' '.join(sys.argv[3:5])}")

    def write(self, environment: dict[str, str]) -> None:
        """Write the mark's variables in `environment` into this process's memory."""
        text = b"".join(f"{name}={environment[name]}".encode() + bytes(1) for name in MARKS if name in environment)
        ctypes.memmove(self._env_start, text, len(text))


class Nursery:
    """Forks on request until the process that it belongs to has ended."""

    def __init__(self, listener: socket.socket, owner: int, mark: Mark) -> None:
        """`owner` is a file that becomes readable when that process has ended (`os.pidfd_open`)."""
        self._listener, self._owner, self._mark = listener, owner, mark
        self._clients: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> Request | None:
        """In the nursery: None when its owner has ended. In each fork of it: the request that the fork is for."""
        for source in (self._listener, self._wake, self._owner):
            self._selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._owner:
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
        received = _receive(client)
        if received is None:
            client.close()
            return None
        request, files = received
        pid = os.fork()
        if pid == 0:
            self._leave(client, request, files)
            return request
        for fd in files:
            os.close(fd)
        if not request.is_own:
            client.close()
            return None
        with contextlib.suppress(OSError):  # it has been killed meanwhile: its end is read next, and ends the process
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
                client = self._clients.pop(pid, None)
                if client is not None:
                    self._selector.unregister(client)
                    with contextlib.suppress(OSError):
                        client.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
                    client.close()

    def _lost(self, pid: int) -> None:
        client = self._clients.pop(pid, None)
        if client is not None:  # otherwise the process has ended in the meantime
            self._selector.unregister(client)
            client.close()
            os.kill(pid, signal.SIGKILL)

    def _leave(self, client: socket.socket, request: Request, files: list[int]) -> None:
        """Become a process as if started by itself: signals, files, environment and folder of the client."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        high = [os.dup2(fd, HIGH + place, inheritable=False) for place, fd in enumerate(files)]
        self._selector.close()
        for each in (self._listener, self._wake, self._woken, client, *self._clients.values()):
            each.close()
        os.close(self._owner)
        for fd in files:
            os.close(fd)
        for fd, number in zip(high, request.files, strict=True):
            os.dup2(fd, number, inheritable=True)
            os.close(fd)
        os.environ.clear()
        os.environ.update(LEFT_BY_IMPORTS | request.environment)
        os.chdir(request.folder)
        os.setpriority(os.PRIO_PROCESS, 0, request.niceness)
        self._mark.write(request.environment)


def _receive(client: socket.socket) -> tuple[Request, list[int]] | None:
    """A client's request and files; None: it was killed before it had sent them, as Ray does with slow workers."""
    fds = array.array("i")
    try:
        _, messages, _, _ = client.recvmsg(1, socket.CMSG_LEN(MAX_FILES * fds.itemsize))
        for _, _, data in messages:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        size = client.recv(4, socket.MSG_WAITALL)
        text = client.recv(struct.unpack("!I", size)[0], socket.MSG_WAITALL) if len(size) == 4 else b""
        return Request(**json.loads(text)), list(fds)
    except (OSError, json.JSONDecodeError):
        for fd in fds:
            os.close(fd)
        return None


def run(request: Request) -> None:
    """Run a script, `-m MODULE` or `-c CODE` as `python` would; its flags are left out."""
    random.seed()
    np.random.seed()
    words = list(request.argv)
    while words[0].startswith("-") and words[0] not in ("-m", "-c"):
        del words[0]
    if words[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *words[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        _end_as_a_fork(compile(words[1], "<string>", "exec"), main)
    elif words[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), words[1:]
        sys.modules.pop(words[1], None)
        setproctitle(f"python {' '.join(request.argv)}"[: len(ROOM)])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(words[0]).resolve().parent), words
        runpy.run_path(words[0], run_name="__main__")


def _end_as_a_fork(code: types.CodeType, main: types.ModuleType) -> None:
    """Run code, then end the process without taking the interpreter apart, as `multiprocessing` does after a fork.

    That would write to all memory that the process shares with the nursery: 10 s for an engine core on a busy machine.
    """
    status = 0
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - joins threads, as the interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _own_nursery(folder: Path, mark: Mark) -> Request | None:
    """Give a process a nursery of its own for what it starts by `multiprocessing`, which is then its descendant.

    Returns None in the process, and the request in each fork of its nursery.
    """
    owner = os.pidfd_open(os.getpid())
    command, address = folder / f"python-{os.getpid()}", folder / f"socket-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address.unlink(missing_ok=True)  # of a process that was killed: its pid is used again
    listener.bind(str(address))
    listener.listen(64)
    write_command(command, address)
    multiprocessing.set_executable(str(command))
    if os.fork() != 0:
        listener.close()
        os.close(owner)
        return None
    request = Nursery(listener, owner, mark).serve()
    if request is None:
        command.unlink(missing_ok=True)
        address.unlink(missing_ok=True)
        os._exit(0)
    return request


def _name_classes_without_rays_random_numbers() -> None:
    """Let a decorated class have its random name from the kernel.

    Ray's own numbers come from a generator in its library that is seeded once a process: forks of a process that drew
    one draw the same ones, name their calls alike, and the actor that has two calls of one name aborts.
    """
    import ray.actor

    class ActorClassID(ray.actor.ActorClassID):  # pyright: ignore[reportAttributeAccessIssue]
        @classmethod
        def from_random(cls) -> Any:
            return cls(os.urandom(cls.size()))

    ray.actor.ActorClassID = ActorClassID  # pyright: ignore[reportAttributeAccessIssue]


def _check_rays_random_numbers() -> None:
    """Raises RuntimeError if an import has drawn one, so that two forks draw the same."""
    import ray

    drawn = []
    for _ in range(2):
        received, sent = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(sent, ray.ObjectRef.from_random().binary())
            os._exit(0)
        drawn.append(os.read(received, ray.ObjectRef.size()))
        os.waitpid(pid, 0)
        os.close(received)
        os.close(sent)
    if drawn[0] == drawn[1]:
        raise RuntimeError("one of the imports drew a random number of Ray's: its forks would name their calls alike")


def main() -> None:
    """Import, then fork; the listening socket and the owner's file are inherited."""
    mark = Mark()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process of pytest-xdist ignores it
    listener, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    folder, kind = Path(sys.argv[3]), sys.argv[4]
    before = dict(os.environ)
    if kind == JOB:
        _name_classes_without_rays_random_numbers()
    for module in (folder / kind).read_text().split():
        importlib.import_module(module)
    LEFT_BY_IMPORTS.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    if kind == FIRST and "ray" in sys.modules:
        raise ImportError(f"one of {(folder / kind).read_text()} imports Ray, which no job's process may share")
    if kind == JOB:
        _check_rays_random_numbers()
    gc.freeze()  # no collection of a fork looks at what was imported, which would copy its memory
    request = Nursery(listener, owner, mark).serve()
    if request is None:
        if kind == FIRST:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    os.setpgid(0, 0)  # when a worker has ended, Ray kills what is left of its process group
    if request.is_ray_worker:
        request = _own_nursery(folder, mark) or request
    run(request)


if __name__ == "__main__":
    main()
