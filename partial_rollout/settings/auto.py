"""What the run chooses where a key says `auto`: each choice with what was seen and why. Pure but for a model's sizes.

`choose` returns the choices and changes nothing, so that they can be shown before a start. `take` writes them into the
configuration. What only the cluster knows (host memory) stays open until the run's first process there looks at it.

| key              | takes                                                                                          |
|------------------|------------------------------------------------------------------------------------------------|
| engine memory    | kept over training where a key of ours asks for it and each GPU has room; else it is proposed  |
| interrupt mode   | reuse_kv where engines keep their memory; offload_kv where a node has room for KV; else abort; |
|                  | keep_kv where engines have devices of their own                                                |
| depth            | two batches; deeper while slots idle for want of prompts, where KV is retained (`core.depth`)  |
| slots            | adaptive, from half of today's number upwards, where KV is retained                            |
| planner          | ours where the trainer has what it needs, else verl's                                          |
| correction       | token-level truncated importance sampling, unless the user's own settings say otherwise        |
| old log-probs    | none where a batch is one optimizer step: its update computes the same ones                    |
| checkpoints      | one in 20 minutes where the user's settings ask for none, on one node                          |
| weights          | our channel where it carries all that the run needs, else verl's way                           |

A value that was set by hand is never changed. No choice makes a run fail that would have run with `abort`: what is not
known for certain counts against a choice. The reasons are in docs/design/0010-auto.md.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from partial_rollout.core.interrupt import MODES
from partial_rollout.errors import ConfigError
from partial_rollout.settings.block import AUTO, BLOCK
from partial_rollout.settings.by_hand import IN_FILE, ByHand
from partial_rollout.settings.derived import (
    ADAPTER_RANKS,
    AT_THE_END,
    MOST_REQUESTS,
    channel_lacks,
    depth_bounds,
    devices_of_engine,
    engine_block,
    engine_devices_per_node,
    engine_option,
    has_own_devices,
    has_own_reference,
    needs_critic,
    num_engines,
    num_ranks,
    read_block,
    read_settings,
)
from partial_rollout.settings.drafts import ended_by_more_slots
from partial_rollout.settings.flag import (
    CORRECTION_BLOCK,
    POLICY_LOSS,
    REINFORCE,
    REPLAYS,
    ROLLOUT,
    SPECULATION,
    STATISTICS_OFF,
)
from partial_rollout.settings.memory import (
    GIB,
    Machine,
    awaits_hub,
    device_need,
    host_need,
    model_sizes,
    trains_as_it_computes,
    uncounted_state,
)
from partial_rollout.settings.refused import Needs, check_packing, unmet_needs
from partial_rollout.settings.retention import ANEW, ASYNC_SAVE, num_kept_checkpoints, removes_checkpoints
from partial_rollout.settings.verl_values import runs_external_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from omegaconf import DictConfig

    from partial_rollout.settings.block import PartialRolloutConfig
    from partial_rollout.settings.changes import Changes
    from partial_rollout.settings.hub import AskHub
    from partial_rollout.settings.memory import DeviceNeed, HostNeed

MODE_KEY = f"{BLOCK}.tail.interrupt_mode"
SIZE_KEY = f"{BLOCK}.tail.offload_gib"
KEEP_KEY = f"{BLOCK}.tail.keep_engine_memory"
RELEASE_KEY = f"{ROLLOUT}.free_cache_engine"
DEPTH_KEY = f"{BLOCK}.prefetch_factor"
SLOTS_KEY = f"{BLOCK}.slots.adaptive"
LEAST_SLOTS_KEY = f"{BLOCK}.slots.least"
PLANNER_KEY = f"{BLOCK}.packing.planner"
WEIGHTS_KEY = f"{BLOCK}.weights.backend"
SAVE_KEY = f"{BLOCK}.save_minutes"
SAVE_MINUTES = 20
"""Checkpoint of an 8B model with its optimizer: about 100 GB, which take minutes on a slow disk."""
BYPASS_KEY, LOSS_KEY = f"{CORRECTION_BLOCK}.bypass_mode", f"{CORRECTION_BLOCK}.loss_type"
CORRECTION_KEY = f"{CORRECTION_BLOCK}.rollout_is"
ONE_STEP: Needs = {
    BYPASS_KEY: (False,),
    CORRECTION_KEY: (None, "token"),
    f"{CORRECTION_BLOCK}.rollout_rs": (None,),
    f"{CORRECTION_BLOCK}.rollout_is_batch_normalize": (False,),
    "actor_rollout_ref.actor.ppo_epochs": (1,),
    f"{POLICY_LOSS}.loss_mode": ("vanilla",),
    "actor_rollout_ref.rollout.calculate_log_probs": (True,),
    "algorithm.use_kl_in_reward": (False, None),
    # Readers of old log-probs, or of what the pass that computes them leaves behind.
    "distillation.enabled": (False, None),
    **{f"actor_rollout_ref.actor.{replay}.mode": ("disabled", None) for replay in REPLAYS},
    # verl's loss fails for a micro-batch without a trained token: an agent loop of the user's may mask a response.
    f"{BLOCK}.tail.past_staleness": ("train", "drop", "finish", "restart"),
    f"{ROLLOUT}.agent.agent_loop_config_path": (None,),
    f"{ROLLOUT}.agent.default_agent_loop": ("single_turn_agent", "tool_agent"),
    # Nobody has trained otherwise with this loss.
    "actor_rollout_ref.actor.strategy": ("fsdp", "fsdp2"),
    # Other estimators may read old log-probs.
    "algorithm.adv_estimator": ("grpo", "rloo", "reinforce_plus_plus", "opo"),
}
"""Values, by whole keys, with which old log-probs weigh nothing in a batch that is one optimizer step."""
UNTRIED_WITH_KV: Needs = {
    **{key: (None, False) for key in AT_THE_END},
    **{f"rollout.engine_kwargs.vllm.{name}": (None,) for name in ("kv_transfer_config", "kv_offloading_size")},
    "rollout.engine_kwargs.vllm.no_enable_prefix_caching": (None, False),
}
"""Needs of a mode that retains KV, beyond those without which it is refused: with these nobody has run one."""
UNTRIED_WITH_OFFLOADING: Needs = {
    **UNTRIED_WITH_KV,
    **dict.fromkeys(ADAPTER_RANKS, (None, 0)),
    "model.lora_adapter_path": (None,),
    "rollout.enable_sleep_mode": (None, True),
    "rollout.pipeline_model_parallel_size": (None, 1),
    "rollout.expert_parallel_size": (None, 1),
    # Host memory that `host_need` does not count.
    "rollout.engine_kwargs.vllm.cpu_offload_gb": (None, 0),
    "rollout.engine_kwargs.vllm.swap_space": (None, 0),
    "rollout.engine_kwargs.vllm.kv_cache_dtype": (None, "auto"),
    "rollout.engine_kwargs.vllm.speculative_config": (None,),
    "rollout.quantization": (None,),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that the run chose."""

    key: str
    """Dotted, as on the command line."""
    before: Any
    value: Any
    """`auto` if it is still open: decided at the start, on the cluster."""
    seen: str
    why: str
    page: str = "docs/modes.md"
    is_final: bool = True
    """False: the value is the first one of those that the run takes while it goes on."""

    @property
    def is_open(self) -> bool:
        """Whether the cluster must be looked at."""
        return self.value == AUTO

    @property
    def what(self) -> str:
        """Key and value."""
        return f"{self.key} {'is decided when the run starts' if self.is_open else f'= {_shown(self.value)}'}"

    def __str__(self) -> str:
        """One line for the log."""
        return f"auto: {self.what}. Seen: {self.seen}. Why: {self.why} ({self.page})"


@dataclass(frozen=True, slots=True)
class Proposal:
    """What would be faster, and is not done by itself: a run that would have run could fail."""

    key: str
    present: Any
    value: Any
    price: str
    """Memory that it takes."""
    why: str
    page: str

    @property
    def what(self) -> str:
        """What to type."""
        return f"{self.key}={_shown(self.value)}"

    @property
    def told(self) -> str:
        """Text without the page."""
        return f"faster with {self.what}: {self.why}. What it takes: {self.price}"

    def __str__(self) -> str:
        """One line for the log."""
        return f"auto: {self.told} ({self.page})"


def choose(
    config: DictConfig, given: ByHand | None = None, machine: Machine | None = None, ask: AskHub | None = None
) -> list[Choice]:
    """The choices for a composed configuration, which is not changed.

    `given` are the keys that were typed by hand; `machine` is what is known of the nodes, None before the start; `ask`
    is asked for a model that is not downloaded yet, where a choice cannot wait for the cluster.
    """
    given, block = given or ByHand(), read_block(config)
    saving = [*_saving(config, block, given)]
    # A checkpoint takes host memory while it is written, so whether there are any decides what is left for KV.
    config = _with(config, saving)
    # Before depth and slots, which follow from what an interruption costs.
    choices = [*_interrupt_mode(config, block, machine)]
    mode = next((choice.value for choice in choices if choice.key == MODE_KEY), block.tail.interrupt_mode)
    full = _full_pool(config, block, choices, machine) if mode == "offload_kv" else ""
    return [
        *choices,
        *_depth(config, block, given, mode, full),
        *_slots(config, block, given, mode, full),
        *_planner(config, block),
        *_correction(config, given),
        *_old_log_probs(config, given, ask),
        *saving,
        *_weights(config, block),
    ]


def _with(config: DictConfig, choices: Iterable[Choice]) -> DictConfig:
    """A copy of the configuration, with these choices in it."""
    copied = copy.deepcopy(config)
    for choice in choices:
        OmegaConf.update(copied, choice.key, choice.value, force_add=True)
    return copied


def propose(config: DictConfig) -> Iterator[Proposal]:
    """What would make a composed configuration faster."""
    block = read_block(config)
    releases = config.actor_rollout_ref.rollout.free_cache_engine is not False
    free = block.tail.interrupt_mode == AUTO and not block.tail.keep_engine_memory
    if not (releases and free) or _not_kept(config, block):
        return
    # No proposal without its arithmetic: nobody could tell whether it fits the GPUs at hand.
    need = _device_need(config)
    if isinstance(need, str):
        return
    why = (
        "engines then keep weights and KV cache while the model trains, and interrupted responses find their KV again "
        f"({MODE_KEY}=reuse_kv); where a GPU is too small nothing changes"
    )
    yield Proposal(KEEP_KEY, False, True, str(need), why, _PAGE)


def take(changes: Changes, ask: AskHub | None = None) -> list[Choice]:
    """Choose, and write what is not open into the configuration. Only called when the flag is set."""
    _refuse_without_use(changes)
    choices = choose(changes.config, changes.by_hand, ask=ask)
    mode = next((choice for choice in choices if choice.key == MODE_KEY), None)
    size = OmegaConf.select(changes.config, SIZE_KEY)
    if mode is not None and size is not None and mode.value not in (AUTO, "offload_kv"):
        where = changes.by_hand.where(changes.config, SIZE_KEY) or IN_FILE
        why = f"it has no use with {MODE_KEY}={mode.value}, which was chosen (seen: {mode.seen}; {mode.why})"
        changes.refuse(SIZE_KEY, where, why, instead=f"leave it out, or set {MODE_KEY}=offload_kv as well")
        choices.remove(mode)
    for choice in choices:
        # What is open is decided on the cluster; what moves stays `auto`, by which its tuner knows that it may.
        if not choice.is_open and choice.is_final:
            changes.complete(choice.key, choice.value, choice.why)
    return choices


def _refuse_without_use(changes: Changes) -> None:
    """`keep_engine_memory` where something that was set by hand decides what it would decide."""
    config, block = changes.config, read_block(changes.config)
    if not block.tail.keep_engine_memory:
        return
    contradicts = config.actor_rollout_ref.rollout.free_cache_engine and changes.by_hand.has(RELEASE_KEY)
    given = (
        (block.tail.interrupt_mode != AUTO, f"{MODE_KEY}={block.tail.interrupt_mode} was set, and only auto reads it"),
        (block.tail.policy == "wait", f"{BLOCK}.tail.policy=wait interrupts nothing"),
        (contradicts, f"{RELEASE_KEY}=True was set, which is the opposite"),
    )
    for is_so, why in given:
        if is_so:
            where = changes.by_hand.where(config, KEEP_KEY) or IN_FILE
            changes.refuse(KEEP_KEY, where, why, instead=f"leave out one of the two, or set {RELEASE_KEY} by yourself")


def take_on_cluster(config: DictConfig, machine: Machine) -> list[Choice]:
    """Decide what `take` left open, and write it into the configuration, in place, for the trainer and for servers."""
    block = read_block(config)
    choices = list(_interrupt_mode(config, block, machine))
    mode = next((choice.value for choice in choices if choice.key == MODE_KEY), block.tail.interrupt_mode)
    full = _full_pool(config, block, choices, machine) if mode == "offload_kv" else ""
    choices += _slots(config, block, ByHand(), mode, full)  # where engines do not tell their load, `take` has chosen
    if choices and (full or mode == "abort"):  # `take` has said that the depth may rise
        choices += _depth(config, block, ByHand(), mode, full)
    for choice in choices:
        if not choice.is_final:
            continue
        # Servers and workers read the block from a copy inside the rollout's configuration, which verl hands to them.
        copies = [f"{ROLLOUT}.custom.{choice.key}"] if choice.key.startswith(f"{BLOCK}.") else []
        for key in (choice.key, *copies):
            OmegaConf.update(config, key, choice.value, force_add=True)
    return choices


def is_corrected(config: DictConfig) -> bool:
    """Whether verl weighs, or leaves out, tokens that older weights sampled."""
    correction = OmegaConf.select(config, CORRECTION_BLOCK)
    if correction is None or not config.actor_rollout_ref.rollout.calculate_log_probs:
        return False
    # verl weighs nothing without a threshold.
    weighs = correction.get("rollout_is") and correction.get("rollout_is_threshold") is not None
    clips = correction.get("bypass_mode") and correction.get("loss_type") != REINFORCE
    return bool(weighs or correction.get("rollout_rs") or clips)


# ---- what an interrupted request leaves in its engine ----


def _interrupt_mode(config: DictConfig, block: PartialRolloutConfig, machine: Machine | None) -> Iterator[Choice]:
    if block.tail.interrupt_mode != AUTO:
        return
    keeps = config.actor_rollout_ref.rollout.free_cache_engine is False
    memory = f"{ROLLOUT}.free_cache_engine={config.actor_rollout_ref.rollout.free_cache_engine}"
    if block.tail.policy == "wait":
        yield _mode("abort", f"{BLOCK}.tail.policy=wait", "nothing is interrupted")
    elif has_own_devices(config) and not unmet_needs(config, MODES["keep_kv"], UNTRIED_WITH_KV):
        why = "engines are interrupted for a weight update only, and requests stay in them meanwhile"
        yield _mode("keep_kv", f"{BLOCK}.placement=separate", why)
    elif keeps:
        # What nobody has tried counts as impossible: a run that would have run with `abort` must not fail.
        unmet = unmet_needs(config, MODES["reuse_kv"], UNTRIED_WITH_KV)
        if unmet:
            yield _mode("abort", unmet, "with it an interrupted response may not find its KV again")
        else:
            why = "engines keep their memory over training, so an interrupted response finds its KV again"
            yield _mode("reuse_kv", memory, why)
    elif not block.tail.keep_engine_memory:
        yield from _offload(config, block, machine, memory)
    else:
        kept = _kept(config, block, machine)
        yield kept
        if kept.is_open:
            yield _mode(AUTO, f"{KEEP_KEY}=True", "the memory of a GPU decides whether KV can stay in the engine")
        elif kept.value is False:
            why = "engines keep their memory over training, so an interrupted response finds its KV again"
            yield _mode("reuse_kv", f"{KEEP_KEY}=True, {kept.seen}", why)
        else:
            yield from _offload(config, block, machine, memory)


def _kept(config: DictConfig, block: PartialRolloutConfig, machine: Machine | None) -> Choice:
    """Whether engines keep their memory, as our key asks for."""
    obstacle = _not_kept(config, block)
    need = obstacle or _device_need(config, machine)
    if isinstance(need, str):
        # The driver does not ask the hub, the start does: until then the size is open.
        if not obstacle and _asks_hub(config, machine):
            return _memory(AUTO, need, f"{KEEP_KEY}=True; {_ASKED}")
        return _memory(True, need, f"{KEEP_KEY}=True is not followed where it is not known that it fits")
    if machine is None:
        return _memory(AUTO, str(need), f"{KEEP_KEY}=True; the memory of a GPU decides")
    gpu = "unknown" if machine.gpu_bytes is None else f"{machine.gpu_bytes / GIB:.0f} GiB"
    seen = f"{need}; the smallest GPU has {gpu}"
    if need.fits(machine.gpu_bytes):
        return _memory(False, seen, f"{KEEP_KEY}=True, and engine and training fit together")
    return _memory(True, seen, f"engine and training may not fit together, so {KEEP_KEY}=True is not followed")


def _not_kept(config: DictConfig, block: PartialRolloutConfig) -> str:
    """What stands in the way of engines that keep their memory and find KV again; empty if nothing does."""
    if config.trainer.device != "cuda":
        return f"trainer.device={config.trainer.device}"
    if block.tail.policy == "wait":
        return f"{BLOCK}.tail.policy=wait"
    return unmet_needs(config, MODES["reuse_kv"], UNTRIED_WITH_KV, met=("rollout.free_cache_engine",))


def _device_need(config: DictConfig, machine: Machine | None = None) -> DeviceNeed | str:
    sizes = model_sizes(config, machine.model if machine else None)
    return sizes if isinstance(sizes, str) else device_need(config, sizes)


def _memory(value: bool | str, seen: str, why: str) -> Choice:
    return Choice(RELEASE_KEY, True, value, seen, why, _PAGE)


def _offload(config: DictConfig, block: PartialRolloutConfig, machine: Machine | None, memory: str) -> Iterator[Choice]:
    """Engines release their memory: KV goes to host memory if there is room for certain."""
    unmet = _not_offloaded(config, block)
    if unmet:
        yield _mode("abort", f"{memory}, {unmet}", "engines release their memory, and KV cannot go to host memory")
        return
    given, need = block.tail.offload_gib, _need(config, machine)
    if given is not None:
        why = "engines release their memory; KV goes to the host memory that was set for it"
        takes = "" if isinstance(need, str) else f", which takes {need.takes(given)}"
        yield _mode("offload_kv", f"{memory}, {SIZE_KEY}={given}{takes}", why)
        return
    if isinstance(need, str) and _asks_hub(config, machine):
        yield _mode(AUTO, f"{memory}, {need}", _ASKED)
        return
    if isinstance(need, str):
        why = (
            "how much host memory a node needs for KV and training is not known, so KV is computed again after each "
            f"step; {SIZE_KEY}=N would give N GiB of it to each engine"
        )
        yield _mode("abort", f"{memory}, {need}", why)
        return
    wanted = f"the KV of all slots of a node needs {need.kv_bytes / GIB:.1f} GiB, training {need.state_bytes / GIB:.1f}"
    if machine is None:
        wanted += (
            f"; a pool of {need.whole_gib} GiB an engine, which holds all of it, takes {need.takes(need.whole_gib)}"
        )
        yield _mode(AUTO, f"{memory}, {wanted}", "a node's free host memory decides between offload_kv and abort")
        return
    # The node with the least decides: all engines have pools of one size.
    gib, seen = need.gib_for_each_engine(machine), f"{memory}, {wanted}, {_room(machine)}"
    if gib:
        yield _mode("offload_kv", seen, "engines release their memory, and host memory has room for the KV")
        share = f"half of what training leaves, for {need.engines} engines a node, and no more than all slots need"
        if not machine.offloads_to_shm:
            share += f"; it takes {need.takes(gib)}"
        yield Choice(SIZE_KEY, None, gib, _room(machine), share, _PAGE)
    else:
        yield _mode("abort", seen, "too little host memory is left for the KV, so it is computed again")


def _full_pool(
    config: DictConfig, block: PartialRolloutConfig, choices: Iterable[Choice], machine: Machine | None
) -> str:
    """What is seen of host memory that two batches fill already; empty where it has room for more, or is not known."""
    need = _need(config, machine)
    gib = next((choice.value for choice in choices if choice.key == SIZE_KEY), block.tail.offload_gib)
    if isinstance(need, str) or gib is None or need.suffices_for_more(gib):
        return ""
    return f"{SIZE_KEY}={gib}, while the KV of all slots of a node needs {need.kv_bytes / GIB:.1f} GiB"


_ASKED = "the run asks the hub for the model's sizes when it starts; until then they are not known"


def _asks_hub(config: DictConfig, machine: Machine | None) -> bool:
    """Whether a size that is not known before the start will be known then."""
    return machine is None and awaits_hub(config)


def _need(config: DictConfig, machine: Machine | None) -> HostNeed | str:
    """What a node needs of host memory, or what stands in the way of knowing it."""
    sizes = model_sizes(config, machine.model if machine else None)
    if isinstance(sizes, str):
        return sizes
    need = host_need(config, read_settings(config).num_slots, sizes)
    if need is None:
        per_node = f"{engine_block(config)}.n_gpus_per_node={engine_devices_per_node(config)}"
        return f"an engine of {devices_of_engine(config)} devices on nodes with {per_node}"
    return uncounted_state(config) or need


def _not_offloaded(config: DictConfig, block: PartialRolloutConfig) -> str:
    """What stands in the way of KV in host memory, empty if nothing does."""
    if config.trainer.device != "cuda":
        return f"trainer.device={config.trainer.device}"
    if block.tail.policy != "partial":
        return f"{BLOCK}.tail.policy={block.tail.policy}, with which nobody has run it"
    return unmet_needs(config, MODES["offload_kv"], UNTRIED_WITH_OFFLOADING)


def _room(machine: Machine) -> str:
    """What the nodes have, in words."""
    host = "unknown" if machine.host_bytes is None else f"{machine.host_bytes / GIB:.1f} GiB"
    shm = f", /dev/shm {(machine.shm_bytes or 0) / GIB:.1f} GiB" if machine.offloads_to_shm else ""
    return f"free host memory of the node with the least: {host}{shm}"


_PAGE = "docs/modes.md#which-interrupt-mode"


def _mode(value: str, seen: str, why: str) -> Choice:
    return Choice(MODE_KEY, AUTO, value, seen, why, _PAGE)


# ---- how many prompts are in flight, and how many trajectories are generated ----

_SLOTS_PAGE = "docs/modes.md#how-many-prompts-in-flight-and-what-does-it-cost"
_MORE = f"a larger {SIZE_KEY}, where a node has the memory, lets both rise"


def _depth(config: DictConfig, block: PartialRolloutConfig, given: ByHand, mode: str, full: str) -> Iterator[Choice]:
    if block.prefetch_factor != AUTO or block.tail.policy != "partial":
        return
    least, most = depth_bounds(block, mode)
    if full and most > least:
        yield Choice(
            DEPTH_KEY, AUTO, least, full, f"KV of more batches would be lost and computed again; {_MORE}", _SLOTS_PAGE
        )
        return
    # Only where it was set by hand: otherwise the flag turns the statistics on where depth may move.
    tells_nothing = most > least and _has_no_statistics(config, given)
    seen = f"{MODE_KEY}={mode}"
    if block.tail.max_staleness is not None:
        seen += f", {BLOCK}.tail.max_staleness={block.tail.max_staleness}"
    why = f"two batches fill most slots; up to {most:g} while slots idle for want of prompts and KV is retained"
    if most == least:
        why = (
            "more batches would only make tokens older" if mode == "abort" else "the bound on staleness allows no more"
        )
    if tells_nothing:
        seen = f"{STATISTICS_OFF}=True"
        why = "two batches fill most slots; engines do not tell their load, so nothing says when more would be too many"
    yield Choice(DEPTH_KEY, AUTO, least, seen, why, _SLOTS_PAGE, is_final=False)


def _has_no_statistics(config: DictConfig, given: ByHand) -> bool:
    return given.has(STATISTICS_OFF) and bool(OmegaConf.select(config, STATISTICS_OFF))


def _slots(config: DictConfig, block: PartialRolloutConfig, given: ByHand, mode: str, full: str) -> Iterator[Choice]:
    if block.slots.adaptive != AUTO:
        return
    settings = read_settings(config)
    start, bounded = settings.num_slots, block.slots.least
    if block.tail.policy != "partial":
        yield _adaptive(
            False, f"{BLOCK}.tail.policy={block.tail.policy}", "a round starts no more than there are slots"
        )
    elif block.num_slots is not None and not bounded:
        yield _adaptive(False, f"{BLOCK}.num_slots={block.num_slots}", "the number was set by hand")
    elif _has_no_statistics(config, given):
        yield _adaptive(False, f"{STATISTICS_OFF}=True", "it was set by hand, so engines do not tell their load")
    elif mode == "abort" and not bounded:
        yield _adaptive(False, f"{MODE_KEY}=abort", "more requests at once would only mean more to compute again")
    elif full and not bounded:
        yield _adaptive(False, full, f"KV of more slots would be lost and computed again; {_MORE}")
    # Left open rather than guessed: the cluster may choose `abort`, with which slots stay as they are.
    elif mode == AUTO and not bounded:
        yield _adaptive(AUTO, f"{MODE_KEY} is open", "more slots help only where KV is retained")
    elif (room := settings.engine_room) is not None and room < start and not bounded:
        seen = f"{start} slots for a batch, and {_room_in_words(config)}"
        yield _adaptive(False, seen, f"engines run no more than {room} requests at once, and the others wait in them")
    elif (drafted := ended_by_more_slots(config)) and not bounded:
        seen = f"{start} slots for a batch, and {SPECULATION}"
        yield _adaptive(False, seen, f"an engine drafts for {drafted} requests at most, and slots could become more")
    else:
        why = f"engines may have room for more than these {start}, or for fewer"
        if room == start:
            why = f"a full KV cache may have room for fewer than the {room} requests that engines run at once"
        yield _adaptive(True, f"{start} slots for a batch", why)
        if block.slots.least is None:
            least = max(settings.num_workers, start // settings.group // 2) * settings.group
            why = "a full KV cache has room for fewer; but never less than half, nor than a prompt for each worker"
            yield Choice(LEAST_SLOTS_KEY, None, least, f"{start} slots for a batch", why, _SLOTS_PAGE)


def waiting_inside(config: DictConfig) -> str:
    """What to say where there are more slots than the engines run requests; empty where there are not."""
    settings, number = read_settings(config), num_engines(config)
    room, slots = settings.engine_room, settings.num_slots
    if room is None or room >= slots:
        return ""
    each = -(-slots // number)
    enough = f"raise it to {each}" + ("" if number == 1 else f", with which {number} engines run {each * number}")
    return (
        f"{_room_in_words(config)}, fewer than the {slots} slots: {slots - room} requests wait inside the engines, and "
        f"slot_utilisation counts them as running; {enough}"
    )


def _room_in_words(config: DictConfig) -> str:
    number = num_engines(config)
    engines = "one engine" if number == 1 else f"{number} engines"
    key, each = engine_option(config, MOST_REQUESTS)
    return f"{key}={each} on {engines}"


def _adaptive(value: bool | str, seen: str, why: str) -> Choice:
    return Choice(SLOTS_KEY, AUTO, value, seen, why, _SLOTS_PAGE)


# ---- who trains together ----


def _planner(config: DictConfig, block: PartialRolloutConfig) -> Iterator[Choice]:
    if block.packing.planner != AUTO:
        return
    page = "docs/design/0004-packing.md"
    try:
        check_packing(config)
    # The check that refuses a planner set by hand, so that both always agree.
    except ConfigError as obstacle:
        why = "our planner has not what it needs (FSDP, whole mini-batches on each rank)"
        yield Choice(PLANNER_KEY, AUTO, "verl", str(obstacle).partition(" is not allowed")[0], why, page)
        return
    if (fixed := _fixed_sizes(config)) and not block.packing.token_budget:
        why = (
            f"micro-batches keep the size that you gave; our planner would fill rows up to a number of tokens instead "
            f"(set {PLANNER_KEY}=global to have that)"
        )
        yield Choice(PLANNER_KEY, AUTO, "verl", f"{fixed}=False", why, page)
    else:
        seen = f"actor_rollout_ref.actor.strategy={config.actor_rollout_ref.actor.strategy}"
        yield Choice(PLANNER_KEY, AUTO, "global", seen, "fewer micro-batches, with rows even in what they cost", page)


def _fixed_sizes(config: DictConfig) -> str:
    """The switch of a pass whose micro-batches have a fixed number of responses; empty if none has."""
    passes = ["actor.use_dynamic_bsz", "rollout.log_prob_use_dynamic_bsz"]
    if has_own_reference(config):
        passes.append("ref.log_prob_use_dynamic_bsz")
    keys = (f"actor_rollout_ref.{name}" for name in passes)
    return next((key for key in keys if not OmegaConf.select(config, key)), "")


# ---- checkpoints ----


def _saving(config: DictConfig, block: PartialRolloutConfig, given: ByHand) -> Iterator[Choice]:
    if block.save_minutes != AUTO:
        return
    page, steps = "docs/operations.md#checkpoints", f"trainer.save_freq={config.trainer.save_freq}"
    if where := given.where(config, "trainer.save_freq"):
        yield Choice(SAVE_KEY, AUTO, None, f"{steps} (set {where})", "trainer.save_freq says when the run saves", page)
    elif not removes_checkpoints(config):
        seen = f"{ASYNC_SAVE}={OmegaConf.select(config, ASYNC_SAVE)}"
        why = "old checkpoints would fill the disk: they are not removed with async_save"
        yield Choice(SAVE_KEY, AUTO, None, seen, f"{why}. Set trainer.save_freq", page)
    else:
        kept = num_kept_checkpoints(config, by_time=True)
        why = (
            "otherwise the death of a training rank would cost all steps. Checkpoints that are kept: "
            f"{kept}, the newest. {_goes_on(config)}trainer.save_freq=-1 on the command line turns this off"
        )
        yield Choice(SAVE_KEY, AUTO, SAVE_MINUTES, f"{steps}, which nobody set", why, page)


def _goes_on(config: DictConfig) -> str:
    if config.trainer.resume_mode == "disable":
        return ""
    return f"The same command then goes on from it; a new run needs {ANEW}. "


# ---- how weights travel ----


def _weights(config: DictConfig, block: PartialRolloutConfig) -> Iterator[Choice]:
    if block.weights.backend != AUTO:
        return
    page, device = "docs/design/0005-weights.md", f"trainer.device={config.trainer.device}"
    lacks = channel_lacks(config)
    if read_settings(config).uses_channel:
        why = "our channel carries all that this run needs, in a GPU's memory or over shared memory"
        yield Choice(WEIGHTS_KEY, AUTO, "channel", device, why, page)
    elif not has_own_devices(config):  # whose engines have no other way: `refused` says what stands in its way
        why = "our channel does not carry it" if lacks else "our channel is for CPUs and CUDA"
        yield Choice(WEIGHTS_KEY, AUTO, "verl", lacks or device, f"{why}, so weights travel by verl's way", page)


# ---- old tokens ----


def _correction(config: DictConfig, given: ByHand) -> Iterator[Choice]:
    """Nothing where the user's overrides name the correction, or a file turns one on."""
    correction = OmegaConf.select(config, CORRECTION_BLOCK)
    # A null that was typed is a wish; a null of a file cannot be told from verl's default.
    if given.has(CORRECTION_KEY) or correction is None or correction.rollout_is is not None:
        return
    page = "docs/your-job.md#is-the-correction-on"
    clips = correction.get("loss_type") != REINFORCE
    for key, is_other, why in (
        ("bypass_mode", clips, "the loss compares with the engine's log-probs already"),
        ("rollout_rs", True, "another correction was chosen"),
    ):
        if is_other and correction.get(key):
            yield Choice(CORRECTION_KEY, None, None, f"algorithm.rollout_correction.{key}={correction[key]}", why, page)
            return
    if correction.get("rollout_is_threshold") is None:
        seen = "algorithm.rollout_correction.rollout_is_threshold=null"
        yield Choice(CORRECTION_KEY, None, None, seen, "verl weighs nothing without a threshold", page)
        return
    log_probs = f"{ROLLOUT}.calculate_log_probs"
    if not OmegaConf.select(config, log_probs):
        yield Choice(CORRECTION_KEY, None, None, f"{log_probs}=False", "a correction compares log-probs", page)
        return
    seen = "algorithm.rollout_correction.rollout_is=null, which no override sets"
    why = (
        "a resumed response has tokens of several weight versions; each is weighed by pi_train / pi_rollout, at most "
        f"{correction.rollout_is_threshold}. A null of a YAML file looks like verl's default: to keep it, write "
        f"{CORRECTION_KEY}=null on the command line"
    )
    yield Choice(CORRECTION_KEY, None, "token", seen, why, page)


def _old_log_probs(config: DictConfig, given: ByHand, ask: AskHub | None) -> Iterator[Choice]:
    """The choice to compute none; nothing where one of their keys was typed, or where they may weigh something."""
    correction = OmegaConf.select(config, CORRECTION_BLOCK)
    if correction is None or any(map(given.has, (BYPASS_KEY, LOSS_KEY, f"{POLICY_LOSS}.loss_mode"))):
        return
    if any(OmegaConf.select(config, key) not in allowed for key, allowed in ONE_STEP.items()):
        return
    # For a critic's mini-batches verl may add samples of padding, which are not trained.
    if runs_external_code(config) or needs_critic(config):
        return
    prompts, mini_batch = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if prompts != mini_batch or prompts * config.actor_rollout_ref.rollout.n % num_ranks(config):
        return  # several optimizer steps, or samples of padding
    if not isinstance(correction.rollout_is_threshold, int | float):
        return
    if not trains_as_it_computes(config, ask):  # last, since it may ask the hub
        return
    seen = f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}, the batch, so it is one optimizer step"
    why = (
        "a batch is one optimizer step, whose update computes the same log-probs as the pass before it: without that "
        "pass the gradient stays the same. Not measured then: actor/entropy, training/rollout_probs_diff_* and others; "
        f"{BYPASS_KEY}=False on the command line brings them back"
    )
    page = "docs/modes.md#a-shorter-step-beside-generation"
    yield Choice(BYPASS_KEY, False, True, seen, why, page)
    other = "the other loss of bypass_mode, ppo_clip, clips tokens and has another gradient"
    yield Choice(LOSS_KEY, correction.loss_type, REINFORCE, seen, other, page)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
