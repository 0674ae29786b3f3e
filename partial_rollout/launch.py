"""Starts Ray and the training of a configuration that was checked: the heavy half of `main_ppo`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from omegaconf.errors import OmegaConfBaseException
from ray.exceptions import RayError, RayTaskError

from partial_rollout.errors import ClusterError, ConfigError, PartialRolloutError, UserError, WaitTimeout
from partial_rollout.observability import stages
from partial_rollout.runtime.remote_call import wait_for
from partial_rollout.runtime.termination import heed_termination

if TYPE_CHECKING:
    from partial_rollout.settings.prepare import Prepared


def launch(prepared: Prepared) -> tuple[int, str]:
    """Train to the end; returns the exit code, and what went wrong.

    The code is 0 after a whole run, 2 for a user's mistake and 1 for any other failure.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM.
    """
    try:
        run(prepared)
    except (PartialRolloutError, OmegaConfBaseException, RayError) as error:
        cause = root_cause(error)
        if isinstance(cause, UserError | OmegaConfBaseException):
            return 2, str(cause)
        return 1, f"training failed: {type(cause).__name__}: {cause}"
    finally:
        ray.shutdown()
    return 0, ""


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
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"verl refuses the configuration: {error}") from error
    _require_estimator(str(config.algorithm.adv_estimator))
    stages.begin(stages.RAY)
    try:
        actor_class = ray.remote(num_cpus=0)(TaskRunner)
        run_ppo(config, task_runner_class=StartedRunner(actor_class, prepared.settings.block.timeouts.start_s))
    except RayError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # another Ray or Python version there is a RuntimeError
        raise ClusterError(f"Ray could not be started or joined with ray_kwargs.ray_init: {error}") from error


def _require_estimator(name: str) -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    if name not in ADV_ESTIMATOR_REGISTRY:
        known = ", ".join(sorted(ADV_ESTIMATOR_REGISTRY))
        raise ConfigError(f"algorithm.adv_estimator={name} is unknown to verl; known: {known}")


class StartedRunner:
    """Stands in for the task runner's actor class in `run_ppo`, which waits for the actor's start without a bound."""

    def __init__(self, actor_class: Any, timeout_s: float) -> None:
        """`actor_class` comes from `ray.remote`; the actor must be ready `timeout_s` after it was asked for."""
        self._actor_class, self._timeout_s = actor_class, timeout_s

    def options(self, **options: Any) -> StartedRunner:
        """Same as `options` of a Ray actor class."""
        return StartedRunner(self._actor_class.options(**options), self._timeout_s)

    def remote(self) -> Any:
        """Return the running actor. From now on SIGTERM is a KeyboardInterrupt, as Ctrl-C is.

        Raises:
            ClusterError: the actor has not started in time.
            ray.exceptions.RayError: the actor died at its start.
        """
        heed_termination()
        runner = self._actor_class.remote()
        who_waits = "the driver waits for the task runner's process to start"
        try:
            wait_for(runner.__ray_ready__.remote(), timeout_s=self._timeout_s, who_waits=who_waits)
        except WaitTimeout as error:
            raise ClusterError(
                f"{error}. Perhaps no node has room for it, or the machine is too busy: raylet.out below "
                "/tmp/ray/session_latest/logs has the reason. partial_rollout.timeouts.start_s sets the bound"
            ) from None
        return runner


def root_cause(error: BaseException) -> BaseException:
    """What was raised first, below Ray's wrappers of every actor it passed through."""
    while isinstance(error, RayTaskError):
        error = error.cause
    return error
