"""`python -m partial_rollout.main_ppo +async_training.partial_rollout=True ...`

The same command line without the flag runs verl's own trainer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
import ray
from ray.exceptions import RayError, RayTaskError

from partial_rollout.errors import PartialRolloutError, UserError
from partial_rollout.mode import apply_mode, check_config, is_enabled

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_DIR = str(Path(__file__).resolve().parents[1] / "configs")


def run(config: DictConfig) -> None:
    """Check, then start Ray and train; returns when training has ended.

    Raises:
        UserError: configuration, data or versions.
        ray.exceptions.RayTaskError: training failed; its cause is the error.
    """
    from partial_rollout.integrations.verl_compat import check_versions

    check_versions()
    if is_enabled(config):
        check_config(config)
        apply_mode(config)
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from partial_rollout.train.task_runner import TaskRunner

    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    run_ppo(config, task_runner_class=ray.remote(num_cpus=1)(TaskRunner))


def readable(error: BaseException) -> str:
    """One paragraph for a person: the innermost error of ours if there is one, else the cause's last line."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return f"{type(cause).__name__}: {cause}"


@hydra.main(config_path=CONFIG_DIR, config_name="partial_rollout", version_base=None)
def main(config: DictConfig) -> None:
    """Entry point; exit code 0 after a whole run, 2 for a user's mistake, 1 for any other failure."""
    try:
        run(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (PartialRolloutError, RayError) as error:
        print(f"error: training failed: {readable(error)}", file=sys.stderr)
        sys.exit(1)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
