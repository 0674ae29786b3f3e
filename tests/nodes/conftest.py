"""Two nodes in namespaces of this machine, with one Ray cluster over both for all tests of this folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import pytest

from scripts.two_nodes import Node, ray_cluster, two_nodes, why_not

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from partial_rollout.observability.events import AnyEvent, EventReader

JOB_LIMIT_S = 600.0
BATCH = 8
LOOK_S = 0.2
TO_END_S = 60.0
REQUIRED = "PARTIAL_ROLLOUT_REQUIRE_NODES"


def require_nodes() -> None:
    """Where two nodes cannot be made, tests fail if the variable is set (CI, `make nodes`); else they are skipped."""
    if reason := why_not():
        told = f"two nodes cannot be made here: {reason}. To leave these tests out: --ignore=tests/nodes"
        if os.environ.get(REQUIRED):
            pytest.fail(told)
        pytest.skip(told)


@dataclass(frozen=True)
class Cluster:
    """Two nodes, and the folder that both see."""

    head: Node
    other: Node
    shared: Path


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all nodes see."""
    require_nodes()
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[Cluster]:
    """Gone with the file's tests, and all processes on it."""
    with two_nodes([shared]) as nodes, ray_cluster(nodes) as (head, other):
        yield Cluster(head, other, shared)


@pytest.fixture(scope="session")
def task(shared: Path) -> Path:
    """The quickstart's data and its starting checkpoint."""
    from partial_rollout.run.quickstart import make_task  # imports torch, in commands that leave this folder out too

    out = shared / "task"
    make_task.main(["--out", str(out), "--num-train", "256", "--num-val", "8", "--warm-start-steps", "500"])
    return out


def job_command(task: Path, folder: Path, *overrides: str) -> list[str]:
    """A job over two nodes, in a Ray cluster that is there."""
    return [
        sys.executable, "-m", "partial_rollout.main_ppo", "--config-name", "quickstart_cpu",
        f"data.train_files={task / 'train.parquet'}", f"data.val_files={task / 'val.parquet'}",
        f"actor_rollout_ref.model.path={task / 'model'}", f"data.train_batch_size={BATCH}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}", "trainer.logger=[console]", "trainer.nnodes=2",
        f"trainer.default_local_dir={folder / 'checkpoints'}", f"hydra.run.dir={folder / 'hydra'}",
        "ray_kwargs.ray_init.num_cpus=null", "~ray_kwargs.ray_init.num_gpus",
        "actor_rollout_ref.rollout.agent.num_workers=2", f"partial_rollout.events={folder / 'events'}", *overrides,
    ]  # fmt: skip


def run_on_head(cluster: Cluster, command: list[str], log: Path, limit_s: float) -> tuple[int, str]:
    """Run a command on the head to its end; returns code and output."""
    with log.open("w") as file:
        job = cluster.head.popen(*command, stdout=file)
        try:
            code = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            job.kill()  # its processes end with the node
            raise
    return code, log.read_text()


@contextlib.contextmanager
def lines_of(node: Node, *words: str) -> Iterator[Iterator[str]]:
    """The lines of a command that runs on the node until it is told to end."""
    command = node.popen(*words, stdout=subprocess.PIPE)
    try:
        yield iter(command.stdout.readline, "") if command.stdout else iter(())
    finally:
        # A signal to what has entered the node would leave the command itself there, with its end of the pipe.
        for process in psutil.Process(command.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        command.communicate(timeout=TO_END_S)


def read_until(
    is_it: Callable[[AnyEvent], bool], reader: EventReader, job: subprocess.Popen[str], log: Path
) -> list[AnyEvent]:
    """All events until one of them is the one that is waited for."""
    events: list[AnyEvent] = []
    deadline_s = time.monotonic() + JOB_LIMIT_S
    while not any(is_it(event) for event in events):
        assert time.monotonic() < deadline_s, log.read_text()[-4000:]
        assert job.poll() is None, log.read_text()[-4000:]
        try:
            job.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            events += reader.read()
    return events


def processes_of(pid: int) -> list[psutil.Process]:
    """All processes in the same process namespace."""
    own = psutil.Process(pid)
    space = _space(own)
    return [process for process in psutil.process_iter() if _space(process) == space]


def _space(process: psutil.Process) -> str | None:
    try:
        return os.readlink(f"/proc/{process.pid}/ns/pid")
    except OSError:
        return None
