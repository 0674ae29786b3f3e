"""`python -m partial_rollout.main_ppo +async_training.partial_rollout=True ...`

The same command line without the flag runs verl's own trainer.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
import psutil
import ray
from omegaconf.errors import OmegaConfBaseException
from ray.exceptions import RayError, RayTaskError

from partial_rollout.errors import ClusterError, ConfigError, PartialRolloutError, UserError, WaitTimeout
from partial_rollout.integrations.verl_compat import check_versions
from partial_rollout.observability import stages
from partial_rollout.observability.events import CommandEnded, EventWriter
from partial_rollout.observability.log import report_to
from partial_rollout.runtime.remote_call import wait_for
from partial_rollout.runtime.termination import INTERRUPTED_CODE, heed_termination
from partial_rollout.settings.command_line import check_overrides
from partial_rollout.settings.derived import read_settings
from partial_rollout.settings.flag import apply_mode, is_enabled, place_events, provide_attention
from partial_rollout.settings.refused import check_config, check_inputs

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_DIR = str(Path(__file__).resolve().parent / "configs")


logger = logging.getLogger("partial_rollout.main_ppo")
"""Named by hand, because `__name__` is `__main__` when this module runs as a command."""


def run(config: DictConfig) -> None:
    """Check, then start Ray and train; returns when training has ended.

    Raises:
        UserError: configuration or data.
        ray.exceptions.RayTaskError: training failed; its cause is the error.
    """
    check_inputs(config)
    provide_attention(config)
    settings = read_settings(config)
    report_to(EventWriter(driver_folder(config), "driver", keep_all=True))
    stages.begin(stages.CONFIGURATION, psutil.Process().create_time())
    if is_enabled(config):
        check_config(config, settings)
        apply_mode(config, settings)
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
        run_ppo(config, task_runner_class=StartedRunner(actor_class, settings.block.timeouts.start_s))
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


def driver_folder(config: DictConfig) -> Path | None:
    """The folder of the event stream, also without the flag."""
    folder = place_events(config)
    return None if folder is None else Path(folder)


def root_cause(error: BaseException) -> BaseException:
    """What was raised first, below Ray's wrappers of every actor it passed through."""
    while isinstance(error, RayTaskError):
        error = error.cause
    return error


def note_end(code: int, text: str = "") -> None:
    """Write into the event stream how the command ended."""
    logger.info("the command ends with code %d", code, extra={"event": CommandEnded(code=code, text=text)})


def end(text: str, code: int) -> NoReturn:
    """End the process with an error."""
    note_end(code, text)
    print(f"error: {text}", file=sys.stderr)
    sys.exit(code)


@hydra.main(config_path=CONFIG_DIR, config_name="partial_rollout", version_base=None)
def main(config: DictConfig) -> None:
    """Entry point; exit code 0 after a whole run, 2 for a user's mistake, 130 for Ctrl-C, 1 for any other failure."""
    try:
        run(config)
        note_end(0)
    except (PartialRolloutError, OmegaConfBaseException, RayError) as error:
        cause = root_cause(error)
        mistake = isinstance(cause, UserError | OmegaConfBaseException)
        text = str(cause) if mistake else f"training failed: {type(cause).__name__}: {cause}"
        end(text, 2 if mistake else 1)
    except KeyboardInterrupt:
        end("interrupted; the run goes on from its last checkpoint when it is started again", INTERRUPTED_CODE)
    finally:
        ray.shutdown()


def start() -> None:
    """Check the command line's keys and the versions, on whose files the configuration is built, then run `main`."""
    try:
        check_overrides(sys.argv[1:])
        check_versions()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    main()


if __name__ == "__main__":
    start()
