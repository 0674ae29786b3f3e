"""The driver notices that a process of its own Ray has died, names it, and ends the task runner it waits for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from partial_rollout.errors import ActorLost, RayProcessLost
from partial_rollout.launch import RunningRunner, StartedRunner
from partial_rollout.observability.events import EventReader, EventWriter, Fault
from partial_rollout.observability.log import report_to
from partial_rollout.runtime import ray_watch
from partial_rollout.runtime.processes import GCS, RAYLET
from partial_rollout.runtime.ray_watch import RayWatch, own_ray
from partial_rollout.runtime.run_restarts import Failure, RunRestarts
from partial_rollout.types import Process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NODE = "10.0.0.7"
LIMIT_S = 20.0


class Run:
    """The processes of a run, and the watch on them."""

    def __init__(self, log: Path) -> None:
        self.log = log.open("w")
        print("its last line", file=self.log, flush=True)
        self.runner, self.gcs, self.raylet = self._start(), self._start(), self._start()
        watched = {"raylet": psutil.Process(self.raylet.pid), "gcs_server": psutil.Process(self.gcs.pid)}
        self.watch = RayWatch(Process("task runner", "task runner", NODE, self.runner.pid), watched)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", "input()"], text=True, stdin=subprocess.PIPE, stdout=self.log)

    def kill(self, process: subprocess.Popen[str]) -> None:
        """A killed process stays a zombie, as a child of Ray's does until Ray asks for it."""
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        for process in (self.runner, self.gcs, self.raylet):
            with process:
                process.kill()
        self.log.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    report_to(EventWriter(tmp_path, "driver"))
    run = Run(tmp_path / "gcs_server.out")
    yield run
    run.watch.stop()
    run.end()
    report_to(EventWriter(None, "driver"))


def faults(folder: Path) -> list[Fault]:
    return [event for event in EventReader(folder).read() if isinstance(event, Fault)]


def test_nobody_is_ended_while_all_live(run: Run, tmp_path: Path) -> None:
    run.watch.look()
    assert run.watch.death() is None
    assert run.runner.poll() is None
    assert faults(tmp_path) == []


@pytest.mark.parametrize("title", ["gcs_server", "raylet"])
def test_the_first_that_dies_is_named_once_and_the_task_runner_is_ended(run: Run, tmp_path: Path, title: str) -> None:
    first, second = (run.gcs, run.raylet) if title == "gcs_server" else (run.raylet, run.gcs)
    run.kill(first)
    run.watch.look()
    assert run.runner.wait(LIMIT_S) == -signal.SIGKILL
    assert run.raylet.wait(LIMIT_S) == -signal.SIGKILL  # it would wait for the GCS
    second.kill()
    run.watch.look()
    kind = {"gcs_server": GCS, "raylet": RAYLET}[title]
    (fault,) = faults(tmp_path)
    assert (fault.role, fault.name, fault.node, fault.pid) == (kind.role, title, NODE, first.pid)
    assert fault.text == str(run.watch.death())
    assert "started again from its last checkpoint unless the log says why not" in fault.action
    assert fault.text.endswith("which ends with:\nits last line")


def test_the_last_lines_are_logged_by_the_end_of_the_training_only(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.kill(run.gcs)
    runner = StartedRunner(None, LIMIT_S, [RunningRunner(None, None, run.watch)])
    error = runner.explain(ActorUnavailableError("Socket closed", b"0" * 16))
    assert f"gcs_server (pid {run.gcs.pid} on node {NODE}) died; training ends" in caplog.text
    assert not RunRestarts(0, tmp_path, "auto").follows(Failure.of(error, NODE))
    assert caplog.text.count("its last line") == 1


def test_the_thread_looks_by_itself(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "LOOK_S", 0.01)
    run.watch.begin()
    run.kill(run.gcs)
    assert run.runner.wait(LIMIT_S) == -signal.SIGKILL


def test_what_ends_with_the_run_is_no_death(run: Run, tmp_path: Path) -> None:
    run.watch.stop()
    run.kill(run.gcs)
    assert run.watch.death() is None
    assert run.runner.poll() is None
    assert faults(tmp_path) == []


def test_a_task_runner_that_has_ended_already_is_no_error(run: Run) -> None:
    run.runner.kill()
    run.runner.wait(LIMIT_S)
    run.kill(run.raylet)
    assert run.watch.death() is not None


@pytest.mark.parametrize(
    "told",
    [
        ActorUnavailableError("Socket closed", b"0" * 16),
        RayTaskError("run", "traceback", ActorLost("load balancer died")),
    ],
)
def test_whatever_ray_says_the_error_names_its_process_and_training_may_start_again(run: Run, told: RayError) -> None:
    runner = StartedRunner(None, LIMIT_S, [RunningRunner(None, None, run.watch)])
    assert runner.explain(told) is told
    run.kill(run.gcs)
    error = runner.explain(told)
    assert isinstance(error, RayProcessLost)
    assert str(error).startswith(
        f"GCS gcs_server (pid {run.gcs.pid} on node {NODE}) died: it was killed, or it crashed"
    )
    assert Failure.of(error, NODE).is_death


class Ended:
    """A child that ends between two questions."""

    pid = 4711

    def status(self) -> str:
        return psutil.STATUS_RUNNING

    def is_running(self) -> bool:
        return True

    def name(self) -> str:
        raise psutil.NoSuchProcess(self.pid)


def test_own_ray_is_found_beside_children_that_end_meanwhile_or_are_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for title in ray_watch.TITLES:
        (tmp_path / title).symlink_to(shutil.which("cat") or "cat")
    pipe = subprocess.PIPE
    with (
        subprocess.Popen([tmp_path / "raylet"], stdin=pipe) as raylet,
        subprocess.Popen([tmp_path / "gcs_server"], stdin=pipe) as gcs,
    ):
        gcs.kill()
        os.waitid(os.P_PID, gcs.pid, os.WEXITED | os.WNOWAIT)
        children = [Ended(), psutil.Process(raylet.pid), psutil.Process(gcs.pid)]
        monkeypatch.setattr(psutil.Process, "children", lambda _: children)
        assert {title: process.pid for title, process in own_ray().items()} == {"raylet": raylet.pid}
        raylet.kill()


def test_a_cluster_that_was_there_before_is_not_watched() -> None:
    watch = RayWatch(Process("task runner", "task runner", NODE, 0))
    watch.begin()
    assert watch.death() is None
