"""After which ends of the training the command starts it again, and what it ends before."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from omegaconf.errors import OmegaConfBaseException
from ray.exceptions import RayActorError, RayTaskError

from partial_rollout.errors import (
    ActorLost,
    ConfigError,
    EngineDead,
    EnginesLost,
    TaskRunnerLost,
    WaitTimeout,
    WeightUpdateError,
)
from partial_rollout.observability import stages
from partial_rollout.observability.events import (
    CheckpointSaved,
    EventReader,
    EventWriter,
    Fault,
    ProcessFound,
    StageBegan,
    StepEnded,
)
from partial_rollout.observability.log import report_to
from partial_rollout.runtime import run_restarts
from partial_rollout.runtime.processes import ENGINE, TASK_RUNNER
from partial_rollout.runtime.run_restarts import Failure, RunRestarts, end_left_over
from partial_rollout.types import Death, Process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NODE = "10.0.0.7"
RANK_DIED = Failure(ActorLost("training rank actor-0 died"), NODE)


class Run:
    """What the trainer of a run writes."""

    def __init__(self, folder: Path) -> None:
        self._writer = EventWriter(folder, "trainer")

    def complete(self, step: int) -> None:
        self._writer.write(StepEnded(step=step, total=9, metrics={}))

    def begin(self, name: str) -> None:
        self._writer.write(StageBegan(number=stages.STAGES.index(name) + 1, total=len(stages.STAGES), name=name))

    def save(self, step: int, *, is_told: bool = True) -> None:
        if is_told:
            self.complete(step)
        self._writer.write(CheckpointSaved(step=step, seconds=0.1))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run_is_started_again_so_often_without_a_further_step(run: Run, tmp_path: Path) -> None:
    restarts = RunRestarts(2, tmp_path, "auto")
    run.complete(4)
    assert [restarts.follows(RANK_DIED) for _ in range(3)] == [True, True, False]
    run.complete(3)
    run.save(4)  # taken again from a checkpoint of step 2
    assert not restarts.follows(RANK_DIED)
    run.complete(5)
    assert [restarts.follows(RANK_DIED) for _ in range(3)] == [True, True, False]
    run.save(6, is_told=False)  # it died before the gates opened
    assert restarts.follows(RANK_DIED)


@pytest.mark.parametrize("error", [EnginesLost("engines died 9 times in step 5; replica 0"), ActorLost("a rank")])
def test_a_run_that_has_lost_its_engines_is_started_again_as_after_any_death(
    run: Run, tmp_path: Path, error: Exception
) -> None:
    restarts = RunRestarts(1, tmp_path, "auto")
    run.save(4)
    in_ray = RayTaskError("run", "traceback", error)
    assert restarts.follows(Failure.of(in_ray, NODE))
    assert not restarts.follows(Failure.of(in_ray.as_instanceof_cause(), NODE))  # without a further step


NO_DEATHS = [
    ConfigError("no"),
    WaitTimeout("late"),
    InterruptedError(),
    WeightUpdateError("refused"),
]


@pytest.mark.parametrize("error", NO_DEATHS)
def test_what_is_no_death_ends_the_command(run: Run, tmp_path: Path, error: Exception) -> None:
    restarts = RunRestarts(2, tmp_path, "auto")
    run.save(4)
    assert not restarts.follows(Failure(error, NODE))


PASSES = RuntimeError("Engine core initialization failed")
"""vLLM raises it whatever an engine could not start by."""


def test_a_new_start_that_fails_before_its_first_step_is_followed_by_another(run: Run, tmp_path: Path) -> None:
    failed = Failure.of(RayTaskError("run", "traceback", PASSES), NODE)
    restarts = RunRestarts(2, tmp_path, "auto")
    run.save(4)
    run.begin(stages.FIRST_STEP)  # of the first start
    assert not restarts.follows(failed)
    assert restarts.follows(RANK_DIED)
    run.begin(stages.ENGINES)
    assert restarts.follows(failed)
    assert not restarts.follows(failed)  # it counts as any other


def test_a_new_start_that_has_begun_its_first_step_ends_by_what_is_no_death(run: Run, tmp_path: Path) -> None:
    restarts = RunRestarts(2, tmp_path, "auto")
    run.save(4)
    assert restarts.follows(RANK_DIED)
    run.begin(stages.FIRST_STEP)
    assert not restarts.follows(Failure(PASSES, NODE))


@pytest.mark.parametrize("error", [ConfigError("no"), OmegaConfBaseException("no")])
def test_a_mistake_of_the_user_ends_a_new_start(run: Run, tmp_path: Path, error: Exception) -> None:
    restarts = RunRestarts(2, tmp_path, "auto")
    run.save(4)
    assert restarts.follows(RANK_DIED)
    assert not restarts.follows(Failure(error, NODE))


def test_a_run_that_dies_before_its_first_step_ends(run: Run, tmp_path: Path) -> None:
    run.save(4)
    restarts = RunRestarts(2, tmp_path, "auto")
    assert not restarts.follows(RANK_DIED)


def test_a_run_that_would_not_go_on_from_its_checkpoint_ends(run: Run, tmp_path: Path) -> None:
    restarts = RunRestarts(2, tmp_path, "disable")
    run.save(4)
    assert not restarts.follows(RANK_DIED)
    assert not RunRestarts(2, None, "auto").follows(RANK_DIED)
    assert not RunRestarts(0, tmp_path, "auto").follows(RANK_DIED)


def test_a_command_that_never_starts_training_again_says_why_not(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.save(4)
    for restarts in (RunRestarts(0, tmp_path, "auto"), RunRestarts(2, None, "auto")):
        caplog.clear()
        assert not restarts.follows(RANK_DIED)
        assert "training is not started again: that needs async_training.partial_rollout=True" in caplog.text
        assert not restarts.follows(Failure(ConfigError("no"), NODE))
        assert len(caplog.records) == 1


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[None]:
    report_to(EventWriter(tmp_path, "driver"))
    yield
    report_to(EventWriter(None, "driver"))


@pytest.mark.usefixtures("driver")
def test_a_dead_task_runner_is_named_by_the_driver(run: Run, tmp_path: Path) -> None:
    restarts = RunRestarts(1, tmp_path, "auto")
    run.save(4)
    process = Process(TASK_RUNNER.role, TASK_RUNNER.role, NODE, 4711, "")
    died = Failure.of(TaskRunnerLost(Death(process, "its worker was killed", "trained step 3")), NODE)
    assert restarts.follows(died)
    assert not restarts.follows(died)
    faults = [event for event in EventReader(tmp_path).read() if isinstance(event, Fault)]
    assert {(fault.role, fault.node, fault.pid) for fault in faults} == {(TASK_RUNNER.role, NODE, 4711)}
    assert faults[0].text == f"task runner (pid 4711 on node {NODE}) died: its worker was killed; it trained step 3"
    assert [fault.action for fault in faults] == [
        "training is started again from its last checkpoint (new start 1 of 1)",
        "training is not started again: new starts since step 4: 1, which is the limit",
    ]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("kind", [EngineDead, EnginesLost])
def test_lost_engines_are_told_of_with_what_follows(run: Run, tmp_path: Path, kind: type[Exception]) -> None:
    restarts = RunRestarts(1, tmp_path, "auto")
    run.save(4)
    assert restarts.follows(Failure(kind("replica 0 died in step 5"), NODE))
    (fault,) = [event for event in EventReader(tmp_path).read() if isinstance(event, Fault)]
    assert (fault.role, fault.text) == (ENGINE.role, "replica 0 died in step 5")
    assert fault.action == "training is started again from its last checkpoint (new start 1 of 1)"


@pytest.mark.usefixtures("driver")
def test_an_actor_that_dies_in_the_task_runners_start_is_not_taken_for_it(run: Run, tmp_path: Path) -> None:
    restarts = RunRestarts(1, tmp_path, "auto")
    run.save(4)
    died = RayActorError(error_msg="The actor is dead because its worker was killed.")
    wrapped = RayTaskError("run", "traceback", died)
    for raised in (wrapped, wrapped.as_instanceof_cause()):
        failure = Failure.of(raised, NODE)
        assert failure.error is died
        assert failure.is_death
    assert restarts.follows(failure)
    assert not [event for event in EventReader(tmp_path).read() if isinstance(event, Fault)]


@pytest.fixture
def left() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def _found(pid: int, t: float, node: str = NODE) -> ProcessFound:
    return ProcessFound(t=t, role="engine", name="core", node=node, pid=pid)


def test_what_is_left_of_a_run_is_killed(left: subprocess.Popen[bytes]) -> None:
    assert end_left_over([_found(left.pid, time.time())], NODE, gone_s=0.1) == [left.pid]
    assert not psutil.pid_exists(left.pid)


def test_what_is_left_of_a_run_is_killed_whether_or_not_it_is_started_again(
    left: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_restarts, "GONE_S", 0.1)
    restarts = RunRestarts(1, tmp_path, "auto")
    EventWriter(tmp_path, "server-0").write(_found(left.pid, 0.0))
    assert not restarts.follows(RANK_DIED)  # no step was completed
    assert not psutil.pid_exists(left.pid)


def test_ctrl_c_while_processes_are_waited_for_ends_them(
    left: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(psutil, "wait_procs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        end_left_over([_found(left.pid, time.time())], NODE, gone_s=0.1)
    left.wait(10.0)
    assert left.returncode < 0


def test_a_process_of_another_node_or_with_the_id_of_one_that_has_ended_is_left_alone(
    left: subprocess.Popen[bytes],
) -> None:
    before = psutil.Process(left.pid).create_time() - 1.0
    found = [_found(left.pid, time.time(), "10.0.0.8"), _found(left.pid, before)]
    assert end_left_over(found, NODE, gone_s=0.1) == []
    assert left.poll() is None
