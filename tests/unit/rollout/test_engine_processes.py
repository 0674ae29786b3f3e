"""Engines whose processes are ended, with stand-ins for engine core and worker."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import psutil
import pytest

pytest.importorskip("vllm")

from partial_rollout.rollout import engine_process
from partial_rollout.rollout import server as server_module
from partial_rollout.rollout.engine_process import EngineProcess, end_orphans, end_processes
from tests.fake_engine import FakeServer
from tests.unit.rollout.servers import launched

HOUR_S = 3600.0
LIMIT_S = 60.0
WORKER = "import sys; print(flush=True); sys.stdin.read()"
CORE = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {WORKER!r}, "VLLM::Worker_TP0"], stdout=subprocess.PIPE)
worker.stdout.readline()  # Linux tells the words of a command a moment after its start
print(worker.pid, flush=True)
sys.stdin.read()
"""


class Core:
    """A process with the title of an engine core, and one below it with that of a worker; they end with the test."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", CORE, "VLLM::EngineCore"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.worker = psutil.Process(int(self.process.stdout.readline()))

    def die(self) -> None:
        self.process.kill()
        self.process.wait()

    def has_ended(self) -> bool:
        return self.process.poll() is not None and not is_running(self.worker)


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def core(monkeypatch):
    monkeypatch.setattr(server_module, "WORKER_STOP_S", 0.05)
    core = Core()
    with core.process:
        yield core
        core.die()


async def test_a_relaunch_ends_the_workers_of_a_core_that_was_killed(core):
    server = await launched()
    core.die()
    assert is_running(core.worker)
    await server.relaunch()
    assert core.has_ended()


async def test_a_process_that_began_after_the_engine_was_attached_is_ended_as_well(monkeypatch, core):
    server = FakeServer()
    with monkeypatch.context() as before_it_began:
        before_it_began.setattr(server_module, "engine_processes", list)
        await server.launch_server()
    await server._stop_engine(0.0)
    assert core.has_ended()


class Successor(psutil.Process):
    """The one waited for ended without being seen, and its id went to another."""

    def wait(self, timeout=None):
        raise psutil.TimeoutExpired(timeout or 0.0, self.pid)

    def kill(self):
        raise psutil.NoSuchProcess(self.pid)


def test_a_process_whose_id_went_to_another_does_not_keep_the_rest_from_being_ended(core):
    end_processes([Successor(os.getpid()), core.worker, psutil.Process(core.process.pid)], grace_s=0.05)
    assert core.has_ended()


class Slow(psutil.Process):
    """A process whose end takes the kernel long."""

    def kill(self):
        pass

    def status(self):
        return psutil.STATUS_RUNNING


def test_a_killed_process_is_waited_for_however_little_time_it_had_to_end_by_itself(monkeypatch):
    waits_s, num_looks = [], 50

    def wait(processes, timeout):
        waits_s.append(timeout)
        return ([], list(processes)) if len(waits_s) < num_looks else (list(processes), [])

    monkeypatch.setattr(engine_process, "KILLED_S", HOUR_S)
    monkeypatch.setattr(psutil, "wait_procs", wait)
    end_processes([Slow(os.getpid())], grace_s=0.05)
    assert waits_s == [0.05] + [engine_process.LOOK_S] * (num_looks - 1)
    monkeypatch.setattr(engine_process, "KILLED_S", 0.0)
    waits_s.clear()
    end_processes([Slow(os.getpid())], grace_s=0.05)
    assert waits_s == [0.05]


def test_a_killed_process_that_its_parent_does_not_wait_for_has_ended(core, monkeypatch):
    """Such as the worker of a dead engine, whose next parent is the first process of a container."""
    monkeypatch.setattr(engine_process, "KILLED_S", HOUR_S)
    ending = threading.Thread(target=end_processes, args=([core.worker],), kwargs={"grace_s": 0.05}, daemon=True)
    ending.start()
    ending.join(LIMIT_S)
    assert not ending.is_alive()
    assert core.worker.status() == psutil.STATUS_ZOMBIE


def test_what_is_left_of_the_engine_of_a_dead_server_is_killed_and_nothing_else(core):
    found = psutil.Process(core.process.pid)
    other = EngineProcess(os.getpid(), 1.0)  # its id is another process' now
    assert set(end_orphans([other, EngineProcess(found.pid, found.create_time())])) == {found.pid, core.worker.pid}
    assert core.has_ended()
    assert end_orphans([EngineProcess(found.pid, found.create_time())]) == []
