"""The task runner's actor, on a real cluster: ready, never placed, or dead at its start."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray.exceptions import RayActorError

from partial_rollout.errors import ClusterError, RunStopped, TaskRunnerLost
from partial_rollout.launch import StartedRunner, end_with_checkpoint
from partial_rollout.runtime import death_watch, runner_watch
from partial_rollout.runtime.death_watch import own_process
from partial_rollout.runtime.prompt_manager import create_manager, find_manager
from partial_rollout.runtime.remote_call import wait_for
from partial_rollout.runtime.run_restarts import Failure
from partial_rollout.runtime.run_watch import ENDED_BY_FORCE
from partial_rollout.runtime.runner_watch import RunnerWatch, Sign, send_signs
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.types import PromptMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT_S = 60.0
CLAIM_S = 5.0
SILENT = r"no sign of life for \d+ s, longer than partial_rollout\.timeouts\.claim_s=5\b"
"""How long it was depends on when somebody looks."""
WAITING = """
import ray
from partial_rollout.launch import StartedRunner

class Runner:
    def run(self, config):
        import threading
        threading.Event().wait()

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
started = StartedRunner(ray.remote(num_cpus=0)(Runner), 60)
runner = started.remote()
try:
    print("waiting", flush=True)
    ray.get(runner.run.remote(None))
except KeyboardInterrupt:
    print("interrupted", flush=True)
finally:
    started.stop()  # else it may tell of Ray's own end
"""
pytestmark = pytest.mark.usefixtures("ray_cluster")


class Runner:
    def run(self, config: str) -> str:
        return f"ran {config} with {os.environ['X']}"


class Broken:
    def __init__(self) -> None:
        raise OSError("no disk")


def actor_class(of: type, **options: Any) -> Any:
    return ray.remote(num_cpus=0, **options)(of)


@pytest.fixture
def starting() -> Iterator[Callable[..., StartedRunner]]:
    """A way to make a StartedRunner; its watches end with the test, else they take the cluster's end for a death."""
    made: list[StartedRunner] = []
    before = signal.getsignal(signal.SIGTERM)

    def make(of: type, timeout_s: float = TIMEOUT_S, **options: Any) -> StartedRunner:
        made.append(StartedRunner(actor_class(of), timeout_s, **options))
        return made[-1]

    yield make
    for each in made:
        each.stop()
    signal.signal(signal.SIGTERM, before)


def test_a_started_runner_is_the_actor(starting: Callable[..., StartedRunner]) -> None:
    runner = starting(Runner).options(runtime_env={"env_vars": {"X": "1"}}).remote()
    assert ray.get(runner.run.remote("it"), timeout=TIMEOUT_S) == "ran it with 1"
    ray.kill(runner.actor)


def test_a_runner_that_ray_never_starts_is_told_of_in_time(starting: Callable[..., StartedRunner]) -> None:
    other = actor_class(Runner).options(num_cpus=1).remote()
    ray.get(other.__ray_ready__.remote(), timeout=TIMEOUT_S)
    with pytest.raises(ClusterError, match=r"task runner's process .*within 0\.5 s.*timeouts\.start_s"):
        starting(Runner, 0.5).options(num_cpus=ray.cluster_resources()["CPU"]).remote()
    ray.kill(other)


def test_a_runner_that_dies_at_its_start_says_why(starting: Callable[..., StartedRunner]) -> None:
    with pytest.raises(RayActorError, match="no disk"):
        starting(Broken).remote()


class Training:
    """A task runner that trains, and then freezes."""

    def run(self, config: str, witness: Any) -> None:
        send_signs(witness, CLAIM_S, doing=lambda: "trained step 3")
        threading.Event().wait(2 * CLAIM_S)
        # So that the witness has the last sign when it comes.
        ray.get(witness.take.remote(Sign(own_process("task runner", config), 0, "trained step 4")), timeout=TIMEOUT_S)
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_runner_that_freezes_is_named_and_killed_and_one_that_is_busy_is_not(
    starting: Callable[..., StartedRunner],
) -> None:
    runner = starting(Training, claim_s=CLAIM_S)
    began_s = time.monotonic()
    with pytest.raises(RayActorError) as told:
        ray.get(runner.remote().run.remote("task runner"), timeout=TIMEOUT_S)
    assert time.monotonic() - began_s > 3 * CLAIM_S
    named = runner.explain(told.value)
    assert isinstance(named, TaskRunnerLost)
    process = named.death.process
    assert str(named).startswith(f"task runner (pid {process.pid} on node {process.node}) died: it was killed, because")
    assert re.search(SILENT, str(named))
    assert "; it trained step" in str(named)


def test_a_frozen_runner_is_killed_though_killing_it_has_failed_once(
    starting: Callable[..., StartedRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError("no more processes")]

    def end_actor(handle: Any, process: Any) -> None:
        if failures:
            raise failures.pop()
        death_watch.end_actor(handle, process)

    monkeypatch.setattr(runner_watch, "end_actor", end_actor)
    runner = starting(Training, claim_s=CLAIM_S)
    with pytest.raises(RayActorError) as told:
        ray.get(runner.remote().run.remote("task runner"), timeout=TIMEOUT_S)
    assert failures == []
    assert re.search(SILENT, str(runner.explain(told.value)))


class EndsLate:
    """A task runner whose run ends with an error, but which does not end in time."""

    def run(self, config: str, witness: Any) -> None:
        send_signs(witness, CLAIM_S, doing=lambda: "trained step 3", ends_with=lambda: "DataError: no rows")
        while ray.get(witness.latest.remote(), timeout=TIMEOUT_S)[1] is None:
            threading.Event().wait(0.1)
        threading.Event().wait(2 * CLAIM_S)  # the driver has looked meanwhile
        os._exit(ENDED_BY_FORCE)


def test_an_end_that_had_to_be_forced_is_told_by_the_error_before_it_and_not_as_a_death(
    starting: Callable[..., StartedRunner],
) -> None:
    runner = starting(EndsLate, claim_s=CLAIM_S)
    with pytest.raises(RayActorError) as told:
        ray.get(runner.remote().run.remote("task runner"), timeout=TIMEOUT_S)
    named = runner.explain(told.value)
    assert type(named) is ClusterError
    assert str(named).startswith("DataError: no rows\ntask runner (pid")
    assert not Failure(named, "").is_death


def test_a_witness_that_freezes_is_started_again_and_nobody_else_is_called_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, runner = RunnerWatch(CLAIM_S), actor_class(Runner).remote()
    place, _ = ray.get(watch.witness.latest.remote(), timeout=TIMEOUT_S)
    monkeypatch.setattr(runner_watch, "FROZEN_S", TIMEOUT_S)
    watch._look(runner)
    monkeypatch.setattr(runner_watch, "FROZEN_S", 1.0)
    os.kill(place.pid, signal.SIGSTOP)
    watch._look(runner)
    deadline_s, now = time.monotonic() + TIMEOUT_S, place
    while now.pid == place.pid and time.monotonic() < deadline_s:
        with contextlib.suppress(RayActorError):  # of the one that was killed
            now, _ = ray.get(watch.witness.latest.remote(), timeout=TIMEOUT_S)
    assert now.pid not in (0, place.pid)
    assert ray.get(runner.__ray_ready__.remote(), timeout=TIMEOUT_S)
    ray.kill(runner)
    ray.kill(watch.witness)


def test_a_driver_that_is_told_to_terminate_is_interrupted() -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen([sys.executable, "-c", WAITING], env=environment, **pipes) as driver:
        told = ""
        for line in driver.stdout or ():
            told += line
            if line == "waiting\n":
                driver.send_signal(signal.SIGTERM)
        driver.wait(TIMEOUT_S)
    assert (driver.returncode, told.splitlines()[-1:]) == (0, ["interrupted"]), told


class Trainer:
    """A task runner that ends when the run should."""

    def run(self, name: str) -> str:
        manager = find_manager(name)
        ray.get(manager.admit.remote([PromptMeta("a", 1, 3)]))  # which nobody generates
        ray.get(manager.report_step.remote(3, 2, "open"))
        try:
            ray.get(manager.take_batch.remote(1, 600.0))
        except RunStopped as error:
            return str(error)
        return "a batch"


def test_a_driver_that_is_interrupted_waits_for_the_last_checkpoint(
    starting: Callable[..., StartedRunner], request: pytest.FixtureRequest
) -> None:
    name = request.node.name
    manager = create_manager(PartialRolloutConfig(), 8, name=name)
    started = starting(Trainer)
    ref = started.remote().run.remote(name)
    while wait_for(manager.status.remote(), timeout_s=TIMEOUT_S, who_waits="the test").step != 3:
        assert ray.wait([ref], timeout=0.1)[0] == []
    end_with_checkpoint(started.runs, TIMEOUT_S, name)
    assert "Ctrl-C" in ray.get(ref, timeout=0.1)
    ray.kill(manager)


def test_a_driver_does_not_wait_for_a_run_that_has_no_manager() -> None:
    end_with_checkpoint([], TIMEOUT_S, "nobody")
