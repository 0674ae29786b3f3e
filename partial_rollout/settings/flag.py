"""The flag, and what it changes in a composed verl configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from omegaconf import OmegaConf, open_dict

from partial_rollout.errors import ConfigError
from partial_rollout.settings.block import BLOCK

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from partial_rollout.settings.derived import Settings

TRAINER_MODE = "partial_rollout"
AGENT_LOOP_MANAGER = "partial_rollout.agent_loop.manager.PartialRolloutAgentLoopManager"
REPLAY_BUFFER_MODULE = "pkg://partial_rollout.train.replay_buffer"
REPLAY_BUFFER_CLASS = "PartialRolloutReplayBuffer"
PACKED_ATTENTION = "varlen_sdpa"
"""Name of the attention that `PACKED_ATTENTION_MODULE` registers when it is imported."""
PACKED_ATTENTION_MODULE = "partial_rollout.packing.attention"


def is_enabled(config: DictConfig) -> bool:
    """Whether `+async_training.partial_rollout=True` was given.

    Raises:
        ConfigError: the value is not a boolean, or the block has another key: a mistyped flag must not train silently
            without it.
    """
    block = OmegaConf.select(config, "async_training", default={})
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"async_training={block!r} is not allowed: set async_training.partial_rollout to True or False"
        )
    unknown = sorted(set(block) - {"partial_rollout"})
    if unknown:
        raise ConfigError(f"unknown key async_training.{unknown[0]}; known here: partial_rollout")
    for name, value in config.items():
        if name != "async_training" and isinstance(value, Mapping) and "partial_rollout" in value:
            raise ConfigError(f"unknown key {name}.partial_rollout; the flag is async_training.partial_rollout")
    value = OmegaConf.select(config, "async_training.partial_rollout", default=False)
    if not isinstance(value, bool):
        raise ConfigError(f"async_training.partial_rollout={value!r} is not allowed: must be True or False")
    return value


def provide_attention(config: DictConfig) -> None:
    """Let verl load `PACKED_ATTENTION` in every process that builds a model with it, in place and in every mode."""
    for model in (config.actor_rollout_ref.model, config.critic.model):
        if attention_of(model) == PACKED_ATTENTION:
            given = model.external_lib
            others = list(given) if OmegaConf.is_list(given) else [given] if given else []
            model.external_lib = [*others, PACKED_ATTENTION_MODULE]


def attention_of(model: DictConfig) -> str | None:
    """The attention implementation that a model block names, if any."""
    return OmegaConf.select(model, "override_config.attn_implementation")


def place_events(config: DictConfig) -> str | None:
    """Put the folder of the run's event stream into the block, in place, and return it; None: no stream.

    It is an absolute path, because the processes of a run have different working folders.
    """
    given = config[BLOCK].events
    if given is None:
        return None
    folder = f"{config.trainer.default_local_dir}/events" if given == "auto" else given
    config[BLOCK].events = os.path.abspath(folder)
    return config[BLOCK].events


def apply_mode(config: DictConfig, settings: Settings) -> None:
    """Point verl's public hooks at this package, in place. Only called when the flag is set."""
    rollout = config.actor_rollout_ref.rollout
    with open_dict(config):
        config.trainer.v1.trainer_mode = TRAINER_MODE
        rollout.agent.agent_loop_manager_class = AGENT_LOOP_MANAGER
        if settings.block.slots.adaptive:
            rollout.disable_log_stats = False
        config.trainer.v1.sampler.custom_sampler = {"path": REPLAY_BUFFER_MODULE, "name": REPLAY_BUFFER_CLASS}
        config[BLOCK] = settings.block.to_mapping()  # old names as the new ones: nobody warns of them again
        # verl hands only its own rollout block to replicas and servers; `custom` is its place for extensions.
        block = settings.block.to_mapping()
        block["weights"]["backend"] = "channel" if settings.uses_channel else "verl"
        block["events"] = place_events(config)
        rollout.custom = {**(rollout.get("custom") or {}), BLOCK: block}
