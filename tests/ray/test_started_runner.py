"""The task runner's actor, on a real cluster: ready, never placed, or dead at its start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from partial_rollout.errors import ClusterError, RunStopped
from partial_rollout.launch import StartedRunner, end_with_checkpoint
from partial_rollout.runtime.prompt_manager import create_manager, find_manager
from partial_rollout.runtime.remote_call import wait_for
from partial_rollout.settings.block import ManagerConfig, PartialRolloutConfig
from partial_rollout.types import PromptMeta

TIMEOUT_S = 60.0
WAITING = """
import ray
from partial_rollout.launch import StartedRunner

class Runner:
    def run(self, config):
        import threading
        threading.Event().wait()

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
runner = StartedRunner(ray.remote(num_cpus=0)(Runner), 60).remote()
try:
    print("waiting", flush=True)
    ray.get(runner.run.remote(None))
except KeyboardInterrupt:
    print("interrupted", flush=True)
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


def test_a_started_runner_is_the_actor() -> None:
    runner = StartedRunner(actor_class(Runner), TIMEOUT_S).options(runtime_env={"env_vars": {"X": "1"}}).remote()
    assert ray.get(runner.run.remote("it"), timeout=TIMEOUT_S) == "ran it with 1"
    ray.kill(runner.actor)


def test_a_runner_that_ray_never_starts_is_told_of_in_time() -> None:
    with pytest.raises(ClusterError, match=r"task runner's process to start.*within 0\.5 s.*timeouts\.start_s"):
        StartedRunner(actor_class(Runner), 0.5).options(resources={"nowhere": 1}).remote()


def test_a_runner_that_dies_at_its_start_says_why() -> None:
    with pytest.raises(RayActorError, match="no disk"):
        StartedRunner(actor_class(Broken), TIMEOUT_S).remote()


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


def test_a_driver_that_is_interrupted_waits_for_the_last_checkpoint(request: pytest.FixtureRequest) -> None:
    name = request.node.name
    manager = create_manager(PartialRolloutConfig(manager=ManagerConfig(name=name)), 8)
    starting = StartedRunner(actor_class(Trainer), TIMEOUT_S)
    ref = starting.remote().run.remote(name)
    while wait_for(manager.status.remote(), timeout_s=TIMEOUT_S, who_waits="the test").step != 3:
        assert ray.wait([ref], timeout=0.1)[0] == []
    end_with_checkpoint(starting.runs, name, TIMEOUT_S)
    assert "Ctrl-C" in ray.get(ref, timeout=0.1)
    ray.kill(manager)


def test_a_driver_does_not_wait_for_a_run_that_has_no_manager() -> None:
    end_with_checkpoint([], "nobody", TIMEOUT_S)
