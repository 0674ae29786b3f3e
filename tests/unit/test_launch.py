"""The command trains again after a death, and says how it ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from omegaconf import OmegaConf
from ray import ActorID, JobID, TaskID
from ray.exceptions import RayTaskError

from partial_rollout import launch
from partial_rollout.errors import ActorLost, ConfigError, InternalError
from partial_rollout.observability.events import CheckpointSaved, EventWriter, StepEnded
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.types import Process

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from partial_rollout.settings.prepare import Prepared

DIED = RayTaskError("run", "traceback", ActorLost("training rank actor-0 died"))
DONE = None
LIMIT_S = 60.0


def test_the_driver_does_not_import_vllm() -> None:
    """Seconds of each start are what the import takes."""
    modules = "partial_rollout.launch, partial_rollout.train.task_runner, verl.trainer.main_ppo, sys"
    words = [sys.executable, "-c", f"import {modules}; print('verl' in sys.modules, 'vllm' in sys.modules)"]
    found = subprocess.run(words, capture_output=True, text=True, check=True, timeout=LIMIT_S, env=os.environ)
    assert found.stdout.split()[-2:] == ["True", "False"]


class Job:
    """Stands for a prepared configuration; each start completes and saves a step, then raises the next error."""

    is_enabled = True

    def __init__(self, folder: Path, ends: Sequence[BaseException | None], **block: Any) -> None:
        given = PartialRolloutConfig(events=str(folder), **block).to_mapping()
        self.config = OmegaConf.create({
            "partial_rollout": given, "trainer": {"save_freq": 1, "resume_mode": "auto"},
        })  # fmt: skip
        self.ends, self.starts = list(ends), 0
        self._writer = EventWriter(folder, "trainer")

    def run(self, _prepared: object) -> None:
        self.starts += 1
        self._writer.write(StepEnded(step=1, total=9, metrics={}))
        self._writer.write(CheckpointSaved(step=1, seconds=0.1))
        if (error := self.ends.pop(0)) is not None:
            raise error


def end_of(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    monkeypatch.setattr(launch, "run", job.run)
    return launch.launch(cast("Prepared", job))


def test_a_command_that_is_started_again_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, [DIED, DIED, DONE])
    assert end_of(job, monkeypatch) == (0, "")
    assert job.starts == 3


def test_a_command_whose_processes_die_again_and_again_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, [DIED, DIED, DIED], restarts=2)
    assert end_of(job, monkeypatch) == (1, "training failed: ActorLost: training rank actor-0 died")
    assert job.starts == 3


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([ConfigError("no")], 2),
        ([RayTaskError("run", "traceback", ConfigError("no"))], 2),
        ([InternalError("lost")], 1),
        ([DIED, InternalError("lost")], 1),
    ],
)
def test_what_is_no_death_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[BaseException], code: int
) -> None:
    job = Job(tmp_path, ends)
    assert end_of(job, monkeypatch)[0] == code
    assert job.starts == len(ends)


def test_ctrl_c_in_a_new_start_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, [DIED, KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        end_of(job, monkeypatch)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_with_no_restarts_and_without_the_flag_a_death_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_enabled: bool
) -> None:
    job = Job(tmp_path, [DIED], restarts=0 if is_enabled else 3)
    job.is_enabled = is_enabled
    assert end_of(job, monkeypatch)[0] == 1


def test_a_raylet_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raylet = tmp_path / launch.RAYLET.role
    raylet.symlink_to(shutil.which("cat") or "cat")
    pipe = subprocess.PIPE
    with subprocess.Popen([str(raylet)], stdin=pipe) as frozen, subprocess.Popen(["cat"], stdin=pipe) as other:
        monkeypatch.setattr(launch, "SHUTDOWN_S", 0.1)
        monkeypatch.setattr(launch.ray, "shutdown", lambda: frozen.wait(LIMIT_S))
        launch.shut_down_ray()
        assert frozen.returncode == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


class ActorClass:
    """Stands in for Ray's; keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.__ray_call__ = self

    def options(self, **options: Any) -> ActorClass:
        self.asked = options
        return self

    def remote(self, *_given: Any) -> ActorClass:
        return self


def test_the_task_runner_is_on_the_node_of_the_driver_whatever_else_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a place Ray starts it on any node, and the run is lost with that node as well as with the driver's."""
    monkeypatch.setattr(launch, "heed_termination", lambda: None)
    monkeypatch.setattr(launch, "on_this_node", lambda: "the driver's node")
    monkeypatch.setattr(launch, "wait_for", lambda *_given, **_named: Process("", ""))
    for named in ({}, {"runtime_env": {"nsight": "default"}}):
        actor_class = ActorClass()
        starting = launch.StartedRunner(actor_class, LIMIT_S)
        runner = (starting.options(**named) if named else starting).remote()
        assert runner.actor is actor_class
        assert actor_class.asked == {"scheduling_strategy": "the driver's node", **named}


@pytest.mark.parametrize(
    ("is_connected", "job", "asked"), [(True, 7, ["Ctrl-C or SIGTERM"]), (True, 8, []), (False, 7, [])]
)
def test_a_command_that_is_interrupted_ends_its_own_run_and_no_other(
    is_connected: bool, job: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run's manager has the same name, on a Ray cluster whose run this command waits for."""
    own, told = JobID.from_int(7), list[str]()
    actor_id = ActorID.of(JobID.from_int(job), TaskID.for_fake_task(JobID.from_int(job)), 1)
    manager = SimpleNamespace(_actor_id=actor_id, request_stop=SimpleNamespace(remote=told.append))
    monkeypatch.setattr(launch, "find_manager", lambda _: manager)
    monkeypatch.setattr(launch, "wait_for", lambda *_given, **_named: False)
    monkeypatch.setattr(launch.ray, "is_initialized", lambda: is_connected)
    monkeypatch.setattr(launch.ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=own.hex))
    launch.end_with_checkpoint([], LIMIT_S)
    assert told == asked
