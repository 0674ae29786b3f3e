"""Starts Ray and the training of a configuration that was checked: the heavy half of `main_ppo`."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import ray
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from ray.exceptions import RayError

from partial_rollout.errors import (
    ClusterError,
    ConfigError,
    PartialRolloutError,
    RayProcessLost,
    UserError,
    WaitTimeout,
)
from partial_rollout.observability import stages
from partial_rollout.observability.events import Fault, events_folder
from partial_rollout.runtime.death_watch import describe
from partial_rollout.runtime.placement import on_this_node
from partial_rollout.runtime.processes import RAYLET
from partial_rollout.runtime.prompt_manager import find_manager
from partial_rollout.runtime.ray_watch import RayWatch, own_ray
from partial_rollout.runtime.remote_call import wait_for
from partial_rollout.runtime.run_restarts import Failure, RunRestarts
from partial_rollout.runtime.runner_watch import RunnerWatch
from partial_rollout.runtime.termination import heed_termination
from partial_rollout.settings.compose import explain
from partial_rollout.settings.derived import read_block
from partial_rollout.settings.retention import may_save
from partial_rollout.types import MANAGER_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from partial_rollout.settings.prepare import Prepared

logger = logging.getLogger(__name__)

SHUTDOWN_S = 30.0
"""Ray ends within seconds."""
ASK_S = 10.0
"""The prompt manager answers at once; one that does not is not there any more."""


def launch(prepared: Prepared) -> tuple[int, str]:
    """Train to the end; returns the exit code, and what went wrong.

    The code is 0 after a whole run, 2 for a user's mistake and 1 for any other failure. After the death of a process
    that training cannot go on without, training is started again (runtime/run_restarts.py says how often).

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; a checkpoint was saved if that could be done in time.
    """
    config, block = prepared.config, read_block(prepared.config)
    limit = block.restarts if prepared.is_enabled else 0
    restarts = RunRestarts(limit, events_folder(block), config.trainer.resume_mode)
    if prepared.is_enabled and not may_save(config):
        logger.warning(
            "nothing is saved before the run ends (trainer.save_freq=%s, partial_rollout.save_minutes=%s): the death "
            "of a training rank costs all steps",
            config.trainer.save_freq,
            block.save_minutes,
        )
    while (failure := _failure(prepared)) is not None and restarts.follows(failure):
        stages.begin(stages.CONFIGURATION)
    if failure is None:
        return 0, ""
    cause = failure.error
    if isinstance(cause, UserError | OmegaConfBaseException):
        return 2, str(cause)
    return 1, f"training failed: {type(cause).__name__}: {cause}"


def _failure(prepared: Prepared) -> Failure | None:
    """Train, and shut Ray down; returns what went wrong."""
    try:
        run(prepared)
    except (PartialRolloutError, OmegaConfBaseException, RayError) as error:
        return Failure.of(error, ray.util.get_node_ip_address())
    finally:
        shut_down_ray()
    return None


def shut_down_ray() -> None:
    """Shut Ray down. Ray waits for a frozen raylet without a bound, so one that this process has started is killed."""
    timer = threading.Timer(SHUTDOWN_S, _end_raylet)
    timer.daemon = True
    timer.start()
    try:
        ray.shutdown()
    finally:
        timer.cancel()


def _end_raylet() -> None:
    raylet = own_ray().get(RAYLET.role)
    if raylet is not None:
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            text = f"Ray has not ended within {SHUTDOWN_S:g} s: its raylet (pid {raylet.pid}, {raylet.status()})"
            fault = Fault(role=RAYLET.role, name=RAYLET.role, pid=raylet.pid, text=text, action="it is killed")
            logger.warning("%s is killed", text, extra={"event": fault})
            raylet.kill()


def run(prepared: Prepared) -> None:
    """Let verl check the configuration, start Ray and train; returns when training has ended.

    Raises:
        UserError: verl refuses the configuration.
        ray.exceptions.RayTaskError: training failed; its cause is the error.
    """
    config = prepared.config
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from partial_rollout.train.task_runner import TaskRunner

    try:
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    except HydraException as error:  # what a dataclass of verl's refuses
        raise ConfigError(f"verl refuses the configuration: {explain(error)}") from error
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"verl refuses the configuration: {error}") from error
    _require_estimator(str(config.algorithm.adv_estimator))
    stages.begin(stages.RAY)
    block = prepared.settings.block
    runner = StartedRunner(ray.remote(num_cpus=0)(TaskRunner), block.timeouts.start_s, claim_s=block.timeouts.claim_s)
    try:
        run_ppo(config, task_runner_class=runner)
    except RayError as error:
        raise runner.explain(error) from None
    except KeyboardInterrupt:
        end_with_checkpoint(runner.runs, block.timeouts.stop_s)
        raise
    except (OSError, RuntimeError, ValueError) as error:  # another Ray or Python version there is a RuntimeError
        raise ClusterError(f"Ray could not be started or joined with ray_kwargs.ray_init: {error}") from error
    finally:
        runner.stop()


def _require_estimator(name: str) -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    if name not in ADV_ESTIMATOR_REGISTRY:
        known = ", ".join(sorted(ADV_ESTIMATOR_REGISTRY))
        raise ConfigError(f"algorithm.adv_estimator={name} is unknown to verl; known: {known}")


def end_with_checkpoint(runs: Sequence[ray.ObjectRef[Any]], stop_s: float, manager_name: str = MANAGER_NAME) -> None:
    """Ask the trainer to save a checkpoint and end, and wait for it; returns after `stop_s` in any case.

    A run that has not begun to train, and one without the flag, is not waited for. A second Ctrl-C ends the wait.
    """
    if not ray.is_initialized():  # Ray would start for the question, or join a cluster that is there
        return
    deadline_s = time.monotonic() + stop_s
    try:
        manager = find_manager(manager_name)
        # A manager of another run, whose end this command may have waited for, has the same name.
        if manager._actor_id.job_id.hex() != ray.get_runtime_context().get_job_id():
            return
        asked = manager.request_stop.remote("Ctrl-C or SIGTERM")
        has_begun = wait_for(asked, timeout_s=min(ASK_S, stop_s), who_waits="the driver asks for the end of the run")
    except (ClusterError, RayError):
        return
    if runs and has_begun:
        logger.info(
            "the run saves what it has trained since its last checkpoint, and ends; a step that trains is finished "
            "first. After %g s (partial_rollout.timeouts.stop_s) it ends without a checkpoint. Press Ctrl-C again to "
            "end at once",
            stop_s,
        )
        ray.wait(list(runs), num_returns=len(runs), timeout=max(0.0, deadline_s - time.monotonic()))


class StartedRunner:
    """Stands in for the task runner's actor class in `run_ppo`, which waits for the actor's start without a bound."""

    def __init__(
        self,
        actor_class: Any,
        timeout_s: float,
        runs: list[RunningRunner] | None = None,
        *,
        claim_s: float = math.inf,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`actor_class` comes from `ray.remote`; the actor must be ready `timeout_s` after it was asked for.

        If it gives no sign of life for `claim_s` while it trains, it is killed.
        """
        self._actor_class, self._timeout_s, self._claim_s = actor_class, timeout_s, claim_s
        self._started: list[RunningRunner] = [] if runs is None else runs
        self._options = options or {}

    @property
    def runs(self) -> list[ray.ObjectRef[Any]]:
        """The calls of `run`, which end when the training has ended."""
        return [ref for runner in self._started for ref in runner.runs]

    def options(self, **options: Any) -> StartedRunner:
        """A StartedRunner with more options; they are those of a Ray actor class."""
        all_options = {**self._options, **options}
        return StartedRunner(
            self._actor_class, self._timeout_s, self._started, claim_s=self._claim_s, options=all_options
        )

    def remote(self) -> RunningRunner:
        """Return the running actor, on the driver's node. From now on SIGTERM is a KeyboardInterrupt, as Ctrl-C is.

        On another node the run would be lost with either node.

        Raises:
            ClusterError: the actor has not started in time.
            ray.exceptions.RayError: the actor died at its start.
        """
        heed_termination()
        options = {"scheduling_strategy": on_this_node(), **self._options}
        runner = self._actor_class.options(**options).remote()
        who_waits = "the driver waits for the task runner's process to start"
        watch = None if math.isinf(self._claim_s) else RunnerWatch(self._claim_s)
        try:
            place = wait_for(runner.__ray_call__.remote(describe), timeout_s=self._timeout_s, who_waits=who_waits)
        except WaitTimeout as error:
            raise ClusterError(
                f"{error}. Perhaps no node has room for it, or the machine is too busy: raylet.out below "
                "/tmp/ray/session_latest/logs has the reason. partial_rollout.timeouts.start_s sets the bound"
            ) from None
        self._started.append(RunningRunner(runner, watch, RayWatch(place)))
        return self._started[-1]

    def explain(self, error: RayError) -> RayError | ClusterError:
        """The error that names the process of Ray, or the task runner, where one has died while it trained."""
        for death in (runner.ray_watch.death() for runner in self._started):
            if death is not None:
                return RayProcessLost(str(death))
        watches = [runner.watch for runner in self._started if runner.watch is not None]
        return watches[-1].explain(error) if watches else error

    def stop(self) -> None:
        """Training has ended, and Ray may be shut down."""
        for runner in self._started:
            runner.ray_watch.stop()
            if runner.watch is not None:
                runner.watch.stop()


class RunningRunner:
    """The task runner's actor as `run_ppo` uses it: `runner.run.remote(config)`."""

    def __init__(self, actor: Any, watch: RunnerWatch | None, ray_watch: RayWatch) -> None:
        """`watch` tells whether the actor is frozen, `ray_watch` whether Ray lives."""
        self.actor, self.run, self.watch, self.ray_watch = actor, self, watch, ray_watch
        self.runs: list[ray.ObjectRef[Any]] = []
        """The calls of `run`."""

    def remote(self, config: Any) -> ray.ObjectRef[Any]:
        """Start the training."""
        if self.watch is None:
            ref = self.actor.run.remote(config)
        else:
            ref = self.actor.run.remote(config, self.watch.witness)
            self.watch.begin(self.actor)
        self.ray_watch.begin()
        self.runs.append(ref)
        return ref
