"""What is refused before anything is started: in every mode (`check_inputs`), with partial rollout (`check_config`)."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from partial_rollout.core.interrupt import mode_of
from partial_rollout.core.queue.staleness import make_bound
from partial_rollout.core.queue.tail import make_policy
from partial_rollout.errors import ConfigError, DataError, Refusal, UserError
from partial_rollout.settings.block import BLOCK
from partial_rollout.settings.by_hand import leaves, verl_defaults
from partial_rollout.settings.derived import (
    ADAPTER_RANKS,
    AT_THE_END,
    BEYOND_CHANNEL,
    CHANNEL_DEVICES,
    CHECKPOINT_ENGINE_KEY,
    as_list,
    beyond_channel,
    channel_lacks,
    devices_of_engine,
    engine_devices_per_node,
    filter_metric,
    has_own_devices,
    has_own_reference,
    needs_critic,
    num_devices,
    num_ranks,
    sequence_parallel_size,
)
from partial_rollout.settings.fields import unlisted
from partial_rollout.settings.flag import PACKED_ATTENTION, SEPARATE_MODE, SPECULATION, TRAINER_MODE, attention_of
from partial_rollout.settings.mistyped import of_a_request
from partial_rollout.settings.verl_values import refusal, refused_sizes, refused_values

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from omegaconf import DictConfig

    from partial_rollout.core.interrupt import InterruptMode
    from partial_rollout.settings.block import PartialRolloutConfig
    from partial_rollout.settings.derived import Settings

    Check = Callable[..., Iterable[UserError] | None]
    """Raises the first refusal, or yields all."""

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""`model` or `organisation/model`; anything else can only be a local path."""
NUMBER, SWITCH = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"), re.compile(r"(?i)true|false")
WORD_OF_SWITCH = re.compile(r"(?i)yes|no|on|off|y|n")
"""What YAML 1.1 takes for a switch, and Hydra for a text."""
ALSO_TEXT = (
    "algorithm.rollout_correction.rollout_is_threshold",  # 0.5_2.0: both bounds
    "transfer_queue.",  # another package's, as are the next
    "actor_rollout_ref.actor.fsdp_config.turbo_config.",
    "actor_rollout_ref.ref.fsdp_config.turbo_config.",
    "critic.fsdp.turbo_config.",
)
"""Beginnings of keys whose default is a number and that may be texts."""
FILES = (
    "data.custom_cls.path",
    "data.tool_config_path",
    "reward.custom_reward_function.path",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
)
PACKED_STRATEGIES = ("fsdp", "fsdp2")
UNSUPPORTED_ESTIMATORS = {
    "remax": "it needs a greedy baseline from the same weights as the sampled response",
}
COUNTS = (
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.agent.num_workers",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
)
Needs = dict[str, tuple[Any, ...]]
"""Keys below actor_rollout_ref, and the values that are allowed; the last is what to set."""

HANDS_OVER: Needs = {
    **dict.fromkeys(AT_THE_END, (None, False)),
    **dict.fromkeys(ADAPTER_RANKS, (None, 0)),
    "rollout.data_parallel_size": (None, 1),
    "rollout.engine_kwargs.vllm.stream_interval": (None, 1),
}
"""What a request needs that stays in the engine and hands over its tokens."""
FINDS_AGAIN: Needs = {
    "rollout.enable_prefix_caching": (None, True),
    "rollout.engine_kwargs.vllm.enable_prefix_caching": (None, True),
    "rollout.data_parallel_size": (None, 1),
}
"""What a request needs that leaves and finds its KV when it comes back; data-parallel engines have KV of their own."""
IN_HOST_MEMORY: Needs = {
    **FINDS_AGAIN,
    "rollout.enable_rollout_routing_replay": (None, False),  # vLLM refuses it with any connector
    "rollout.engine_kwargs.vllm.kv_transfer_config": (None,),
    "rollout.engine_kwargs.vllm.kv_offloading_size": (None,),
}
"""What a request needs that leaves, and whose KV our connector keeps in host memory."""

WHY_NEEDED = {
    "keep_kv": "otherwise a request that stays in the engine cannot hand over its tokens",
    "reuse_kv": "otherwise an interrupted response would not find its KV again",
    "offload_kv": "otherwise the KV cannot go to host memory and come back",
}


def check_inputs(config: DictConfig) -> None:
    """Refuse, in every mode and before anything is started, what no run can use.

    Raises:
        ConfigError: names the value, what is allowed and where to set it.
        DataError: a data or model path does not exist.
    """
    check_counts(config)
    for check in INPUT_CHECKS:
        for error in refusals_of(check, config):
            raise error


def check_config(config: DictConfig, settings: Settings) -> None:
    """Refuse, before anything is started, what this mode cannot run; `check_inputs` comes first.

    Raises:
        ConfigError: names the value, what is allowed and where to set it.
    """
    for check in MODE_CHECKS:
        for error in refusals_of(check, config, settings):
            raise error


def refusals_of(check: Check, *arguments: object) -> Iterator[UserError]:
    """All that a check has against a configuration: what it yields, and what it raises."""
    try:
        yield from check(*arguments) or ()
    except UserError as error:
        yield error


def check_counts(config: DictConfig) -> None:
    """Refuse what the other checks cannot compute with."""
    for key in COUNTS:
        _require_count(config, key)
    _check_types(config)


def _check_entry_point(config: DictConfig) -> None:
    _require(
        OmegaConf.select(config, "trainer.use_v1", default=True),
        "trainer.use_v1=False",
        "True",
        "partial_rollout.main_ppo runs verl's v1 trainer, with the flag and without; the old trainer is started with "
        "verl.trainer.main_ppo",
    )


def _check_engine(config: DictConfig, _settings: Settings) -> None:
    name = OmegaConf.select(config, "actor_rollout_ref.rollout.name")
    because = "gate, drain and weight channel are built on vLLM"
    _require(name == "vllm", f"actor_rollout_ref.rollout.name={name}", "vllm", because)


def _check_slots(config: DictConfig, settings: Settings) -> None:
    n, num_workers = settings.group, settings.num_workers
    _require(
        min(settings.slot_shares) >= n,
        f"{settings.num_slots} trajectory slots over {num_workers} agent-loop workers",
        f"at least {n * num_workers}, rollout.n={n} for each worker (raise {BLOCK}.num_slots or lower "
        "rollout.agent.num_workers)",
        "a worker starts all responses of a prompt together",
    )
    if settings.block.slots.are_adaptive:
        _ = settings.slot_bounds


def _require_count(config: DictConfig, key: str) -> int:
    value = OmegaConf.select(config, key)
    _require(isinstance(value, int) and value >= 1, f"{key}={value!r}", "a whole number of at least 1")
    return value


def _check_lengths(config: DictConfig, _settings: Settings) -> None:
    prompt = _require_count(config, "data.max_prompt_length")
    _require_count(config, "data.max_response_length")
    limit = config.actor_rollout_ref.rollout.max_model_len
    _require(
        limit is None or limit > prompt,
        f"actor_rollout_ref.rollout.max_model_len={limit}",
        f"null or above data.max_prompt_length={prompt}",
        "a prompt of that length would leave no room for a response",
    )


def _check_tail(config: DictConfig, settings: Settings) -> None:
    """Sizes of rounds; verl's own `data.gen_batch_size` is what the dataloader fetches, and 1 in this mode."""
    block = settings.block
    batch, fetched = config.data.train_batch_size, OmegaConf.select(config, "data.gen_batch_size")
    block.tail.check_batch(batch)
    make_bound(block.tail, make_policy(block, batch), batch)
    more = (
        f". To generate more prompts than are trained, set {BLOCK}.tail.policy=reorder and "
        f"{BLOCK}.tail.gen_batch_size={fetched}"
    )
    _require(
        fetched is None or (fetched >= 1 and batch % fetched == 0),
        f"data.gen_batch_size={fetched}",
        f"null or a divisor of data.train_batch_size={batch}{more if fetched and fetched > batch else ''}",
        "" if more and fetched and fetched > batch else "a batch is fetched in whole parts",
    )


def _check_interrupt_mode(config: DictConfig, settings: Settings) -> None:
    """What the engine must have, or must not do, for an interrupted request to leave something in it."""
    mode = mode_of(settings.block.tail)
    if mode.name == "abort":
        return
    chosen, way_out = f"with {BLOCK}.tail.interrupt_mode={mode.name}", f"(or set {BLOCK}.tail.interrupt_mode=abort)"
    on_gpu = not mode.releases_memory or config.trainer.device != "cpu"
    _require(on_gpu, f"trainer.device=cpu {chosen}", f"a GPU, from which alone vLLM offloads KV {way_out}")
    for given, wanted in _unmet(config, engine_needs(mode)):
        _require(False, f"{given} {chosen}", f"{wanted} {way_out}", WHY_NEEDED[mode.name])


def unmet_needs(config: DictConfig, mode: InterruptMode, more: Needs, met: Collection[str] = ()) -> str:
    """The first value of the engine's that rules a mode out, as `key=value`, or empty.

    `more` is needed too; the keys of `met` are taken as they should be.
    """
    needs = engine_needs(mode) | more
    return next((given for given, _ in _unmet(config, {key: needs[key] for key in needs if key not in met})), "")


def _unmet(config: DictConfig, needs: Needs) -> Iterator[tuple[str, str]]:
    """What is given and what would be allowed, for each need that is not met."""
    for key, allowed in needs.items():
        value = OmegaConf.select(config, f"actor_rollout_ref.{key}")
        if value not in allowed:
            yield f"actor_rollout_ref.{key}={value}", "null" if allowed[-1] is None else str(allowed[-1])


def engine_needs(mode: InterruptMode) -> Needs:
    """What an interrupt mode needs of the engine; `abort` is no mode to ask for, as it needs nothing."""
    return {
        "rollout.free_cache_engine": (mode.releases_memory,),
        "rollout.disaggregation.enabled": (None, False),
        **(HANDS_OVER if mode.stays else IN_HOST_MEMORY if mode.releases_memory else FINDS_AGAIN),
    }


def _check_packing(config: DictConfig, settings: Settings) -> None:
    if settings.block.packing.planner == "global":
        check_packing(config)


def check_packing(config: DictConfig) -> None:
    """Raise ConfigError unless verl's actor has what our planner needs."""
    actor = config.actor_rollout_ref.actor
    alternative = f"with {BLOCK}.packing.planner=global: change it, or set {BLOCK}.packing.planner=verl"
    strategies = " or ".join(PACKED_STRATEGIES)
    given = f"actor_rollout_ref.actor.strategy={actor.strategy}"
    why = "our planner packs rows for verl's FSDP engine"
    _require(actor.strategy in PACKED_STRATEGIES, given, f"{strategies} {alternative}", why)
    why = "the planner's rows hold for the order that it plans"
    _require(not actor.shuffle, "actor_rollout_ref.actor.shuffle=True", f"False {alternative}", why)
    _check_sequence_parallel(config, alternative)
    samples = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    given = f"actor_rollout_ref.actor.ppo_mini_batch_size x rollout.n = {samples} for {num_ranks(config)} ranks"
    why = "each rank trains an equal part of a mini-batch"
    _require(samples % num_ranks(config) == 0, given, f"a multiple of the ranks {alternative}", why)


def _check_sequence_parallel(config: DictConfig, alternative: str) -> None:
    """The actor's and the reference's ranks get the same plan."""
    size, reference = sequence_parallel_size(config), sequence_parallel_size(config, "ref")
    keys = "actor_rollout_ref.{0}.fsdp_config.ulysses_sequence_parallel_size (or {0}.ulysses_sequence_parallel_size)"
    given = (
        f"{keys.format('actor')}={size} for trainer.nnodes x trainer.n_gpus_per_node = {num_devices(config)} devices"
    )
    _require(num_devices(config) % size == 0, given, f"a divisor of the devices {alternative}")
    packed_attention = size > 1 and attention_of(config.actor_rollout_ref.model) == PACKED_ATTENTION
    _require(not packed_attention, f"{given} with attn_implementation={PACKED_ATTENTION}", "1", "it needs whole rows")
    _require(
        not has_own_reference(config) or reference == size,
        f"{keys.format('ref')}={reference}",
        f"the actor's {size} {alternative}",
        "both get the same rows",
    )


def _check_algorithm(config: DictConfig, _settings: Settings) -> None:
    estimator = str(config.algorithm.adv_estimator)
    why = UNSUPPORTED_ESTIMATORS.get(estimator)
    if why:
        given = f"algorithm.adv_estimator={estimator}"
        instead = "Use grpo, rloo, reinforce_plus_plus or gae, or leave out +async_training.partial_rollout=True"
        message = f"{given} cannot work with partial rollout: {why}. {instead}"
        raise Refusal(message, given, because=why, instead=instead)
    filter_metric(config)


def _check_trainer(config: DictConfig, _settings: Settings) -> None:
    """Settings of verl's trainer that contradict one drain and one weight update a step."""
    for mode in (TRAINER_MODE, SEPARATE_MODE):
        updates = OmegaConf.select(config, f"trainer.v1.{mode}.parameter_sync_step", default=1)
        _require(updates == 1, f"trainer.v1.{mode}.parameter_sync_step={updates}", "1", "one batch is taken a step")
    _require(
        not config.actor_rollout_ref.rollout.full_determinism,
        "actor_rollout_ref.rollout.full_determinism=True",
        "False",
        "what is interrupted depends on the clock, and a resumed request would draw its first numbers again",
    )
    _require(
        has_own_devices(config) or OmegaConf.select(config, "actor_rollout_ref.hybrid_engine", default=True),
        "actor_rollout_ref.hybrid_engine=False",
        f"True (engines get devices of their own with {BLOCK}.placement=separate)",
        "engines and trainer share their devices in this mode",
    )
    reward = config.reward.reward_model
    _require(
        not reward.enable or reward.enable_resource_pool,
        "reward.reward_model.enable=True with enable_resource_pool=False",
        "on devices of its own (enable_resource_pool=True)",
        "sharing them puts engines to sleep while they generate",
    )
    _require(
        not reward.enable or config.reward.custom_reward_function.path is not None,
        "reward.reward_model.enable=True without a reward function",
        "with reward.custom_reward_function.path, a function that asks the model at `reward_router_address`",
        "verl 0.9.1, without the flag too, ends a response that only a model scores with KeyError: 'reward_extra_info'",
    )


def _check_placement(config: DictConfig, settings: Settings) -> Iterator[UserError]:
    """What engines on devices of their own cannot do, or what nobody has tried there."""
    if not has_own_devices(config):
        return
    block, rollout, key = settings.block, config.actor_rollout_ref.rollout, f"{BLOCK}.placement=separate"
    per_node, engine = engine_devices_per_node(config), devices_of_engine(config)
    adapter = next((name for name in ADAPTER_RANKS if OmegaConf.select(config, f"actor_rollout_ref.{name}")), "")
    is_merged = bool(OmegaConf.select(config, "actor_rollout_ref.model.lora.merge"))
    finish, staleness = block.tail.past_staleness == "finish", block.tail.max_staleness
    no_wait = "nothing waits for the end of a batch's responses while engines go on"
    mode, rollout_key = block.tail.interrupt_mode, "actor_rollout_ref.rollout"
    for is_so, given, allowed, because in (
        *_without_channel(config, block),
        (
            adapter and not is_merged,
            f"actor_rollout_ref.{adapter}",
            "0, or model.lora.merge=True",
            "verl sends adapters to engines on the same devices only",
        ),
        (block.tail.policy != "partial", f"{BLOCK}.tail.policy={block.tail.policy}", "partial", no_wait),
        (finish, f"{BLOCK}.tail.past_staleness=finish", "train, mask, drop or restart", no_wait),
        (staleness == 0, f"{BLOCK}.tail.max_staleness=0", "null or at least 1", "engines go on while the model trains"),
        (block.tail.keep_engine_memory, f"{BLOCK}.tail.keep_engine_memory=true", "false", "engines share no memory"),
        (mode == "offload_kv", f"{BLOCK}.tail.interrupt_mode={mode}", "another one", "engines keep their memory"),
        (
            (rollout.get("data_parallel_size") or 1) > 1,
            f"{rollout_key}.data_parallel_size={rollout.get('data_parallel_size')}",
            "1",
            "a rank sends weights to the workers of tensor-parallel engines",
        ),
        (
            per_node < 1 or per_node % engine,
            f"{rollout_key}.n_gpus_per_node={per_node}",
            f"a multiple of the {engine} devices of an engine (tensor_model_parallel_size)",
            "an engine over several nodes cannot be started again",
        ),
    ):
        if is_so:
            yield refusal(f"{given} with {key}", allowed, because)


def _without_channel(config: DictConfig, block: PartialRolloutConfig) -> Iterator[tuple[bool, str, str, str]]:
    """What keeps the weights of engines on devices of their own from our channel: whether, given, allowed, because."""
    by_channel, device = "weights go to engines by our channel alone", config.trainer.device
    yield block.weights.backend == "verl", f"{BLOCK}.weights.backend=verl", "auto", by_channel
    yield device not in CHANNEL_DEVICES, f"trainer.device={device}", " or ".join(CHANNEL_DEVICES), by_channel
    for key, given in beyond_channel(config):
        what, allowed = BEYOND_CHANNEL[key]
        # Adapters have a row of their own, and `place_engines` has refused another checkpoint engine.
        is_told = key in ADAPTER_RANKS or key == CHECKPOINT_ENGINE_KEY
        because = f"{by_channel}, which does not carry {what}"
        yield not is_told, given, "null" if allowed[-1] is None else str(allowed[-1]), because


def _check_weights(config: DictConfig, settings: Settings) -> None:
    if has_own_devices(config):
        return  # `_check_placement` says it, where verl's way is no way out
    block, unsupported = settings.block, channel_lacks(config)
    if block.weights.backend == "channel" and config.trainer.device not in CHANNEL_DEVICES:
        raise ConfigError(
            f"{BLOCK}.weights.backend=channel with trainer.device={config.trainer.device} is not allowed: the device "
            f"must be one of {', '.join(CHANNEL_DEVICES)} (set {BLOCK}.weights.backend=verl or auto)"
        )
    if block.weights.backend == "channel" and unsupported:
        raise ConfigError(
            f"{BLOCK}.weights.backend=channel does not carry {unsupported}: set {BLOCK}.weights.backend=verl or auto"
        )


def _check_paths(config: DictConfig) -> Iterator[UserError]:
    for key in ("data.train_files", "data.val_files"):
        value = OmegaConf.select(config, key)
        paths = as_list(value)
        if not paths:
            yield refusal(f"{key}=[]", "at least one file")
        for path in paths:
            yield from _wrong_path(key, path)
    yield from _wrong_path("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path, hub=True)


def _wrong_path(key: str, path: Any, *, hub: bool = False) -> Iterator[UserError]:
    """What is wrong with it, if anything is."""
    if not isinstance(path, str):
        yield refusal(f"{key}={path}", "a path" + (" or the name of a model on the hub" if hub else ""))
        return
    if "://" in path or os.path.exists(os.path.expanduser(path)):
        return
    given, parent = f"{key}={path} does not exist", path.partition("/")[0]
    if not hub or HUB_NAME.fullmatch(path) is None:
        yield DataError(f"{given}; give the path of an existing one (set {key}=...)")
    elif "/" in path and os.path.isdir(parent):
        yield DataError(f"{given}, and the folder {parent} is here: give the path of an existing model (set {key}=...)")
    elif not is_cached(path) and hub_is_off():
        yield DataError(f"{given}, is not among the downloaded models, and HF_HUB_OFFLINE forbids to fetch it")


def hub_is_off() -> bool:
    """Whether the environment forbids to ask the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")


def is_cached(name: str) -> bool:
    """Whether a model of the hub was downloaded to this machine before."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return os.path.isdir(os.path.join(cache, f"models--{name.replace('/', '--')}", "snapshots"))


def _require(condition: bool, given: str, allowed: str, because: str = "") -> None:
    if not condition:
        raise refusal(given, allowed, because)


def _check_files(config: DictConfig) -> Iterator[UserError]:
    """Files that a run reads besides its data; verl opens some of them only when workers and engines have started."""
    for key in FILES:
        path = OmegaConf.select(config, key)
        if path is not None:
            yield from _wrong_path(key, path)
    if OmegaConf.select(config, "trainer.resume_mode") == "resume_path":
        yield from _wrong_path("trainer.resume_from_path", OmegaConf.select(config, "trainer.resume_from_path"))


def _check_micro_batches(config: DictConfig) -> None:
    """verl's dataclasses refuse the same, but with the whole of Hydra's way to them around the reason."""
    if not config.actor_rollout_ref.actor.use_dynamic_bsz:
        _require_one(config, "actor_rollout_ref.actor", "ppo_micro_batch_size")
        _require_one(config, "actor_rollout_ref.rollout", "log_prob_micro_batch_size")
        if config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss:
            _require_one(config, "actor_rollout_ref.ref", "log_prob_micro_batch_size")
    if needs_critic(config) and not OmegaConf.select(config, "critic.use_dynamic_bsz"):
        _require_one(config, "critic", "ppo_micro_batch_size")


def _require_one(config: DictConfig, block: str, name: str) -> None:
    """Require exactly one of the two sizes: the one for each device, or the one for all devices, its old form."""
    names = (f"{block}.{name}_per_gpu", f"{block}.{name}")
    given = [OmegaConf.select(config, key) for key in names]
    _require(
        sum(value is not None for value in given) == 1,
        " with ".join(f"{key}={'null' if value is None else value}" for key, value in zip(names, given, strict=True)),
        f"a number for the first and null for the second (set {names[0]}, or "
        f"{'critic' if block == 'critic' else 'actor_rollout_ref.actor'}.use_dynamic_bsz=True)",
        "verl needs one size of a micro-batch",
    )


def _check_types(config: DictConfig) -> None:
    """Texts where verl has a number or a switch: verl would fail at their first use, or take any text for True."""
    container: Any = OmegaConf.to_container(config)
    given = dict(leaves(container))
    strategy = str(config.actor_rollout_ref.actor.strategy)
    for key, default in verl_defaults(strategy).items():
        value = given.get(key)
        if not isinstance(value, str) or not isinstance(default, int | float) or "${" in value:
            continue
        is_switch = isinstance(default, bool)
        kind = "True or False" if is_switch else "a number"
        if SWITCH.fullmatch(value) if is_switch else NUMBER.fullmatch(value):
            because = "in quotes it is a text, with which verl cannot compute"
            _require(False, f"{key}={value!r}", f"{kind} without quotes ({key}={value})", because)
        elif is_switch:
            _require(WORD_OF_SWITCH.fullmatch(value) is None, f"{key}={value}", kind, "any other word counts as True")
        elif not key.startswith(ALSO_TEXT):
            _require(False, f"{key}={value}", kind, f"verl computes with it (its default is {default})")


def _check_devices(config: DictConfig, settings: Settings) -> None:
    """With verl's planner too, the devices are shared out in whole rows; `check_packing` says it for ours."""
    size = sequence_parallel_size(config) if config.actor_rollout_ref.actor.strategy in PACKED_STRATEGIES else 1
    given = (
        f"sequence parallelism of {size} for trainer.nnodes x trainer.n_gpus_per_node = {num_devices(config)} devices"
    )
    fits = settings.block.packing.planner != "verl" or num_devices(config) % size == 0
    key = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    why = "the devices are shared out in whole rows"
    _require(fits, given, f"a divisor of the devices (set {key})", why)


def _check_fields(config: DictConfig) -> Iterator[UserError]:
    """Keys that nothing of verl's reads, below blocks that it makes dataclasses of."""
    for found in unlisted(config):
        if found.is_refused:
            given = f"{found.key}={found.value}"
            name, owner = found.key.rpartition(".")[2], found.owner.rpartition(".")[2]
            because = f"verl's {owner} has no {name}, and verl would refuse it when its first worker starts"
            instead = _without_field(found.key)
            yield Refusal(f"{given} is not allowed: {because}; {instead}", given, because=because, instead=instead)


def _without_field(key: str) -> str:
    of_engine = key.startswith("actor_rollout_ref.rollout.")
    vllm = "; an option of vLLM's own goes below actor_rollout_ref.rollout.engine_kwargs.vllm" if of_engine else ""
    return of_a_request(key) or f"leave it out, or look for its right name or block{vllm}"


def _check_engine_devices(config: DictConfig, _settings: Settings) -> Iterator[UserError]:
    yield from refused_sizes(config)


def _check_drafts(config: DictConfig) -> None:
    """With drafts vLLM 0.28 on a CPU samples at temperatures that are in memory by chance (its issue 55005)."""
    _require(
        config.trainer.device != "cpu" or not OmegaConf.select(config, SPECULATION),
        f"trainer.device=cpu with {SPECULATION}",
        "a GPU, or no drafts",
        "on a CPU vLLM 0.28 checks drafts at wrong temperatures, so responses would not be the model's",
    )


INPUT_CHECKS: tuple[Check, ...] = (
    *(_check_entry_point, _check_paths, _check_files, _check_micro_batches, _check_fields, _check_drafts),
    refused_values,
)
MODE_CHECKS: tuple[Check, ...] = (
    _check_engine,
    _check_tail,
    _check_interrupt_mode,
    _check_lengths,
    _check_packing,
    _check_slots,
    _check_algorithm,
    _check_trainer,
    _check_weights,
    _check_devices,
    _check_engine_devices,
    _check_placement,
)
