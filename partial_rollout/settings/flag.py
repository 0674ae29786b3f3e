"""The flag, and what it changes in a composed verl configuration."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from partial_rollout.errors import ConfigError
from partial_rollout.settings.block import BLOCK, SEPARATE
from partial_rollout.settings.by_hand import leaves
from partial_rollout.settings.command_line import FLAG
from partial_rollout.settings.derived import (
    AT_THE_END,
    CHECKPOINT_ENGINE,
    ENGINE_ARGUMENTS,
    as_list,
    depth_bounds,
    depth_may_move,
)
from partial_rollout.settings.retention import announce_retention

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from partial_rollout.settings.changes import Changes
    from partial_rollout.settings.derived import Settings

CORRECTION_BLOCK = "algorithm.rollout_correction"
REPLAYS = ("router_replay", "fsdp_config.router_replay", "megatron.router_replay", "veomni.router_replay")
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
REINFORCE = "reinforce"
"""Loss of verl's `bypass_mode` that weighs tokens; the other one, `ppo_clip`, clips them."""
ROLLOUT = "actor_rollout_ref.rollout"
STATISTICS_OFF = f"{ROLLOUT}.disable_log_stats"
ROOM = "transfer_queue.backend.SimpleStorage.total_storage_size"
"""Rows that TransferQueue takes at most; null: any number."""
OTHER_ROWS = 2
"""Times as many rows as training has: validation has some, and so has each further output of an agent loop."""
SPECULATION = f"{ENGINE_ARGUMENTS}.speculative_config"
"""How an engine drafts; empty: it does not."""
TRAINER_MODE, SEPARATE_MODE = "partial_rollout", "partial_rollout_separate"
"""Names of the trainers in verl: for engines that share the trainer's devices, and for engines on their own."""
AGENT_LOOP_MANAGER = "partial_rollout.agent_loop.manager.PartialRolloutAgentLoopManager"
REPLAY_BUFFER_MODULE = "pkg://partial_rollout.train.replay_buffer"
REPLAY_BUFFER_CLASS = "PartialRolloutReplayBuffer"
PACKED_ATTENTION = "varlen_sdpa"
"""Name of the attention that `PACKED_ATTENTION_MODULE` registers when it is imported."""
PACKED_ATTENTION_MODULE = "partial_rollout.packing.attention"

_BOUND = f"leave it out; {BLOCK}.tail.max_staleness bounds how old tokens become"
WITHOUT_EFFECT = {
    "trainer.v1.sampler.max_off_policy_threshold": ("verl's sampler, which reads it, is not used", _BOUND),
    "trainer.v1.sampler.max_off_policy_strategy": (
        "verl's sampler, which reads it, is not used",
        f"leave it out; {BLOCK}.tail.past_staleness says what becomes of old tokens",
    ),
    "trainer.v1.sampler.sampler_kwargs": ("they are for a sampler of your own", "leave it out"),
}
"""Keys of verl that nothing reads with the flag: why, and what to do instead."""


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


def enable(config: DictConfig) -> bool:
    """Set the flag in a composed configuration; returns whether it was set before.

    Raises:
        ConfigError: as `is_enabled`.
    """
    was_enabled = is_enabled(config)
    OmegaConf.update(config, FLAG, True, force_add=True)
    return was_enabled


def provide_attention(changes: Changes) -> None:
    """Let verl load `PACKED_ATTENTION` in every process that builds a model with it, in every mode."""
    for name in ("actor_rollout_ref.model", "critic.model"):
        model = OmegaConf.select(changes.config, name)
        if attention_of(model) == PACKED_ATTENTION:
            given = model.external_lib
            others = as_list(given) if given else []
            why = f"it registers attn_implementation={PACKED_ATTENTION}"
            changes.complete(f"{name}.external_lib", [*others, PACKED_ATTENTION_MODULE], why)


def attention_of(model: DictConfig) -> str | None:
    """The attention implementation that a model block names, if any."""
    return OmegaConf.select(model, "override_config.attn_implementation")


def apply_mode(changes: Changes, settings: Settings) -> None:
    """Point verl's public hooks at this package. Only called when the flag is set.

    Hooks that the user set himself are in `changes.refused`.
    """
    leave_out = "leave it out, or leave out +async_training.partial_rollout=True"
    mode = SEPARATE_MODE if settings.block.placement == SEPARATE else TRAINER_MODE
    changes.replace("trainer.v1.trainer_mode", mode, "the flag brings a trainer of its own", instead=leave_out)
    changes.replace(
        f"{ROLLOUT}.agent.agent_loop_manager_class",
        AGENT_LOOP_MANAGER,
        "its workers take prompts from the prompt queue",
        instead=leave_out,
    )
    sampler = {"path": REPLAY_BUFFER_MODULE, "name": REPLAY_BUFFER_CLASS}
    why = "batches are taken from the prompt queue"
    for name, value in sampler.items():
        changes.replace(f"trainer.v1.sampler.custom_sampler.{name}", value, why, instead=leave_out)
    if settings.block.slots.adaptive is not False:  # `auto` is still open: the cluster decides
        why = f"{BLOCK}.slots.adaptive reads the engines' statistics"
        off = f"leave it out, or set {BLOCK}.slots.adaptive=false"
        changes.replace(STATISTICS_OFF, False, why, instead=off)
    elif (reader := _reads_statistics(changes.config, settings)) and not changes.by_hand.has(STATISTICS_OFF):
        changes.complete(STATISTICS_OFF, False, f"{reader} reads the engines' statistics")
    if not verl_fetches_single_prompts(changes.config):
        why = "verl fetches prompts one by one in all modes but sync"
        changes.replace("data.gen_batch_size", 1, why, instead="leave it out")
    _make_room(changes, settings)
    _hand_on_loss(changes)
    _refuse_without_effect(changes)
    announce_retention(changes)
    _write_block(changes, settings)


def _reads_statistics(config: DictConfig, settings: Settings) -> str:
    """What reads the engines' statistics, beside an adaptive number of slots; empty: nothing."""
    if depth_may_move(settings.block):
        return f"{BLOCK}.prefetch_factor=auto"
    hands_over_late = any(OmegaConf.select(config, f"actor_rollout_ref.{key}") for key in AT_THE_END)
    return f"{BLOCK}.timeouts.stall_s" if hands_over_late else ""


def _make_room(changes: Changes, settings: Settings) -> None:
    """Let TransferQueue hold the batch in training and all batches in flight; verl's bound is meant for one batch.

    A bound that the user set stays.
    """
    config, block = changes.config, settings.block
    room = OmegaConf.select(config, ROOM)
    _, most = depth_bounds(block, block.tail.interrupt_mode)
    num_prompts = math.ceil((1 + most) * block.tail.groups_per_round(config.data.train_batch_size))
    num_rows = num_prompts * (1 + config.actor_rollout_ref.rollout.n)
    if room is not None and room < OTHER_ROWS * num_rows and not changes.by_hand.has(ROOM):
        changes.complete(ROOM, None, f"up to {num_rows} prompts and responses are in flight or in training")


def _hand_on_loss(changes: Changes) -> None:
    """Let the actor have the loss of `bypass_mode` that weighs tokens: verl's v1 trainer hands neither on."""
    correction = OmegaConf.select(changes.config, CORRECTION_BLOCK)
    if correction is None or not correction.bypass_mode or correction.loss_type != REINFORCE:
        return
    given = f"{CORRECTION_BLOCK}.loss_type={REINFORCE}"
    why = f"{given}: verl's v1 trainer does not hand it on"
    changes.replace(f"{POLICY_LOSS}.loss_mode", "bypass_mode", why, instead=f"leave it out, or leave out {given}")
    changes.complete(f"{POLICY_LOSS}.rollout_correction", OmegaConf.to_container(correction, resolve=True), why)


def place_engines(changes: Changes, settings: Settings) -> None:
    """Give engines devices and a way to their weights, with `placement=separate`; else nothing."""
    if settings.block.placement != SEPARATE:
        return
    given, instead = f"{BLOCK}.placement=separate", f"leave it out, or set {BLOCK}.placement=shared"
    why = f"{given}: nothing else uses the memory of an engine's devices"
    changes.replace(f"{ROLLOUT}.free_cache_engine", False, why, instead=instead)
    if not OmegaConf.select(changes.config, f"{ROLLOUT}.nnodes"):
        changes.complete(f"{ROLLOUT}.nnodes", 1, f"{given}: nodes with devices of engines")
    weights, timeout_s = settings.block.weights, settings.block.timeouts.weights_s
    options = {"timeout_s": timeout_s, "buffer_bytes": weights.buffer_bytes, "encrypt": weights.encrypt}
    why = f"{given}: weights go from a training rank to engines on other devices"
    for key, value in {
        "backend": CHECKPOINT_ENGINE,
        "custom_backend_module": "partial_rollout.weights.checkpoint_engine",
        f"engine_kwargs.{CHECKPOINT_ENGINE}": options,
    }.items():
        changes.replace(f"{ROLLOUT}.checkpoint_engine.{key}", value, why, instead=instead)


def fit_workers(changes: Changes, settings: Settings) -> None:
    """Lower verl's default number of agent-loop workers where a batch has fewer prompts; a number set by hand stays."""
    key, num_groups = f"{ROLLOUT}.agent.num_workers", settings.num_slots // settings.group
    if 1 <= num_groups < settings.num_workers and not changes.by_hand.where(changes.config, key):
        why = f"a worker starts all responses of a prompt together, and there are slots for {num_groups} prompts"
        changes.complete(key, num_groups, why)


def verl_fetches_single_prompts(config: DictConfig) -> bool:
    """Whether verl sets data.gen_batch_size to 1 by itself, in its mode `sync` as well."""
    switches = ("algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups")
    return any(OmegaConf.select(config, key, default=False) for key in switches)


def _refuse_without_effect(changes: Changes) -> None:
    for key, (why, instead) in WITHOUT_EFFECT.items():
        where = changes.by_hand.where(changes.config, key)
        if where and OmegaConf.select(changes.config, key):
            changes.refuse(key, where, why, instead=instead)


def place_events(changes: Changes) -> str | None:
    """Put the folder of the run's event stream into the block, and return it; None: no stream.

    It is an absolute path, because the processes of a run have different working folders.
    """
    given = changes.config[BLOCK].events
    if given is None:
        return None
    folder = f"{changes.config.trainer.default_local_dir}/events" if given == "auto" else given
    why = "an absolute path: each process of a run has a working folder of its own"
    changes.complete(f"{BLOCK}.events", os.path.abspath(folder), why)
    return os.path.abspath(folder)


def _write_block(changes: Changes, settings: Settings) -> None:
    """The block with all that was chosen, once for trainer and workers, once where verl hands it to its engines."""
    block = settings.block.to_mapping()
    block["events"] = place_events(changes)
    present: Any = OmegaConf.to_container(changes.config[BLOCK])
    for key, _ in leaves(present):  # old names as the new ones: nobody warns of them again
        changes.complete(f"{BLOCK}.{key}", dict(leaves(block))[key], "its name since release 0.2")
    # verl hands only its own rollout block to replicas and servers; `custom` is its place for extensions.
    block["weights"]["backend"] = "channel" if settings.uses_channel else "verl"
    place = f"{ROLLOUT}.custom.{BLOCK}"
    changes.replace(place, block, "engines read our block there", instead=f"set keys of {BLOCK} only")
