"""How much memory KV, weights and training take, on a node and on a GPU: arithmetic, and a look at a model's files."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from partial_rollout.settings.block import BLOCK
from partial_rollout.settings.by_hand import leaves
from partial_rollout.settings.derived import (
    ADAPTER_RANKS,
    devices_of_engine,
    engine_devices_per_node,
    has_own_devices,
    has_own_reference,
    needs_critic,
    num_devices,
    num_engines,
    num_rollout_devices,
)
from partial_rollout.settings.hub import ModelFiles
from partial_rollout.settings.refused import HUB_NAME, PACKED_STRATEGIES, hub_is_off
from partial_rollout.settings.retention import may_save

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from omegaconf import DictConfig

    from partial_rollout.settings.hub import AskHub

GIB = 1 << 30
KV_SHARE = 0.5
"""Share for KV of the host memory that training leaves: the rest is for Ray's object store, data, other processes."""
LEAST_OF_NEED = 0.25
"""Below this share of all slots' KV, with all responses at their limit, much of what is stored would be evicted."""
MORE_OF_NEED = 0.6
"""Three batches with slots that were added leave up to 1.6 times as much as two, for which a third of all slots' KV was
enough (docs/results/gpu.md, a pool that is too small)."""
STATE_BYTES = 12
"""Bytes of a parameter in host memory while a checkpoint is written, or for good where training offloads it: the
float32 weight and the optimizer's two moments."""
COUNTED = (
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
)
"""Offloading that the arithmetic below knows; verl always offloads a reference with FSDP."""
PLAIN_ATTENTION = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""`model_type` of models with the same KV in each layer; others have windows, states or latents."""
SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
FLOAT_BYTES = {"float32": 4, "float": 4, "fp32": 4}
"""All other types of weights count as 2 bytes."""
TRAINED_COPIES = 4
"""How many times the weights' bytes training holds: the weights, their gradient and the optimizer's two moments, all in
the weights' type. All four are on the GPU in the optimizer's step, also where they are in host memory between steps."""
LOGIT_BYTES = 10
"""Bytes by token and word of the vocabulary: bf16 logits with their gradient, and the float32 copy of the logits with
what log-probs keep of it; nothing with fused kernels."""
LAYER_BYTES = 100
"""Bytes by token and number of the hidden size that one layer keeps while it is computed again for its gradient."""
OTHER_BYTES = 4 * GIB
"""Memory of a GPU for other things: CUDA's and NCCL's own, and what fragmentation loses."""
DRAWN = ("dropout", "pdrop", "jitter")
"""Parts of the names of a model's settings by which it draws random numbers while it trains."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known on the cluster only: of the nodes where engines run, the least over all. None: not known."""

    host_bytes: int | None = None
    """Memory that is free before the run takes any."""
    shm_bytes: int | None = None
    """Room in /dev/shm."""
    offloads_to_shm: bool = False
    """Whether this vLLM maps its host memory from /dev/shm; otherwise it takes pinned memory."""
    gpu_bytes: int | None = None
    """Memory of a GPU, used or not."""
    model: ModelFiles | str | None = None
    """What the hub says of a model whose files are on no disk yet, or why it says nothing. None: nobody asked."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model with plain attention."""

    kv_bytes_per_token: int
    num_parameters: int
    layers: int = 1
    hidden: int = 1
    vocabulary: int = 1


def pinned_bytes(pool_bytes: int, pieces: int) -> int:
    """Memory that a pool in equal pieces of pinned memory takes: torch rounds each piece up to a power of two.

    >>> pinned_bytes(153 * GIB, pieces=36) // GIB, pinned_bytes(144 * GIB, pieces=36) // GIB
    (288, 144)
    """
    return pieces << (math.ceil(pool_bytes / pieces) - 1).bit_length()


def _largest_power_of_two(at_most: float) -> int:
    return 1 << (int(at_most).bit_length() - 1) if at_most >= 1 else 0


@dataclass(frozen=True, slots=True)
class HostNeed:
    """What `offload_kv` would need on a node, in bytes.

    >>> need = HostNeed(kv_bytes=72 * GIB, state_bytes=20 * GIB, engines=2, pieces=36)
    >>> need.gib_for_each_engine(Machine(host_bytes=200 * GIB)), need.gib_for_each_engine(Machine(host_bytes=160 * GIB))
    (36, 18)
    >>> need.gib_for_each_engine(Machine(host_bytes=40 * GIB)), need.gib_for_each_engine(Machine())
    (0, 0)
    >>> need.suffices_for_more(36), need.suffices_for_more(18)
    (True, False)
    """

    kv_bytes: int
    """KV of all slots of the node, with responses at their limit."""
    state_bytes: int
    """Training state that goes through host memory."""
    engines: int
    """Engines of the node."""
    pieces: int
    """Allocations that a pool of an engine has: one for each layer, on each of its ranks."""

    def gib_for_each_engine(self, machine: Machine) -> int:
        """Largest pool of an engine that its share of the room holds, at most its slots' KV; 0: too little for use."""
        share = self._room(machine) / self.engines
        if not machine.offloads_to_shm:
            # A pool of pieces of this size takes nothing more than its number, and each larger one too much.
            share = self.pieces * _largest_power_of_two(share / self.pieces)
        if share * self.engines < LEAST_OF_NEED * self.kv_bytes:
            return 0
        # Rounded down: the pool is taken whole at the start, and a GiB too much may not be there.
        return int(min(self.whole_gib, share / GIB))

    @property
    def whole_gib(self) -> int:
        """A pool of an engine that holds the KV of all of its slots."""
        return math.ceil(self.kv_bytes / GIB / self.engines)

    def taken_bytes(self, gib_for_each_engine: int) -> int:
        """What pools of this size take of the node's memory where they are pinned memory."""
        return self.engines * pinned_bytes(gib_for_each_engine * GIB, self.pieces)

    def takes(self, gib_for_each_engine: int) -> str:
        """What pools of this size take, in words.

        >>> HostNeed(kv_bytes=153 * GIB, state_bytes=0, engines=1, pieces=36).takes(153)
        '288.0 GiB of a node as pinned memory, whose 36 pieces an engine are rounded up to powers of two'
        """
        taken, pieces = self.taken_bytes(gib_for_each_engine) / GIB, f"{self.pieces} pieces an engine"
        return f"{taken:.1f} GiB of a node as pinned memory, whose {pieces} are rounded up to powers of two"

    def suffices_for_more(self, gib_for_each_engine: float) -> bool:
        """Whether pools of this size hold what more slots and more batches would leave there, too."""
        return gib_for_each_engine * self.engines * GIB >= MORE_OF_NEED * self.kv_bytes

    def _room(self, machine: Machine) -> float:
        if machine.host_bytes is None:
            return 0
        # Half, of /dev/shm too: Ray's object store and weight buffers lie there as well.
        room = KV_SHARE * max(0, machine.host_bytes - self.state_bytes)
        return min(room, KV_SHARE * (machine.shm_bytes or 0)) if machine.offloads_to_shm else room


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """What training needs of each GPU beside an engine that keeps its memory, in bytes.

    >>> need = DeviceNeed(state_bytes=20 * GIB, row_bytes=16 * GIB, row_tokens=8192, engine_share=0.5)
    >>> need.training_bytes // GIB, need.least_bytes // GIB, need.fits(80 * GIB), need.fits(79 * GIB), need.fits(None)
    (40, 80, True, False, False)
    """

    state_bytes: int
    """Weights, gradients and optimizer of the rank, and the layers that it gathers."""
    row_bytes: int
    """Activations and logits of the largest row."""
    row_tokens: int
    engine_share: float
    """Share of the GPU that the engine has: `gpu_memory_utilization`; 0 where engines have GPUs of their own."""

    @property
    def training_bytes(self) -> int:
        """In all."""
        return self.state_bytes + self.row_bytes + OTHER_BYTES

    @property
    def least_bytes(self) -> int:
        """Memory of a GPU that has room for engine and training."""
        return math.ceil(self.training_bytes / (1 - self.engine_share))

    def fits(self, gpu_bytes: int | None) -> bool:
        """Whether a GPU of this size certainly has room."""
        return gpu_bytes is not None and self.least_bytes <= gpu_bytes

    def __str__(self) -> str:
        """The arithmetic in words."""
        engine = (
            f"the engine has {self.engine_share:g} of the GPU (gpu_memory_utilization), so both need a GPU of "
            f"{self.least_bytes / GIB:.0f} GiB, or the engine a lower gpu_memory_utilization"
            if self.engine_share
            else "engines have GPUs of their own"
        )
        return (
            f"training takes {self.training_bytes / GIB:.1f} GiB of each GPU ({self.state_bytes / GIB:.1f} for "
            f"weights, gradients and optimizer, {self.row_bytes / GIB:.1f} for a row of {self.row_tokens:,} tokens, "
            f"{OTHER_BYTES / GIB:.0f} for the rest), {engine}"
        )


def device_need(config: DictConfig, sizes: ModelSizes) -> DeviceNeed | str:
    """What training needs of each GPU, rather too much than too little; or what stands in the way of knowing it."""
    models = config.actor_rollout_ref
    share = models.rollout.gpu_memory_utilization
    tokens = _row_tokens(config)
    # Any unknown number ends the arithmetic: a run that would have run must not run out of memory (docs/design/0010).
    unknown = _uncounted_on_device(config)
    if unknown or tokens is None or not 0 < (share or 0) < 1:
        return unknown or (
            "no size of a micro-batch for each GPU" if tokens is None else f"gpu_memory_utilization={share}"
        )
    sharded = models.actor.fsdp_config
    devices = num_devices(config)
    # verl's -1, like any size that is no part of the devices, shards over all of them.
    shards = sharded.fsdp_size if 0 < (sharded.get("fsdp_size") or 0) < devices else devices
    each = FLOAT_BYTES.get(str(sharded.get("model_dtype")), 2)
    # A reference has weights only.
    copies = TRAINED_COPIES + has_own_reference(config)
    # Two layers, since one is gathered while the one before computes; embedding and head have a row for each word.
    gathered = 2 * sizes.num_parameters // sizes.layers + 2 * sizes.vocabulary * sizes.hidden
    # Fused kernels never have the logits of a whole row.
    logits = 0 if models.model.use_fused_kernels else LOGIT_BYTES * sizes.vocabulary
    of_a_token = 2 * sizes.layers * sizes.hidden + LAYER_BYTES * sizes.hidden + logits
    state = each * (copies * sizes.num_parameters // shards + gathered)
    return DeviceNeed(state, tokens * of_a_token, tokens, 0.0 if has_own_devices(config) else share)


def _uncounted_on_device(config: DictConfig) -> str:
    """What training has on a GPU that the arithmetic does not know; empty if there is nothing."""
    models = config.actor_rollout_ref
    if models.actor.strategy not in PACKED_STRATEGIES:
        return f"actor_rollout_ref.actor.strategy={models.actor.strategy}"
    if not models.model.enable_gradient_checkpointing:
        return "actor_rollout_ref.model.enable_gradient_checkpointing=False"
    return "a critic, whose size is not known" if needs_critic(config) else ""


def _row_tokens(config: DictConfig) -> int | None:
    """Tokens of the largest row that a GPU computes; None if verl's settings do not bound it for each GPU."""
    models, data = config.actor_rollout_ref, config.data
    longest = data.max_prompt_length + data.max_response_length
    if models.actor.use_dynamic_bsz:
        bounds = [models.actor.ppo_max_token_len_per_gpu, models.rollout.log_prob_max_token_len_per_gpu]
    else:
        rows = models.actor.ppo_micro_batch_size_per_gpu
        if rows is None:
            return None
        bounds = [rows * longest]
    # A sample that is longer than the bound is still trained, in a row of its own.
    return max(longest, OmegaConf.select(config, f"{BLOCK}.packing.token_budget") or 0, *bounds)


def engine_weights_bytes(config: DictConfig, sizes: ModelSizes) -> int:
    """Bytes of the model's weights on each GPU of an engine."""
    each = FLOAT_BYTES.get(str(config.actor_rollout_ref.rollout.dtype), 2)
    return each * sizes.num_parameters // devices_of_engine(config)


def host_need(config: DictConfig, num_slots: int, sizes: ModelSizes) -> HostNeed | None:
    """What the slots' KV and the training state need on a node; None if an engine is larger than a node."""
    data, engines = config.data, engine_devices_per_node(config) // devices_of_engine(config)
    if engines < 1:
        return None
    tokens = data.max_prompt_length + data.max_response_length
    # Rounded up for each engine: where slots do not divide, some engine has one more.
    slots = math.ceil(num_slots / num_engines(config)) * engines
    pieces = sizes.layers * config.actor_rollout_ref.rollout.tensor_model_parallel_size
    return HostNeed(slots * tokens * sizes.kv_bytes_per_token, _state_bytes(config, sizes), engines, pieces)


BESIDE = {"reward.reward_model.enable": "a reward model", "distillation.enabled": "a teacher"}
"""Engines beside those of the rollout, which may be on the same nodes."""


def uncounted_state(config: DictConfig) -> str:
    """What training keeps in host memory and `host_need` does not count, in words; empty if there is nothing."""
    if needs_critic(config):
        return "a critic, whose size is not known"
    for key, what in BESIDE.items():
        if OmegaConf.select(config, key):
            return f"{what}, whose memory is not counted"
    is_sharded = config.actor_rollout_ref.actor.strategy in PACKED_STRATEGIES
    roles = ("model", "actor", "ref") if has_own_reference(config) else ("model", "actor")
    offloads = (key for role in roles for key in _offloads(config, f"actor_rollout_ref.{role}"))
    return next((f"{key}=True" for key in offloads if not (is_sharded and key in COUNTED)), "")


def _offloads(config: DictConfig, block: str) -> Iterator[str]:
    """The switches below a block that say that something is offloaded."""
    container: Any = OmegaConf.to_container(OmegaConf.select(config, block))
    for key, _ in leaves(container, f"{block}."):
        if "offload" in key.rpartition(".")[2] and OmegaConf.select(config, key) is True:
            yield key


def _state_bytes(config: DictConfig, sizes: ModelSizes) -> int:
    """Training state on a node, without `uncounted_state`: the actor, and the reference, which FSDP always offloads.

    Without checkpoints and offloading, the actor's weights are read through host memory once.
    """
    models = config.actor_rollout_ref
    sharded = models.actor.get("fsdp_config") or {}
    # A checkpoint takes as much for a while as offloading does for good.
    stays = sharded.get("param_offload") or sharded.get("optimizer_offload")
    bytes_each = STATE_BYTES if may_save(config) or stays else FLOAT_BYTES["float32"]
    state = bytes_each * _copies(config, sharded.get("fsdp_size"))
    if has_own_reference(config):
        state += FLOAT_BYTES["float32"] * _copies(config, (models.ref.get("fsdp_config") or {}).get("fsdp_size"))
    return math.ceil(state * sizes.num_parameters)


def checkpoint_bytes(config: DictConfig) -> int | None:
    """About what a checkpoint has, and what it takes of host memory while it is written; None: not known.

    A critic counts as large as the actor. Of a LoRA model all weights are saved, and moments of the adapter only.
    """
    sizes = model_sizes(config)
    if isinstance(sizes, str):
        return None
    has_adapter = any(OmegaConf.select(config, f"actor_rollout_ref.{key}") for key in ADAPTER_RANKS)
    each = FLOAT_BYTES["float32"] if has_adapter else STATE_BYTES
    return each * sizes.num_parameters * (2 if needs_critic(config) else 1)


def _copies(config: DictConfig, shards: int | None) -> float:
    """How many copies of a sharded model a node holds; `shards` is verl's `fsdp_size`, -1 for all devices."""
    whole = num_devices(config)
    return config.trainer.n_gpus_per_node / (shards if shards and 0 < shards < whole else whole)


def model_sizes(config: DictConfig, from_hub: ModelFiles | str | None = None) -> ModelSizes | str:
    """Sizes of the configuration's model, or why they are not known.

    They are those of its files; `from_hub` says what the hub tells of a model that is not downloaded.
    """
    path = str(config.actor_rollout_ref.model.path)
    folder = _model_folder(path)
    if folder is None and not isinstance(from_hub, ModelFiles):
        return from_hub or f"the files of the model {path} are not on this machine"
    files = _read_files(folder) if folder is not None else from_hub
    model, num_bytes = (files.config, files.num_bytes) if isinstance(files, ModelFiles) else ({}, 0)
    if not num_bytes:
        return f"the folder of the model {path} has no config.json with *.safetensors beside it"
    if not is_plain(model):
        return f"the model {path} is not one with the same plain attention in each layer"
    weights = str(model.get("dtype") or model.get("torch_dtype") or "")
    num_parameters = num_bytes // FLOAT_BYTES.get(weights, 2)
    rollout = config.actor_rollout_ref.rollout
    kv_bytes = _kv_bytes(model, str(rollout.dtype), rollout.tensor_model_parallel_size)
    return ModelSizes(
        kv_bytes, num_parameters, *(model[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
    )


def _read_files(folder: Path) -> ModelFiles | None:
    try:
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return ModelFiles(model, sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    except (OSError, ValueError):
        return None


def trains_as_it_computes(config: DictConfig, ask: AskHub | None = None) -> bool:
    """Whether an update computes the same log-probs as a pass before it: no dropout, and no noise in a router.

    `ask` is asked for a model of the hub that is not downloaded yet. False where nobody knows.
    """
    path = str(config.actor_rollout_ref.model.path)
    if ask is not None and awaits_hub(config):
        files = ask(path)
    else:
        folder = _model_folder(path)
        files = None if folder is None else _read_files(folder)
    if not isinstance(files, ModelFiles):
        return False
    if files.config.get("auto_map") and config.actor_rollout_ref.model.trust_remote_code:
        return False  # the model's own code, which may draw numbers under any name
    given = OmegaConf.select(config, "actor_rollout_ref.model.override_config") or {}
    changed: Any = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
    found = dict(leaves(files.config)) | dict(leaves(changed))
    drawn = (value for name, value in found.items() if any(word in name for word in DRAWN))
    return not any(isinstance(value, int | float) and value > 0 for value in drawn)


def awaits_hub(config: DictConfig) -> bool:
    """Whether the hub can be asked for the sizes of the configuration's model, whose files are not here yet."""
    path = str(config.actor_rollout_ref.model.path)
    return HUB_NAME.fullmatch(path) is not None and not hub_is_off() and _model_folder(path) is None


def _model_folder(path: str) -> Path | None:
    """The folder with the model's files: a local one, or that of a model of the hub which was downloaded before."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    folder = Path(found).parent if isinstance(found, str) else None
    # A tokenizer alone brings the configuration as well.
    return folder if folder is not None and any(folder.glob("*.safetensors")) else None


def is_plain(model: Mapping[str, Any]) -> bool:
    """Whether a model, by its `config.json`, is known to have the same KV for each token in all layers."""
    # Qwen's files have a window's size beside the switch that turns it off.
    windows = bool(model.get("use_sliding_window", model.get("sliding_window")))
    others = set(model.get("layer_types") or ()) - {"full_attention"}
    known = all(isinstance(model.get(name), int) for name in SIZES)
    return model.get("model_type") in PLAIN_ATTENTION and known and not windows and not others


def _kv_bytes(model: Mapping[str, Any], dtype: str, ranks: int) -> int:
    """KV of a token, over all tensor-parallel ranks of an engine: a rank has at least one head, a copy if need be."""
    layers, heads, hidden, _ = (model[name] for name in SIZES)
    head_dim = model.get("head_dim") or hidden // heads
    kv_heads = max(model.get("num_key_value_heads") or heads, ranks)
    return 2 * layers * kv_heads * head_dim * FLOAT_BYTES.get(dtype, 2)


def memory_in_words(config: DictConfig, num_slots: int) -> str:
    """What is known of the memory that a configuration needs, for somebody who has not started it."""
    sizes = model_sizes(config)
    if isinstance(sizes, str):
        ask = "; the run asks the hub when it starts. To know it here, download the model, or give a folder"
        return f"not known: {sizes}{ask if awaits_hub(config) else ''}"
    engines = num_engines(config)
    tokens = config.data.max_prompt_length + config.data.max_response_length
    slots = math.ceil(num_slots / engines)
    kv = slots * tokens * sizes.kv_bytes_per_token
    parts = [
        f"weights: {engine_weights_bytes(config, sizes) / GIB:.1f} GiB of each GPU of an engine",
        f"KV in flight, all responses at their limit: {slots} responses x {tokens:,} tokens x "
        f"{sizes.kv_bytes_per_token:,} bytes = {kv / GIB:.1f} GiB in each of {engines} engines",
    ]
    if has_own_devices(config):
        parts.insert(0, f"GPUs: {num_devices(config)} of training, {num_rollout_devices(config)} of engines alone")
    size, need = OmegaConf.select(config, f"{BLOCK}.tail.offload_gib"), host_need(config, num_slots, sizes)
    if size is not None and need is not None:
        parts.append(f"host memory: tail.offload_gib={size} takes {need.takes(size)}")
    training = device_need(config, sizes)
    told = training if isinstance(training, DeviceNeed) else f"training: not known ({training})"
    return "; ".join([*parts, str(told)])
