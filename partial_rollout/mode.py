"""The flag, and what it changes in a composed verl configuration."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf, open_dict

from partial_rollout.config import BLOCK, PartialRolloutConfig
from partial_rollout.errors import ConfigError, DataError

if TYPE_CHECKING:
    from omegaconf import DictConfig

TRAINER_MODE = "partial_rollout"
AGENT_LOOP_MANAGER = "partial_rollout.agent_loop.manager.PartialRolloutAgentLoopManager"
REPLAY_BUFFER_MODULE = "pkg://partial_rollout.train.replay_buffer"
REPLAY_BUFFER_CLASS = "PartialRolloutReplayBuffer"

UNSUPPORTED_ESTIMATORS = {
    "remax": "it needs a greedy baseline from the same weights as the sampled response",
}


def is_enabled(config: DictConfig) -> bool:
    """Whether `+async_training.partial_rollout=True` was given.

    Raises:
        ConfigError: the value is not a boolean.
    """
    value = OmegaConf.select(config, "async_training.partial_rollout", default=False)
    if not isinstance(value, bool):
        raise ConfigError(f"async_training.partial_rollout={value!r} is not allowed: must be True or False")
    return value


def read_settings(config: DictConfig) -> PartialRolloutConfig:
    """The checked `partial_rollout` block.

    Raises:
        ConfigError: the block is missing or has a key or value that is not allowed.
    """
    block = OmegaConf.select(config, BLOCK)
    if block is None:
        raise ConfigError(f"the configuration has no `{BLOCK}` block: start from configs/partial_rollout.yaml")
    container: Any = OmegaConf.to_container(block, resolve=True)
    return PartialRolloutConfig.from_mapping(container)


def num_slots(config: DictConfig) -> int:
    """Trajectories generated at the same time over all workers."""
    settings = read_settings(config)
    return settings.num_slots or config.data.train_batch_size * config.actor_rollout_ref.rollout.n


def slots_per_worker(config: DictConfig) -> int:
    """The slot budget of one agent-loop worker."""
    return num_slots(config) // config.actor_rollout_ref.rollout.agent.num_workers


def check_config(config: DictConfig) -> None:
    """Refuse, before anything is started, what this mode cannot run.

    Raises:
        ConfigError: names the value, what is allowed and where to set it.
        DataError: a data or model path does not exist.
    """
    rollout, n = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.n
    _require(config.data.train_batch_size >= 1, f"data.train_batch_size={config.data.train_batch_size}", "at least 1")
    _require(n >= 1, f"actor_rollout_ref.rollout.n={n}", "at least 1")
    _require(rollout.name == "vllm", f"actor_rollout_ref.rollout.name={rollout.name}", "vllm")
    _require(rollout.agent.num_workers >= 1, f"...rollout.agent.num_workers={rollout.agent.num_workers}", "at least 1")
    read_settings(config)
    _require(
        slots_per_worker(config) >= n,
        f"{num_slots(config)} trajectory slots over {rollout.agent.num_workers} agent-loop workers",
        f"at least rollout.n={n} for each worker: raise {BLOCK}.num_slots or lower rollout.agent.num_workers",
    )
    _check_algorithm(config)
    _check_paths(config)


def _check_algorithm(config: DictConfig) -> None:
    estimator = str(config.algorithm.adv_estimator)
    why = UNSUPPORTED_ESTIMATORS.get(estimator)
    if why:
        raise ConfigError(
            f"algorithm.adv_estimator={estimator} cannot work with partial rollout: {why}. "
            "Use grpo, rloo, reinforce_plus_plus or gae, or leave out +async_training.partial_rollout=True"
        )
    filter_groups = OmegaConf.select(config, "algorithm.filter_groups.enable", default=False)
    _require(not filter_groups, "algorithm.filter_groups.enable=True", "False with partial rollout")


def _check_paths(config: DictConfig) -> None:
    for key in ("data.train_files", "data.val_files"):
        value = OmegaConf.select(config, key)
        for path in [value] if isinstance(value, str) else list(value or []):
            _require_path(key, path)
    _require_path("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path, hub=True)


def _require_path(key: str, path: str, *, hub: bool = False) -> None:
    expanded = os.path.expanduser(path)
    looks_local = not hub or os.path.isabs(expanded) or path.startswith(".")
    if "://" not in path and looks_local and not os.path.exists(expanded):
        raise DataError(f"{key}={path} does not exist; give the path of an existing one (set {key}=...)")


def _require(condition: bool, given: str, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{given} is not allowed: must be {allowed}")


def apply_mode(config: DictConfig) -> None:
    """Point verl's public hooks at this package, in place. Only called when the flag is set."""
    settings = read_settings(config)
    with open_dict(config):
        config.trainer.v1.trainer_mode = TRAINER_MODE
        config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = AGENT_LOOP_MANAGER
        config.trainer.v1.sampler.custom_sampler = {"path": REPLAY_BUFFER_MODULE, "name": REPLAY_BUFFER_CLASS}
        config.actor_rollout_ref.rollout.custom = {
            "partial_rollout": {
                "stream_interval": settings.stream_interval,
                "drain_s": settings.timeouts.drain_s,
                "call_s": settings.timeouts.call_s,
            }
        }
