"""The flag, and what it changes in a composed verl configuration."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf, open_dict

from partial_rollout.core.interrupt import mode_of
from partial_rollout.core.queue.staleness import make_bound
from partial_rollout.core.queue.tail import make_policy
from partial_rollout.core.slots import SlotBounds, share_slots
from partial_rollout.errors import ConfigError, DataError
from partial_rollout.settings.block import BLOCK, PartialRolloutConfig
from partial_rollout.settings.engine_needs import ADAPTER_RANKS, engine_needs

if TYPE_CHECKING:
    from omegaconf import DictConfig

TRAINER_MODE = "partial_rollout"
AGENT_LOOP_MANAGER = "partial_rollout.agent_loop.manager.PartialRolloutAgentLoopManager"
REPLAY_BUFFER_MODULE = "pkg://partial_rollout.train.replay_buffer"
REPLAY_BUFFER_CLASS = "PartialRolloutReplayBuffer"

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""`model` or `organisation/model`; anything else can only be a local path."""
PACKED_STRATEGIES = ("fsdp", "fsdp2")
PACKED_ATTENTION = "varlen_sdpa"
"""Of `PACKED_ATTENTION_MODULE`, which registers it when it is imported."""
PACKED_ATTENTION_MODULE = "partial_rollout.packing.attention"
UNSUPPORTED_ESTIMATORS = {
    "remax": "it needs a greedy baseline from the same weights as the sampled response",
}
BEYOND_CHANNEL = {
    **{key: ("the weights below a LoRA adapter", (None, 0)) for key in ADAPTER_RANKS},
    "rollout.quantization": ("weights quantised on arrival", (None,)),
    "rollout.mtp.enable_rollout": ("a draft model", (None, False)),
    "rollout.disaggregation.enabled": ("separate prefill and decode engines", (None, False)),
    "rollout.checkpoint_engine.backend": ("weights from training workers elsewhere", (None, "naive")),
}
"""Keys below actor_rollout_ref that verl's weight update serves and ours does not, with the values that ask nothing."""

CHANNEL_DEVICES = ("cpu", "cuda")


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
    groups = settings.tail.groups_per_round(config.data.train_batch_size)
    return settings.num_slots or groups * config.actor_rollout_ref.rollout.n


def slot_bounds(config: DictConfig) -> SlotBounds:
    """Between what an adaptive number of slots moves, in whole prompt groups.

    Raises:
        ConfigError: the bounds leave no room for the number to start with, or for a group in each worker.
    """
    settings, rollout = read_settings(config), config.actor_rollout_ref.rollout
    group, num_workers, start = rollout.n, rollout.agent.num_workers, num_slots(config)
    in_flight = make_policy(settings, config.data.train_batch_size).capacity * group
    least = settings.slots.least or group * num_workers
    most = settings.slots.most or max(in_flight, start)
    _require(
        group * num_workers <= least <= start <= most,
        f"{BLOCK}.slots.least={least} and {BLOCK}.slots.most={most} with {start} slots to start with",
        f"at least rollout.n={group} for each of {num_workers} agent-loop workers, and with "
        f"{BLOCK}.num_slots between them",
    )
    return SlotBounds(least - least % group, most - most % group, group, num_workers)


def slot_shares(config: DictConfig) -> list[int]:
    """The slot budget of each agent-loop worker, to start with."""
    rollout = config.actor_rollout_ref.rollout
    return share_slots(num_slots(config), num_workers=rollout.agent.num_workers, group=rollout.n)


def num_ranks(config: DictConfig) -> int:
    """Data-parallel size of the actor."""
    return num_devices(config) // sequence_parallel_size(config)


def num_devices(config: DictConfig) -> int:
    """Devices of the training ranks."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def sequence_parallel_size(config: DictConfig, role: str = "actor") -> int:
    """Devices that share a row of the actor, or of the reference (`role="ref"`)."""
    settings = config.actor_rollout_ref[role]
    # verl writes a deprecated key above 1 over the other one (FSDPActorConfig).
    deprecated = settings.ulysses_sequence_parallel_size
    return deprecated if deprecated > 1 else settings.fsdp_config.ulysses_sequence_parallel_size


def has_own_reference(config: DictConfig) -> bool:
    """Whether a reference model is loaded beside the actor; with LoRA it is the actor without its adapter."""
    models = config.actor_rollout_ref
    ranks = [OmegaConf.select(models, key, default=0) for key in ADAPTER_RANKS]
    with_adapter = max(ranks) > 0 or OmegaConf.select(models, "model.lora_adapter_path") is not None
    needed = config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
    return needed and not with_adapter


def check_inputs(config: DictConfig) -> None:
    """Refuse, in every mode and before anything is started, what no run can use.

    Raises:
        ConfigError: names the value, what is allowed and where to set it.
        DataError: a data or model path does not exist.
    """
    for key in ("data.train_batch_size", "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.agent.num_workers"):
        _require_count(config, key)
    _check_paths(config)


def check_config(config: DictConfig) -> None:
    """Refuse, before anything is started, what this mode cannot run; `check_inputs` comes first.

    Raises:
        ConfigError: names the value, what is allowed and where to set it.
    """
    rollout = config.actor_rollout_ref.rollout
    n, num_workers = rollout.n, rollout.agent.num_workers
    _require(rollout.name == "vllm", f"actor_rollout_ref.rollout.name={rollout.name}", "vllm")
    _check_tail(config)
    _check_interrupt_mode(config)
    _check_lengths(config)
    _check_packing(config)
    _require(
        min(slot_shares(config)) >= n,
        f"{num_slots(config)} trajectory slots over {num_workers} agent-loop workers",
        f"at least {n * num_workers}, rollout.n={n} for each worker: raise {BLOCK}.num_slots or lower "
        "rollout.agent.num_workers",
    )
    if read_settings(config).slots.adaptive:
        slot_bounds(config)
    _check_algorithm(config)
    _check_weights(config)


def _require_count(config: DictConfig, key: str) -> int:
    value = OmegaConf.select(config, key)
    _require(isinstance(value, int) and value >= 1, f"{key}={value}", "a whole number of at least 1")
    return value


def _check_lengths(config: DictConfig) -> None:
    prompt = _require_count(config, "data.max_prompt_length")
    _require_count(config, "data.max_response_length")
    limit = config.actor_rollout_ref.rollout.max_model_len
    _require(
        limit is None or limit > prompt,
        f"actor_rollout_ref.rollout.max_model_len={limit}",
        f"null or above data.max_prompt_length={prompt}",
    )


def _check_tail(config: DictConfig) -> None:
    """Sizes of rounds; verl's own `data.gen_batch_size` is what the dataloader fetches, and 1 in this mode."""
    batch, fetched = config.data.train_batch_size, OmegaConf.select(config, "data.gen_batch_size")
    settings = read_settings(config)
    settings.tail.check_batch(batch)
    make_bound(settings.tail, make_policy(settings, batch), batch)
    more = (
        f". To generate more prompts than are trained, set {BLOCK}.tail.policy=reorder and "
        f"{BLOCK}.tail.gen_batch_size={fetched}"
    )
    _require(
        fetched is None or (fetched >= 1 and batch % fetched == 0),
        f"data.gen_batch_size={fetched}",
        f"null or a divisor of data.train_batch_size={batch}{more if fetched and fetched > batch else ''}",
    )


def _check_interrupt_mode(config: DictConfig) -> None:
    """What the engine must have, or must not do, for an interrupted request to leave something in it."""
    mode = mode_of(read_settings(config).tail)
    if mode.name == "abort":
        return
    chosen, way_out = f"with {BLOCK}.tail.interrupt_mode={mode.name}", f"(or set {BLOCK}.tail.interrupt_mode=abort)"
    on_gpu = not mode.releases_memory or config.trainer.device != "cpu"
    _require(on_gpu, f"trainer.device=cpu {chosen}", f"a GPU, from which alone vLLM offloads KV {way_out}")
    for key, allowed in engine_needs(mode).items():
        value = OmegaConf.select(config, f"actor_rollout_ref.{key}")
        wanted = "null" if allowed[-1] is None else allowed[-1]
        _require(value in allowed, f"actor_rollout_ref.{key}={value} {chosen}", f"{wanted} {way_out}")


def _check_packing(config: DictConfig) -> None:
    """What a planner of ours needs from verl's actor."""
    packing, actor = read_settings(config).packing, config.actor_rollout_ref.actor
    if packing.planner == "verl":
        return
    alternative = f"with {BLOCK}.packing.planner={packing.planner}: change it, or set {BLOCK}.packing.planner=verl"
    strategies = " or ".join(PACKED_STRATEGIES)
    given = f"actor_rollout_ref.actor.strategy={actor.strategy}"
    _require(actor.strategy in PACKED_STRATEGIES, given, f"{strategies} {alternative}")
    _require(not actor.shuffle, "actor_rollout_ref.actor.shuffle=True", f"False {alternative}")
    _check_sequence_parallel(config, alternative)
    samples = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    given = f"actor_rollout_ref.actor.ppo_mini_batch_size x rollout.n = {samples} for {num_ranks(config)} ranks"
    _require(samples % num_ranks(config) == 0, given, f"a multiple of the ranks {alternative}")


def _check_sequence_parallel(config: DictConfig, alternative: str) -> None:
    """The actor's and the reference's ranks get the same plan."""
    size, reference = sequence_parallel_size(config), sequence_parallel_size(config, "ref")
    keys = "actor_rollout_ref.{0}.fsdp_config.ulysses_sequence_parallel_size (or {0}.ulysses_sequence_parallel_size)"
    given = (
        f"{keys.format('actor')}={size} for trainer.nnodes x trainer.n_gpus_per_node = {num_devices(config)} devices"
    )
    _require(num_devices(config) % size == 0, given, f"a divisor of the devices {alternative}")
    packed_attention = size > 1 and _attention(config.actor_rollout_ref.model) == PACKED_ATTENTION
    _require(not packed_attention, f"{given} with attn_implementation={PACKED_ATTENTION}", "1: it needs whole rows")
    _require(
        not has_own_reference(config) or reference == size,
        f"{keys.format('ref')}={reference}",
        f"the actor's {size} {alternative}",
    )


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
    _check_trainer(config)


def _check_trainer(config: DictConfig) -> None:
    """Settings of verl's trainer that contradict one drain and one weight update a step."""
    updates = OmegaConf.select(config, f"trainer.v1.{TRAINER_MODE}.parameter_sync_step", default=1)
    _require(updates == 1, f"trainer.v1.{TRAINER_MODE}.parameter_sync_step={updates}", "1: one batch is taken a step")
    _require(
        not config.actor_rollout_ref.rollout.full_determinism,
        "actor_rollout_ref.rollout.full_determinism=True",
        "False: what is interrupted depends on the clock, and a resumed request would draw its first numbers again",
    )
    sampler = OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path")
    _require(not sampler, f"trainer.v1.sampler.custom_sampler.path={sampler}", "null: the prompt manager decides")
    reward = config.reward.reward_model
    _require(
        not reward.enable or reward.enable_resource_pool,
        "reward.reward_model.enable=True with enable_resource_pool=False",
        "on devices of its own (enable_resource_pool=True): sharing them puts engines to sleep while they generate",
    )


def _check_weights(config: DictConfig) -> None:
    settings = read_settings(config).weights
    unsupported = channel_lacks(config)
    if settings.backend == "channel" and config.trainer.device not in CHANNEL_DEVICES:
        raise ConfigError(
            f"{BLOCK}.weights.backend=channel with trainer.device={config.trainer.device} is not allowed: the device "
            f"must be one of {', '.join(CHANNEL_DEVICES)} (set {BLOCK}.weights.backend=verl or auto)"
        )
    if settings.backend == "channel" and unsupported:
        raise ConfigError(
            f"{BLOCK}.weights.backend=channel does not carry {unsupported}: set {BLOCK}.weights.backend=verl or auto"
        )


def uses_channel(config: DictConfig) -> bool:
    """Whether this run sends weights by our channel: unless it lacks something, or verl's was asked for."""
    backend = read_settings(config).weights.backend
    on_known_device = config.trainer.device in CHANNEL_DEVICES
    return backend == "channel" or (backend == "auto" and on_known_device and not channel_lacks(config))


def channel_lacks(config: DictConfig) -> str | None:
    """What this configuration needs of a weight update that our channel cannot do, or None."""
    for key, (what, allowed) in BEYOND_CHANNEL.items():
        value = OmegaConf.select(config, f"actor_rollout_ref.{key}")
        if value not in allowed and not (key in ADAPTER_RANKS and _sends_whole_or_adapters(config)):
            return f"{what} (actor_rollout_ref.{key}={value})"
    return None


def _sends_whole_or_adapters(config: DictConfig) -> bool:
    """Whether verl merges adapters into what it sends, or engines load what is below them by themselves."""
    loads_nothing = "dummy" in str(OmegaConf.select(config, "actor_rollout_ref.rollout.load_format"))
    return bool(OmegaConf.select(config, "actor_rollout_ref.model.lora.merge")) or not loads_nothing


def _check_paths(config: DictConfig) -> None:
    for key in ("data.train_files", "data.val_files"):
        value = OmegaConf.select(config, key)
        paths = list(value) if OmegaConf.is_list(value) else [value]
        _require(bool(paths), f"{key}=[]", "at least one file")
        for path in paths:
            _require_path(key, path)
    _require_path("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path, hub=True)


def _require_path(key: str, path: Any, *, hub: bool = False) -> None:
    _require(isinstance(path, str), f"{key}={path}", "a path" + (" or the name of a model on the hub" if hub else ""))
    on_hub = hub and HUB_NAME.fullmatch(path) is not None
    if "://" not in path and not on_hub and not os.path.exists(os.path.expanduser(path)):
        raise DataError(f"{key}={path} does not exist; give the path of an existing one (set {key}=...)")


def provide_attention(config: DictConfig) -> None:
    """Let verl load `PACKED_ATTENTION` in every process that builds a model with it, in place and in every mode."""
    for model in (config.actor_rollout_ref.model, config.critic.model):
        if _attention(model) == PACKED_ATTENTION:
            given = model.external_lib
            others = list(given) if OmegaConf.is_list(given) else [given] if given else []
            model.external_lib = [*others, PACKED_ATTENTION_MODULE]


def _attention(model: DictConfig) -> str | None:
    return OmegaConf.select(model, "override_config.attn_implementation")


def _require(condition: bool, given: str, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{given} is not allowed: must be {allowed}")


def apply_mode(config: DictConfig) -> None:
    """Point verl's public hooks at this package, in place. Only called when the flag is set."""
    rollout = config.actor_rollout_ref.rollout
    with open_dict(config):
        config.trainer.v1.trainer_mode = TRAINER_MODE
        rollout.agent.agent_loop_manager_class = AGENT_LOOP_MANAGER
        if read_settings(config).slots.adaptive:
            rollout.disable_log_stats = False
        config.trainer.v1.sampler.custom_sampler = {"path": REPLAY_BUFFER_MODULE, "name": REPLAY_BUFFER_CLASS}
        # verl hands only its own rollout block to replicas and servers; `custom` is its place for extensions.
        block = dataclasses.asdict(read_settings(config))
        block["weights"]["backend"] = "channel" if uses_channel(config) else "verl"
        rollout.custom = {**(rollout.get("custom") or {}), BLOCK: block}
