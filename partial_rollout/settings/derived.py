"""What follows from our block together with verl's configuration; made once by `read_settings` and passed on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from partial_rollout.core.interrupt import MODES
from partial_rollout.core.slots import SlotBounds, share_slots
from partial_rollout.errors import ConfigError
from partial_rollout.settings.block import AUTO, BLOCK, SEPARATE, PartialRolloutConfig, groups_in_flight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omegaconf import DictConfig

CHECKPOINT_ENGINE = "partial_rollout"
"""Name under which `weights.checkpoint_engine` registers itself in verl."""
CHECKPOINT_ENGINE_KEY = "rollout.checkpoint_engine.backend"
AT_THE_END = ("rollout.enable_rollout_routing_replay", "rollout.mtp.enable_rollout")
"""Settings with which a request's tokens come only at the request's end."""
ADAPTER_RANKS = ("model.lora_rank", "model.lora.rank")
BEYOND_CHANNEL = {
    **{key: ("the weights below a LoRA adapter", (None, 0)) for key in ADAPTER_RANKS},
    "rollout.quantization": ("weights quantised on arrival", (None,)),
    "rollout.mtp.enable_rollout": ("a draft model", (None, False)),
    "rollout.disaggregation.enabled": ("separate prefill and decode engines", (None, False)),
    CHECKPOINT_ENGINE_KEY: (
        "weights from training workers elsewhere",
        (None, "naive", CHECKPOINT_ENGINE),
    ),
}
"""Keys below actor_rollout_ref that verl's weight update serves and ours does not, with the values that ask nothing."""
ENGINE_ARGUMENTS = "actor_rollout_ref.rollout.engine_kwargs.vllm"
CHANNEL_DEVICES = ("cpu", "cuda")
MOST_REQUESTS = "max_num_seqs"
"""vLLM's bound of each engine; more requests wait inside it."""


@dataclass(frozen=True)
class Settings:
    """The block, and what follows from it and a few values of verl's configuration."""

    block: PartialRolloutConfig
    batch: int
    """Prompts of a training batch."""
    group: int
    """Trajectories of a prompt."""
    num_workers: int
    """Agent-loop workers."""
    uses_channel: bool
    """Whether weights travel by our channel: unless the channel lacks something, or verl's way was asked for."""
    engine_room: int | None
    """Requests that all engines run at once by their own bound; None: no bound was set."""

    @property
    def num_slots(self) -> int:
        """Trajectories generated at the same time over all workers, to start with."""
        return self.block.num_slots or self.block.tail.groups_per_round(self.batch) * self.group

    @property
    def slot_shares(self) -> list[int]:
        """The slot budget of each agent-loop worker, to start with."""
        return share_slots(self.num_slots, num_workers=self.num_workers, group=self.group)

    @cached_property
    def slot_bounds(self) -> SlotBounds:
        """The least and the most slots of an adaptive number, in whole prompt groups.

        The most are the trajectories that may be in flight. Where engines run fewer at once, they are so many, and as
        many more as are idle in the mean because a worker claims whole groups; but no fewer than at the start.

        Raises:
            ConfigError: the least is above the number to start with, or has no group for each worker.
        """
        group, slots, start = self.group, self.block.slots, self.num_slots
        fewest = group * self.num_workers
        least = slots.least or fewest
        in_flight, idle = groups_in_flight(self.block.depths[1], self.batch) * group, self.num_workers * group // 2
        most = max(start, in_flight if self.engine_room is None else min(in_flight, self.engine_room + idle))
        if not fewest <= least <= start:
            raise ConfigError(
                f"{BLOCK}.slots.least={least} is not allowed: must be at least {fewest}, rollout.n={group} for each of "
                f"{self.num_workers} agent-loop workers, and at most the {start} slots to start with "
                f"({BLOCK}.num_slots)"
            )
        return SlotBounds(least - least % group, most - most % group, group, self.num_workers)


def read_settings(config: DictConfig) -> Settings:
    """Parse the `partial_rollout` block of a configuration, and derive what follows from it.

    Raises:
        ConfigError: the block is missing or has a key or value that is not allowed.
    """
    block = read_block(config)
    rollout = config.actor_rollout_ref.rollout
    return Settings(
        block,
        config.data.train_batch_size,
        rollout.n,
        rollout.agent.num_workers,
        _uses_channel(config, block),
        engine_room(config),
    )


def read_block(config: DictConfig) -> PartialRolloutConfig:
    """Parse the block alone, which no value of verl's can stand in the way of.

    Raises:
        ConfigError: as `read_settings`.
    """
    block = OmegaConf.select(config, BLOCK)
    if block is None:
        raise ConfigError(f"the configuration has no `{BLOCK}` block: start from configs/partial_rollout.yaml")
    container: Any = OmegaConf.to_container(block, resolve=True)
    return PartialRolloutConfig.from_mapping(container)


def filter_metric(config: DictConfig) -> str | None:
    """The metric by which groups without spread are dropped (DAPO's dynamic sampling), or None.

    Raises:
        ConfigError: groups are to be filtered, but it is not said by what.
    """
    filtering = OmegaConf.select(config, "algorithm.filter_groups")
    if not filtering or not filtering.get("enable"):
        return None
    if not filtering.get("metric"):
        raise ConfigError(
            "algorithm.filter_groups.metric=null is not allowed with algorithm.filter_groups.enable=True: must be "
            "`reward`, or the name of a number that the reward function returns beside it (`acc`)"
        )
    return str(filtering.metric)


def ignored_limit(config: DictConfig) -> str:
    """What to say of a limit of verl's for this filtering, which is ignored; empty where none is set.

    Raises:
        ConfigError: as `filter_metric`.
    """
    limit = config.algorithm.filter_groups.get("max_num_gen_batches", 0) if filter_metric(config) else 0
    if limit <= 0:
        return ""
    return (
        f"algorithm.filter_groups.max_num_gen_batches={limit} is ignored: groups without spread are replaced until the "
        "batch is full, as in the trainers of verl v1; a warning says when many are"
    )


def num_ranks(config: DictConfig) -> int:
    """Data-parallel size of the actor."""
    return num_devices(config) // sequence_parallel_size(config)


def num_devices(config: DictConfig) -> int:
    """Devices of the training ranks."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def has_own_devices(config: DictConfig) -> bool:
    """Whether engines are on devices of their own (`placement=separate`)."""
    return OmegaConf.select(config, f"{BLOCK}.placement") == SEPARATE


def engine_block(config: DictConfig) -> str:
    """Key of the block whose `nnodes` and `n_gpus_per_node` are those of the engines."""
    return "actor_rollout_ref.rollout" if has_own_devices(config) else "trainer"


def num_engine_nodes(config: DictConfig) -> int:
    """Nodes on which engines are."""
    # verl's default is 0 for engines on devices of their own; `place_engines` makes it 1.
    return OmegaConf.select(config, f"{engine_block(config)}.nnodes") or 1


def engine_devices_per_node(config: DictConfig) -> int:
    """Devices of a node on which engines are."""
    return OmegaConf.select(config, f"{engine_block(config)}.n_gpus_per_node")


def num_engine_devices(config: DictConfig) -> int:
    """Devices on which engines are."""
    return num_engine_nodes(config) * engine_devices_per_node(config)


def num_rollout_devices(config: DictConfig) -> int:
    """Devices of engines alone; 0 where engines share those of the training ranks."""
    return num_engine_devices(config) if has_own_devices(config) else 0


def devices_of_engine(config: DictConfig) -> int:
    """Devices of one engine without data parallelism."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.tensor_model_parallel_size * (rollout.get("pipeline_model_parallel_size") or 1)


def devices_of_replica(config: DictConfig) -> int:
    """Devices of one replica: those of all engines of a data-parallel group."""
    return devices_of_engine(config) * (config.actor_rollout_ref.rollout.get("data_parallel_size") or 1)


def num_engines(config: DictConfig) -> int:
    """Engines over all nodes; those of a data-parallel group count one by one."""
    # An engine of no device is refused later, when the settings have been read.
    return max(1, num_engine_devices(config) // max(1, devices_of_engine(config)))


def engine_option(config: DictConfig, name: str) -> tuple[str, Any]:
    """An argument of vLLM's engine, and the key that sets it: verl's own, unless vLLM's arguments have it."""
    own = f"{ENGINE_ARGUMENTS}.{name}"
    value = OmegaConf.select(config, own)
    if value is not None:
        return own, value
    key = f"actor_rollout_ref.rollout.{name}"
    return key, OmegaConf.select(config, key)


def engine_room(config: DictConfig) -> int | None:
    """Requests that all engines run at once by their own bound; None: no bound was set."""
    _, each = engine_option(config, MOST_REQUESTS)
    return None if each is None else each * num_engines(config)


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


def as_list(value: Any) -> list[Any]:
    """Values of a key that takes one or a list."""
    return list(value) if OmegaConf.is_list(value) else [value]


def needs_critic(config: DictConfig) -> bool:
    """Whether a critic is trained beside the actor, as verl decides it."""
    given = OmegaConf.select(config, "critic.enable")
    return config.algorithm.adv_estimator == "gae" if given is None else bool(given)


def depth_bounds(block: PartialRolloutConfig, mode: str) -> tuple[float, float]:
    """Batches in flight at the start and at most, with this interrupt mode; `auto` is taken for one that retains KV."""
    least, most = block.depths
    return (least, most) if mode == AUTO or MODES[mode].retains_kv else (least, least)


def depth_may_move(block: PartialRolloutConfig) -> bool:
    """Whether the number of batches in flight follows the engines' load, which their statistics tell."""
    least, most = depth_bounds(block, block.tail.interrupt_mode)
    return block.tail.policy == "partial" and least < most


def _uses_channel(config: DictConfig, block: PartialRolloutConfig) -> bool:
    backend = block.weights.backend
    on_known_device = config.trainer.device in CHANNEL_DEVICES
    return backend == "channel" or (backend == "auto" and on_known_device and not channel_lacks(config))


def channel_lacks(config: DictConfig) -> str | None:
    """What this configuration needs of a weight update that our channel cannot do, or None."""
    return next((f"{BEYOND_CHANNEL[key][0]} ({given})" for key, given in beyond_channel(config)), None)


def beyond_channel(config: DictConfig) -> Iterator[tuple[str, str]]:
    """The keys of `BEYOND_CHANNEL` that ask for what our channel cannot do, each with what is given for it."""
    for key, (_, allowed) in BEYOND_CHANNEL.items():
        value = OmegaConf.select(config, f"actor_rollout_ref.{key}")
        if value not in allowed and not (key in ADAPTER_RANKS and _sends_whole_or_adapters(config)):
            yield key, f"actor_rollout_ref.{key}={value}"


def _sends_whole_or_adapters(config: DictConfig) -> bool:
    """Whether verl merges adapters into what it sends, or engines load what is below them by themselves."""
    loads_nothing = "dummy" in str(OmegaConf.select(config, "actor_rollout_ref.rollout.load_format"))
    return bool(OmegaConf.select(config, "actor_rollout_ref.model.lora.merge")) or not loads_nothing
