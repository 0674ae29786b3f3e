"""What `auto` takes, what it does not take, and that a value set by hand stays."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import huggingface_hub
import pytest
from omegaconf import OmegaConf

from partial_rollout.settings.auto import choose, is_corrected, propose, take_on_cluster
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.settings.by_hand import ByHand
from partial_rollout.settings.derived import read_settings
from partial_rollout.settings.flag import PACKED_ATTENTION_MODULE
from partial_rollout.settings.hub import ask_hub
from partial_rollout.settings.memory import (
    GIB,
    OTHER_BYTES,
    DeviceNeed,
    HostNeed,
    Machine,
    ModelSizes,
    device_need,
    host_need,
    memory_in_words,
    model_sizes,
    pinned_bytes,
    uncounted_state,
)
from partial_rollout.settings.prepare import examine
from partial_rollout.settings.retention import may_save, num_kept_checkpoints, saves_by_time

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from omegaconf import DictConfig

    from partial_rollout.settings.auto import Choice
    from partial_rollout.settings.hub import AskHub
    from tests.unit.settings.support import Composed

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
TAIL = "partial_rollout.tail"
MODE = f"{TAIL}.interrupt_mode"
DEPTH, SLOTS = "partial_rollout.prefetch_factor", "partial_rollout.slots.adaptive"
GPU = {"trainer.device": "cuda", f"{ROLLOUT}.free_cache_engine": True, f"{ROLLOUT}.enable_sleep_mode": True}
"""Settings as verl's defaults have them: engines release their memory each step."""
OFFLOADING = {**GPU, "partial_rollout.tail.offload_gib": 8}
LARGE, SMALL = Machine(host_bytes=512 * GIB), Machine(host_bytes=GIB // 2)


def chosen(config: DictConfig, key: str, given: Sequence[str] = (), machine: Machine | None = None) -> list[Choice]:
    """The choices of one key."""
    return [choice for choice in choose(config, ByHand.read(given), machine) if choice.key == key]


def value(config: DictConfig, key: str, given: Sequence[str] = (), machine: Machine | None = None) -> Any:
    (choice,) = chosen(config, key, given, machine)
    return choice.value


def started(config: DictConfig, given: Sequence[str] = (), ask: AskHub | None = None) -> PartialRolloutConfig:
    """What a server is told after a start without open choices."""
    OmegaConf.update(config, "async_training.partial_rollout", True, force_add=True)
    examined = examine(config, ByHand.read(given), ask)
    assert not examined.refusals
    return PartialRolloutConfig.from_rollout(config.actor_rollout_ref.rollout.custom)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of Qwen3-0.6B's shape on disk, of 1.2 billion bytes as far as its files say."""
    sizes = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = {"model_type": "qwen3", "hidden_size": 1024, "dtype": "bfloat16", "sliding_window": None, **sizes}
    config["vocab_size"] = 151_936
    (tmp_path / "config.json").write_text(json.dumps({**config, "use_sliding_window": False}))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1_200_000_000)  # sparse
    return tmp_path


# ---- interrupt mode ----


def test_engines_that_keep_their_memory_keep_the_kv_too(composed: Composed):
    config = composed({})
    assert value(config, MODE) == "reuse_kv"
    assert started(config).tail.interrupt_mode == "reuse_kv"


@pytest.mark.parametrize(
    "changes",
    [
        {f"{ROLLOUT}.data_parallel_size": 2, "trainer.n_gpus_per_node": 2},
        {f"{ROLLOUT}.enable_prefix_caching": False},
        {f"{ROLLOUT}.enable_rollout_routing_replay": True},
        {f"{ROLLOUT}.mtp.enable_rollout": True},
        {f"{ROLLOUT}.disaggregation.enabled": True},
        {f"{ROLLOUT}.engine_kwargs.vllm.kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}},
        {f"{ROLLOUT}.engine_kwargs.vllm.kv_offloading_size": 4},
        {f"{ROLLOUT}.engine_kwargs.vllm.no_enable_prefix_caching": True},
        {f"{TAIL}.policy": "wait"},
    ],
)
def test_what_rules_retained_kv_out_leaves_abort(composed: Composed, changes: dict[str, Any]):
    config = composed(changes)
    (choice,) = chosen(config, MODE)
    (key, set_to), *_ = changes.items()
    assert choice.value == "abort"
    assert f"{key}={set_to}" in choice.seen
    assert started(config).tail.interrupt_mode == "abort"


@pytest.mark.parametrize(
    ("mode", "machine"), [("abort", {}), ("keep_kv", {}), ("offload_kv", OFFLOADING), ("abort", GPU)]
)
def test_an_interrupt_mode_set_by_hand_stays(composed: Composed, mode: str, machine: dict[str, Any]):
    config = composed({MODE: mode, **machine})
    assert chosen(config, MODE) == []
    assert started(config).tail.interrupt_mode == mode


def test_kv_goes_to_host_memory_where_there_is_room(composed: Composed, model: Path):
    config = composed(GPU | {"actor_rollout_ref.model.path": str(model), "data.max_response_length": 4096})
    assert value(config, MODE) == "auto"  # before the start nobody knows the nodes
    assert started(config).tail.interrupt_mode == "auto"
    mode, size, *_ = take_on_cluster(config, LARGE)
    # 64 slots x (32 + 4,096) tokens x 2 x 28 layers x 8 heads x 128 x 4 bytes of float32 are 56.4 GiB.
    assert (mode.value, size.value) == ("offload_kv", 57)
    assert "56.4 GiB" in mode.seen
    tail = read_settings(config).block.tail
    assert (tail.interrupt_mode, tail.offload_gib) == ("offload_kv", 57)


@pytest.mark.parametrize(("gib", "rises"), [(34, True), (33, False)])  # 0.6 of 56.4 are 33.9
def test_depth_and_slots_do_not_rise_where_host_memory_is_filled_by_two_batches(
    composed: Composed, model: Path, gib: int, rises: bool
):
    long = {"actor_rollout_ref.model.path": str(model), "data.max_response_length": 4096}
    by_hand = composed(GPU | long | {f"{TAIL}.offload_gib": gib})
    block = started(by_hand)
    assert (block.prefetch_factor, block.slots.adaptive) == (("auto", True) if rises else (2.0, False))
    by_itself = composed(GPU | long)
    started(by_itself)
    # Training takes 8 GiB, and half of the rest is for KV, of which a file takes its number and not more.
    machine = Machine(host_bytes=int((2 * gib + 8.5) * GIB), shm_bytes=512 * GIB, offloads_to_shm=True)
    choices = {choice.key: choice for choice in take_on_cluster(by_itself, machine)}
    assert choices[f"{TAIL}.offload_gib"].value == gib
    block = read_settings(by_itself).block
    assert (block.prefetch_factor, block.slots.adaptive) == (("auto", True) if rises else (2.0, False))
    if not rises:
        assert f"offload_gib={gib}, while the KV of all slots of a node needs 56.4 GiB" in choices[SLOTS].seen
        assert "a larger" in choices[DEPTH].why


def test_a_depth_set_by_hand_stays_where_host_memory_is_small(composed: Composed, model: Path):
    long = {"actor_rollout_ref.model.path": str(model), "data.max_response_length": 4096}
    deep = {f"{TAIL}.offload_gib": 20, "partial_rollout.prefetch_factor": 3.0, "partial_rollout.slots.adaptive": True}
    block = started(composed(GPU | long | deep))
    assert (block.prefetch_factor, block.slots.adaptive) == (3.0, True)


def test_where_host_memory_is_short_the_size_is_half_of_what_training_leaves(composed: Composed, model: Path):
    config = composed(GPU | {"actor_rollout_ref.model.path": str(model), "data.max_response_length": 4096})
    # 0.6 billion parameters x 12 bytes are 6.7 GiB, which a checkpoint brings into host memory.
    mapped = Machine(shm_bytes=512 * GIB, offloads_to_shm=True)
    sizes = {gib: value_of_size(config, replace(mapped, host_bytes=gib * GIB)) for gib in (120, 60, 36, 34)}
    assert sizes == {120: 56, 60: 26, 36: 14, 34: None}
    # 28 pieces of pinned memory: of 1 GiB, of 2 GiB, and of 2.04 GiB, which take 4 each. 14 GiB are too little for use.
    sizes = {gib: value_of_size(config, Machine(host_bytes=gib * GIB)) for gib in (62, 63, 118, 119, 230, 231)}
    assert sizes == {62: None, 63: 28, 118: 28, 119: 56, 230: 56, 231: 57}


@pytest.mark.parametrize(
    ("gib", "pieces", "taken"),
    [
        (153, 36, 288),  # measured: about 290 (docs/results/gpu.md)
        (144, 36, 144),
        (145, 36, 288),
        (72, 36, 72),
        (43, 36, 72),
        (57, 28, 112),
        (56, 28, 56),
        (153, 2 * 36, 288),  # two ranks of 36 layers each: pieces of 2.1 GiB
        (1, 28, 1.75),  # 36.6 MiB
        (1, 1, 1),
    ],
)
def test_a_piece_of_pinned_memory_takes_the_next_power_of_two(gib: int, pieces: int, taken: float):
    assert pinned_bytes(gib * GIB, pieces) == taken * GIB


@pytest.mark.parametrize(
    ("kv_gib", "room_gib", "engines", "pieces", "pool", "taken"),
    [
        (153, 216, 1, 36, 144, 144),  # the measured job: 462 GiB free, 31 of them for training
        (153, 288, 1, 36, 153, 288),
        (153, 287, 1, 36, 144, 144),
        (153, 143, 1, 36, 72, 72),
        (153, 72, 1, 36, 72, 72),
        (153, 71, 1, 36, 0, 0),  # 36 GiB are less than a quarter
        (144, 144, 1, 36, 144, 144),
        (100, 120, 1, 36, 72, 72),
        (153, 216, 2, 36, 72, 144),  # pieces of 2 GiB, two engines
        (153, 216, 1, 72, 144, 144),  # two ranks of 36 layers: pieces of 2 GiB
        (30, 20, 4, 28, 3, 14),  # 3.5 GiB are 28 pieces of 128 MiB; the number is whole
        (1, 8, 1, 28, 1, 1.75),
    ],
)
def test_auto_takes_the_largest_pool_that_fits_with_all_that_it_takes(
    *, kv_gib: int, room_gib: int, engines: int, pieces: int, pool: int, taken: float
):
    need = HostNeed(kv_gib * GIB, state_bytes=31 * GIB, engines=engines, pieces=pieces)
    found = need.gib_for_each_engine(Machine(host_bytes=(2 * room_gib + 31) * GIB))
    assert found == pool
    assert not found or need.taken_bytes(found) == taken * GIB
    assert all(need.taken_bytes(gib) > room_gib * GIB for gib in range(found + 1, need.whole_gib + 1) if found)


def test_what_a_pool_takes_is_told(composed: Composed, model: Path):
    long = GPU | {"actor_rollout_ref.model.path": str(model), "data.max_response_length": 4096}
    takes = "112.0 GiB of a node as pinned memory, whose 28 pieces an engine are rounded up to powers of two"
    (mode,) = chosen(composed(long), MODE)
    assert f"a pool of 57 GiB an engine, which holds all of it, takes {takes}" in mode.seen
    (size,) = chosen(composed(long), f"{TAIL}.offload_gib", machine=LARGE)
    assert f"it takes {takes}" in size.why
    mapped = replace(LARGE, shm_bytes=512 * GIB, offloads_to_shm=True)
    (size,) = chosen(composed(long), f"{TAIL}.offload_gib", machine=mapped)
    assert "pinned" not in size.why
    by_hand = composed(long | {f"{TAIL}.offload_gib": 57})
    (mode,) = chosen(by_hand, MODE)
    assert f"{TAIL}.offload_gib=57, which takes {takes}" in mode.seen
    assert f"host memory: tail.offload_gib=57 takes {takes}" in memory_in_words(by_hand, 64)
    assert "host memory" not in memory_in_words(composed(long), 64)


NAME = "some/model"


@pytest.fixture
def hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub with the model under the name NAME; what it was asked for."""
    asked: list[str] = []

    def model_info(name: str, **_options: object) -> SimpleNamespace:
        asked.append(name)
        sizes = {"model.safetensors": 1_200_000_000, "onnx/model.safetensors": 7, "config.json": 7}
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=sizes[name]) for name in sizes])

    def download(_name: str, file: str, **_options: object) -> str:
        asked.append(file)
        return str(model / file)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


@pytest.mark.parametrize("keep", [False, True])
def test_a_model_that_is_not_downloaded_is_decided_on_as_one_that_is(
    composed: Composed, model: Path, hub: list[str], *, keep: bool
):
    changes = GPU | (ROOMY if keep else {}) | {"data.max_response_length": 4096}
    local, remote = (composed(changes | {"actor_rollout_ref.model.path": path}) for path in (str(model), NAME))
    assert value(remote, MODE) == "auto"
    assert started(remote).tail.interrupt_mode == "auto"
    assert hub == []  # before the start nobody asks
    started(local)
    machine = Machine(host_bytes=512 * GIB, gpu_bytes=512 * GIB)
    decided = take_on_cluster(remote, replace(machine, model=ask_hub(NAME)))
    assert hub == [NAME, "config.json"]
    assert decided == take_on_cluster(local, machine)
    assert read_settings(remote).block.tail.interrupt_mode == ("reuse_kv" if keep else "offload_kv")


def unreachable(*_names: object, **_options: object) -> None:
    """Stands for `model_info` on a machine without a way to the hub."""
    raise httpx.ConnectError("no route")


def test_without_an_answer_of_the_hub_kv_is_computed_again_and_the_reason_is_told(
    composed: Composed, hub: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    config = composed(GPU | {"actor_rollout_ref.model.path": NAME})
    (choice,) = chosen(config, MODE, machine=replace(LARGE, model=ask_hub(NAME)))
    assert choice.value == "abort"
    assert "the hub did not tell the sizes of the model some/model (ConnectError: no route)" in choice.seen


def test_a_hub_that_hangs_makes_nobody_wait(hub: list[str], monkeypatch: pytest.MonkeyPatch):
    ended = threading.Event()

    def hang(*_names: object, **_options: object) -> None:
        ended.wait()
        raise OSError("too late")

    monkeypatch.setattr(huggingface_hub, "model_info", hang)
    try:
        assert ask_hub(NAME, timeout_s=0.01) == "the hub did not tell the sizes of the model some/model within 0.01 s"
    finally:
        ended.set()


@pytest.mark.parametrize(
    ("path", "offline", "asks"),
    [(NAME, "", True), (NAME, "1", False), ("/no/folder", "", False), ("hdfs://no/folder", "", False)],
)
def test_only_a_name_of_the_hub_is_left_open_and_only_where_the_hub_may_be_asked(
    composed: Composed, hub: list[str], monkeypatch: pytest.MonkeyPatch, path: str, offline: str, *, asks: bool
):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    config = composed(GPU | {"actor_rollout_ref.model.path": path})
    assert value(config, MODE) == ("auto" if asks else "abort")
    assert ("the run asks the hub when it starts" in memory_in_words(config, 64)) == asks
    assert hub == []


SAVE = "partial_rollout.save_minutes"
NODES = {
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 2,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    "trainer.save_freq": -1,
}


@pytest.mark.parametrize(
    ("changes", "bytes_each"),
    [
        ({}, 4 / 2),
        ({"trainer.save_freq": 1}, 12 / 2),
        ({SAVE: "auto"}, 12 / 2),
        ({f"{ACTOR}.fsdp_config.optimizer_offload": True}, 12 / 2),
        ({f"{ACTOR}.fsdp_config.optimizer_offload": True, f"{ACTOR}.fsdp_config.fsdp_size": 4}, 12 * 2),
        ({f"{ACTOR}.use_kl_loss": True}, 4 / 2 + 4 / 2),
        ({f"{ACTOR}.use_kl_loss": True, f"{REF}.fsdp_config.fsdp_size": 8}, 4 / 2 + 4),
        ({f"{ACTOR}.use_kl_loss": True, "actor_rollout_ref.model.lora_rank": 8}, 4 / 2),
    ],
)
def test_a_node_needs_memory_for_its_engines_slots_and_its_part_of_the_training_state(
    composed: Composed, changes: dict[str, Any], bytes_each: float
):
    config = composed(GPU | NODES | {"data.max_response_length": 4096, SAVE: None} | changes)
    sizes = ModelSizes(kv_bytes_per_token=1000, num_parameters=1_000_000, layers=3)
    need = host_need(config, 64, sizes)
    kv_bytes, state_bytes = 32 * (32 + 4096) * 1000, int(bytes_each * 1_000_000)
    assert need == HostNeed(kv_bytes, state_bytes, engines=4, pieces=2 * 3)  # two ranks
    assert uncounted_state(config) == ""


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (8, 8), (16, 16)])
def test_each_tensor_parallel_rank_has_a_head_of_kv(composed: Composed, model: Path, ranks: int, heads: int):
    here = {"actor_rollout_ref.model.path": str(model), f"{ROLLOUT}.tensor_model_parallel_size": ranks}
    sizes = model_sizes(composed(here))
    assert isinstance(sizes, ModelSizes)
    assert sizes.kv_bytes_per_token == 2 * 28 * heads * 128 * 4


def value_of_size(config: DictConfig, machine: Machine) -> int | None:
    return next((choice.value for choice in chosen(config, f"{TAIL}.offload_gib", machine=machine)), None)


@pytest.mark.parametrize(
    ("changes", "machine", "seen"),
    [
        ({}, SMALL, "0.5 GiB"),
        ({}, Machine(), "unknown"),
        ({}, Machine(host_bytes=512 * GIB, shm_bytes=GIB, offloads_to_shm=True), "/dev/shm 1.0 GiB"),
        ({"trainer.device": "cpu"}, LARGE, "trainer.device=cpu"),
        ({f"{ROLLOUT}.enable_rollout_routing_replay": True}, LARGE, "routing_replay=True"),
        ({f"{ROLLOUT}.data_parallel_size": 2}, LARGE, "data_parallel_size=2"),
        ({f"{ROLLOUT}.engine_kwargs.vllm.kv_transfer_config": {"a": 1}}, LARGE, "kv_transfer_config="),
        ({f"{ROLLOUT}.engine_kwargs.vllm.kv_offloading_size": 4}, LARGE, "kv_offloading_size=4"),
        ({"actor_rollout_ref.model.lora_rank": 8}, LARGE, "lora_rank=8"),
        ({"actor_rollout_ref.model.lora_adapter_path": "here"}, LARGE, "lora_adapter_path=here"),
        ({f"{ROLLOUT}.pipeline_model_parallel_size": 2}, LARGE, "pipeline_model_parallel_size=2"),
        ({f"{ROLLOUT}.expert_parallel_size": 2}, LARGE, "expert_parallel_size=2"),
        ({f"{ROLLOUT}.quantization": "fp8"}, LARGE, "quantization=fp8"),
        ({f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype": "fp8"}, LARGE, "kv_cache_dtype=fp8"),
        ({f"{ROLLOUT}.engine_kwargs.vllm.speculative_config": {"a": 1}}, LARGE, "speculative_config="),
        ({f"{ROLLOUT}.engine_kwargs.vllm.cpu_offload_gb": 20}, LARGE, "cpu_offload_gb=20"),
        ({f"{ROLLOUT}.engine_kwargs.vllm.swap_space": 16}, LARGE, "swap_space=16"),
        ({"reward.reward_model.enable": True}, LARGE, "a reward model"),
        ({"distillation.enabled": True}, LARGE, "a teacher"),
        ({f"{ROLLOUT}.enable_sleep_mode": False}, LARGE, "enable_sleep_mode=False"),
        ({f"{TAIL}.policy": "reorder"}, LARGE, "policy=reorder"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, LARGE, "an engine of 2 devices on nodes with"),
        ({"algorithm.adv_estimator": "gae"}, LARGE, "a critic"),
        ({"critic.enable": True}, LARGE, "a critic"),
        ({f"{ACTOR}.fsdp_config.offload_policy": True}, LARGE, "fsdp_config.offload_policy=True"),
        ({f"{ACTOR}.use_kl_loss": True, f"{REF}.fsdp_config.offload_policy": True}, LARGE, "ref.fsdp_config.offload_"),
        ({f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.param_offload": True}, LARGE, "megatron.param_offload"),
        ({f"{ACTOR}.strategy": "veomni", f"{ACTOR}.veomni.enable_fsdp_offload": True}, LARGE, "enable_fsdp_offload"),
        ({"actor_rollout_ref.model.enable_activation_offload": True}, LARGE, "enable_activation_offload=True"),
        ({"actor_rollout_ref.model.path": "unknown/model"}, LARGE, "unknown/model are not on this machine"),
    ],
)
def test_kv_is_computed_again_where_host_memory_is_not_there_for_certain(
    composed: Composed, model: Path, changes: dict[str, Any], machine: Machine, seen: str
):
    here = GPU | {"actor_rollout_ref.model.path": str(model), "data.max_response_length": 4096} | changes
    (choice,) = chosen(composed(here), MODE, machine=machine)
    assert choice.value == "abort"
    assert seen in choice.seen


@pytest.mark.parametrize("window", [{"model_type": "gemma3"}, {"sliding_window": 4096, "use_sliding_window": True}])
def test_a_model_whose_layers_differ_has_unknown_kv(composed: Composed, model: Path, window: dict[str, Any]):
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | window))
    config = composed(GPU | {"actor_rollout_ref.model.path": str(model)})
    assert value(config, MODE, machine=LARGE) == "abort"


def test_a_size_set_by_hand_is_taken_without_arithmetic_and_refused_where_it_has_no_use(composed: Composed):
    size = {f"{TAIL}.offload_gib": 48}
    offloading = composed(GPU | size)
    tail = started(offloading).tail
    assert (tail.interrupt_mode, tail.offload_gib) == ("offload_kv", 48)
    keeping = composed(size)
    OmegaConf.update(keeping, "async_training.partial_rollout", True, force_add=True)
    examined = examine(keeping, ByHand.read([f"{TAIL}.offload_gib=48"]))
    (refusal,) = examined.refusals
    assert "offload_gib=48 (set on the command line)" in str(refusal)
    assert "interrupt_mode=reuse_kv, which was chosen" in str(refusal)
    assert keeping.partial_rollout.tail.offload_gib == 48


# ---- the engine's memory ----

KEEP, RELEASE = f"{TAIL}.keep_engine_memory", f"{ROLLOUT}.free_cache_engine"
ROOMY = {
    KEEP: True,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
}
"""Changes of the quickstart's settings: training needs some 22 GiB of the model below, so both need 44."""


def on_gpus(composed: Composed, model: Path, changes: dict[str, Any]) -> DictConfig:
    return composed(GPU | {"actor_rollout_ref.model.path": str(model)} | changes)


def test_engines_keep_their_memory_where_the_key_asks_for_it_and_gpus_have_room(composed: Composed, model: Path):
    config = on_gpus(composed, model, ROOMY)
    assert started(config).tail.interrupt_mode == "auto"  # before the start nobody knows the GPUs
    assert config.actor_rollout_ref.rollout.free_cache_engine is True
    memory, mode, *_ = take_on_cluster(config, Machine(gpu_bytes=80 * GIB))
    assert (memory.key, memory.value, mode.value) == (RELEASE, False, "reuse_kv")
    assert "the smallest GPU has 80 GiB" in memory.seen
    assert config.actor_rollout_ref.rollout.free_cache_engine is False
    assert PartialRolloutConfig.from_rollout(config.actor_rollout_ref.rollout.custom).tail.interrupt_mode == "reuse_kv"
    assert read_settings(config).block.slots.adaptive is True


@pytest.mark.parametrize(
    ("changes", "machine", "seen"),
    [
        ({}, Machine(512 * GIB, gpu_bytes=24 * GIB), "the smallest GPU has 24 GiB"),
        ({}, Machine(512 * GIB), "the smallest GPU has unknown"),
        ({f"{ROLLOUT}.data_parallel_size": 2}, Machine(512 * GIB, gpu_bytes=512 * GIB), "data_parallel_size=2"),
        ({"algorithm.adv_estimator": "gae"}, Machine(512 * GIB, gpu_bytes=512 * GIB), "a critic"),
        ({"actor_rollout_ref.model.path": "no/model"}, Machine(512 * GIB, gpu_bytes=512 * GIB), "not on this machine"),
        ({f"{ACTOR}.strategy": "megatron"}, Machine(512 * GIB, gpu_bytes=512 * GIB), "strategy=megatron"),
    ],
)
def test_engines_release_their_memory_where_it_is_not_certain_that_both_fit(
    composed: Composed, model: Path, changes: dict[str, Any], machine: Machine, seen: str
):
    config = on_gpus(composed, model, ROOMY | changes)
    (memory,) = chosen(config, RELEASE, machine=machine)
    assert memory.value is True
    assert seen in memory.seen
    # The interrupt mode is the same as without the key.
    without = on_gpus(composed, model, ROOMY | changes | {KEEP: False})
    assert value(config, MODE, machine=machine) == value(without, MODE, machine=machine)


def test_without_the_key_kept_memory_is_proposed_with_the_numbers_and_not_taken(composed: Composed, model: Path):
    config = on_gpus(composed, model, ROOMY | {KEEP: False})
    (proposal,) = propose(config)
    need = device_need(config, model_sizes(config))  # type: ignore[arg-type]
    assert isinstance(need, DeviceNeed)
    assert proposal.what == f"{KEEP}=True"
    assert f"both need a GPU of {need.least_bytes / GIB:.0f} GiB" in proposal.price
    started(config)
    take_on_cluster(config, Machine(512 * GIB, gpu_bytes=512 * GIB))
    assert config.actor_rollout_ref.rollout.free_cache_engine is True


@pytest.mark.parametrize(
    "changes",
    [
        {KEEP: True},
        {RELEASE: False},
        {MODE: "abort"},
        {f"{TAIL}.policy": "wait"},
        {"trainer.device": "cpu"},
        {f"{ROLLOUT}.data_parallel_size": 2},
        {"actor_rollout_ref.model.path": "no/model"},
    ],
)
def test_nothing_is_proposed_that_is_done_or_cannot_be_counted(
    composed: Composed, model: Path, changes: dict[str, Any]
):
    assert list(propose(on_gpus(composed, model, ROOMY | {KEEP: False} | changes))) == []


@pytest.mark.parametrize(
    ("changes", "given", "why"),
    [
        ({RELEASE: True}, f"{RELEASE}=True", "which is the opposite"),
        ({MODE: "abort"}, f"{MODE}=abort", "only auto reads it"),
        ({f"{TAIL}.policy": "wait"}, f"{TAIL}.policy=wait", "interrupts nothing"),
    ],
)
def test_the_key_for_kept_memory_is_refused_beside_what_decides_it(
    composed: Composed, model: Path, changes: dict[str, Any], given: str, why: str
):
    config = on_gpus(composed, model, ROOMY | changes)
    OmegaConf.update(config, "async_training.partial_rollout", True, force_add=True)
    (refusal,) = examine(config, ByHand.read([f"{KEEP}=true", given])).refusals
    assert f"{KEEP}=True (set on the command line)" in str(refusal)
    assert why in str(refusal)


@pytest.mark.parametrize(
    ("changes", "state", "row", "tokens"),
    [
        ({}, 4 * 4 * 10_000, 10 * (2 * 4 * 8 + 100 * 8), 10),
        ({f"{ACTOR}.fsdp_config.model_dtype": "bfloat16"}, 2 * 4 * 10_000, 10 * (2 * 4 * 8 + 100 * 8), 10),
        ({f"{ACTOR}.use_kl_loss": True}, 4 * 5 * 10_000, 10 * (2 * 4 * 8 + 100 * 8), 10),
        ({"trainer.n_gpus_per_node": 8}, 4 * 4 * 10_000 // 8, 10 * (2 * 4 * 8 + 100 * 8), 10),
        ({"actor_rollout_ref.model.use_fused_kernels": False}, 4 * 4 * 10_000, 10 * (2 * 4 * 8 + 100 * 8 + 10 * 3), 10),
        ({f"{ACTOR}.ppo_max_token_len_per_gpu": 5}, 4 * 4 * 10_000, 8 * (2 * 4 * 8 + 100 * 8), 8),
        ({"partial_rollout.packing.token_budget": 20}, 4 * 4 * 10_000, 20 * (2 * 4 * 8 + 100 * 8), 20),
        (
            {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2},
            4 * 4 * 10_000, 16 * (2 * 4 * 8 + 100 * 8), 16,
        ),
    ],
)  # fmt: skip
def test_training_needs_its_state_and_its_largest_row_on_a_gpu(
    composed: Composed, changes: dict[str, Any], state: int, row: int, tokens: int
):
    base = {
        f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 10,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 5, "data.max_prompt_length": 3, "data.max_response_length": 5,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        "actor_rollout_ref.model.use_fused_kernels": True, f"{ROLLOUT}.gpu_memory_utilization": 0.75,
    }  # fmt: skip
    sizes = ModelSizes(kv_bytes_per_token=1, num_parameters=10_000, layers=4, hidden=8, vocabulary=3)
    need = device_need(composed(GPU | base | changes), sizes)
    assert isinstance(need, DeviceNeed)
    each = 2 if "model_dtype" in str(changes) else 4
    assert need.state_bytes == state + each * (
        2 * 10_000 // 4 + 2 * 3 * 8
    )  # two layers and the embeddings are gathered
    assert (need.row_bytes, need.row_tokens) == (row, tokens)
    assert need.least_bytes == 4 * (need.state_bytes + row + OTHER_BYTES)


@pytest.mark.parametrize("changes", [{f"{ACTOR}.fsdp_config.model_dtype": "bfloat16"}, {"trainer.n_gpus_per_node": 2}])
def test_jobs_that_ran_with_the_engines_memory_kept_are_allowed(composed: Composed, changes: dict[str, Any]):
    """Qwen3-4B on H200s of 140 GiB: 0.4 of each for the engine, rows of 12,288 tokens (docs/results/gpu.md)."""
    base = {
        f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 12_288,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 12_288, f"{ROLLOUT}.gpu_memory_utilization": 0.4,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    }  # fmt: skip
    sizes = ModelSizes(147_456, num_parameters=4_020_000_000, layers=36, hidden=2560, vocabulary=151_936)
    need = device_need(composed(GPU | base | changes), sizes)
    assert isinstance(need, DeviceNeed)
    assert need.fits(140 * GIB)
    assert not need.fits(80 * GIB)


# ---- depth ----


@pytest.mark.parametrize(
    ("changes", "depth", "why"),
    [
        ({}, 2.0, "up to 3 while slots idle"),
        ({MODE: "abort"}, 2.0, "would only make tokens older"),
        ({f"{TAIL}.max_staleness": 1}, 2.0, "the bound on staleness allows no more"),
        ({f"{TAIL}.max_staleness": 0, f"{TAIL}.past_staleness": "finish"}, 1.0, "the bound on staleness"),
    ],
)
def test_two_batches_are_in_flight_and_no_more_than_the_bound_on_staleness_allows(
    composed: Composed, changes: dict[str, Any], depth: float, why: str
):
    config = composed(changes)
    (choice,) = chosen(config, "partial_rollout.prefetch_factor")
    assert choice.value == depth
    assert why in choice.why
    assert started(config).capacity(8) == depth * 8


def test_a_depth_set_by_hand_stays(composed: Composed):
    config = composed({"partial_rollout.prefetch_factor": 4.0})
    assert chosen(config, "partial_rollout.prefetch_factor") == []
    assert started(config).depths == (4.0, 4.0)


def test_two_batches_stay_where_engines_do_not_tell_their_load(composed: Composed):
    config = composed({"partial_rollout.slots.adaptive": False})
    off = f"{ROLLOUT}.disable_log_stats=True"
    (choice,) = chosen(config, "partial_rollout.prefetch_factor", [off])
    assert (choice.value, choice.seen) == (2.0, off)
    assert "do not tell their load" in choice.why
    started(config, [off])
    assert config.actor_rollout_ref.rollout.disable_log_stats is True


# ---- slots ----

ADAPTIVE = "partial_rollout.slots.adaptive"


def test_slots_are_adaptive_from_half_of_a_batch_s_upwards(composed: Composed):
    config = composed({})
    assert value(config, ADAPTIVE) is True
    told = started(config)
    assert (told.slots.are_adaptive, told.slots.least) == (True, 32)
    bounds = read_settings(config).slot_bounds
    assert (bounds.least, bounds.most) == (32, 3 * 64)
    assert not config.actor_rollout_ref.rollout.disable_log_stats


@pytest.mark.parametrize(("batch", "workers", "least"), [(16, 1, 32), (15, 1, 28), (16, 12, 48), (16, 16, 64)])
def test_the_fewest_slots_are_whole_groups_and_one_for_each_worker(
    composed: Composed, batch: int, workers: int, least: int
):
    mini_batch = {"actor_rollout_ref.actor.ppo_mini_batch_size": batch}
    config = composed({"data.train_batch_size": batch, f"{ROLLOUT}.agent.num_workers": workers} | mini_batch)
    assert started(config).slots.least == least
    assert read_settings(config).slot_bounds.least == least


@pytest.mark.parametrize(
    ("changes", "given", "depth_moves"),
    [
        ({"partial_rollout.num_slots": 32}, [], True),
        ({"partial_rollout.num_slots": 32, "partial_rollout.prefetch_factor": 2.0}, [], False),
        ({f"{TAIL}.policy": "wait"}, [], False),
        ({f"{TAIL}.policy": "reorder"}, [], False),
        ({MODE: "abort"}, [], False),
        ({f"{ROLLOUT}.disable_log_stats": True}, [f"{ROLLOUT}.disable_log_stats=True"], False),
    ],
)
def test_slots_stay_fixed_where_they_cannot_or_shall_not_move(
    composed: Composed, changes: dict, given: list[str], *, depth_moves: bool
):
    config = composed(changes)
    assert value(config, ADAPTIVE, given) is False
    assert not started(config, given).slots.are_adaptive
    # A depth that may move needs the engines' statistics too: they say when the KV cache is full.
    assert config.actor_rollout_ref.rollout.disable_log_stats is not depth_moves


@pytest.mark.parametrize("key", [f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.engine_kwargs.vllm.max_num_seqs"])
@pytest.mark.parametrize(
    ("most", "devices", "adaptive"), [(63, 1, False), (64, 1, True), (31, 2, False), (32, 2, True)]
)
def test_slots_stay_where_requests_wait_inside_the_engines(
    composed: Composed, most: int, devices: int, key: str, *, adaptive: bool
):
    config = composed({key: most, "trainer.n_gpus_per_node": devices})
    (choice,) = chosen(config, ADAPTIVE)
    assert choice.value is adaptive
    if adaptive:
        assert choice.why == "a full KV cache may have room for fewer than the 64 requests that engines run at once"
    else:
        engines = "one engine" if devices == 1 else "2 engines"
        assert choice.seen == f"64 slots for a batch, and {key}={most} on {engines}"
    by_hand = composed({key: most, "partial_rollout.slots.least": 32})
    assert value(by_hand, ADAPTIVE) is True


@pytest.mark.parametrize(
    ("engines_run", "devices", "workers", "most"),
    [(64, 1, 1, 64), (64, 1, 2, 68), (64, 1, 8, 80), (66, 1, 1, 68), (500, 1, 8, 192), (None, 1, 1, 192)]
    + [(32, 2, 8, 80), (50, 2, 1, 100)],
)
def test_slots_rise_to_what_the_engines_run_at_once_and_what_shares_leave_idle(
    composed: Composed, engines_run: int | None, devices: int, workers: int, most: int
):
    sizes = {"trainer.n_gpus_per_node": devices, f"{ROLLOUT}.agent.num_workers": workers}
    config = composed(sizes | {f"{ROLLOUT}.max_num_seqs": engines_run})
    started(config)
    bounds = read_settings(config).slot_bounds
    assert (bounds.least, bounds.most) == (32, most)


def test_a_lower_bound_above_the_slots_does_not_keep_the_other_choices_from_being_told(composed: Composed):
    """The bound is refused by the check of the settings, beside whatever else is wrong."""
    config = composed({"partial_rollout.slots.least": 1000})
    assert {choice.key for choice in choose(config)} >= {DEPTH, SLOTS}


def test_slots_wait_for_the_choice_of_the_interrupt_mode(composed: Composed, model: Path):
    here = GPU | {"actor_rollout_ref.model.path": str(model), "data.max_response_length": 4096}
    for machine, adaptive, least in ((LARGE, True, 32), (SMALL, False, None)):
        config = composed(here)
        assert started(config).slots.adaptive == "auto"
        assert not config.actor_rollout_ref.rollout.disable_log_stats
        decided = take_on_cluster(config, machine)
        depth = [choice.why for choice in decided if choice.key == "partial_rollout.prefetch_factor"]
        assert depth == ([] if adaptive else ["more batches would only make tokens older"])
        assert config.partial_rollout.prefetch_factor == "auto"
        told = PartialRolloutConfig.from_rollout(config.actor_rollout_ref.rollout.custom)
        block = read_settings(config).block
        assert (told.tail, told.slots) == (block.tail, block.slots)
        assert (told.slots.adaptive, told.slots.least) == (adaptive, least)


@pytest.mark.parametrize("by_hand", [True, False])
def test_adaptive_slots_set_by_hand_stay(composed: Composed, by_hand: bool):
    config = composed({ADAPTIVE: by_hand})
    assert chosen(config, ADAPTIVE) == []
    told = started(config)
    assert (told.slots.adaptive, told.slots.least) == (by_hand, None)


def test_a_least_number_of_slots_lets_a_number_set_by_hand_move(composed: Composed):
    told = started(composed({"partial_rollout.num_slots": 32, "partial_rollout.slots.least": 24}))
    assert (told.slots.adaptive, told.slots.least) == (True, 24)


def test_the_least_number_of_slots_set_by_hand_stays(composed: Composed):
    told = started(composed({"partial_rollout.slots.least": 16}))
    assert (told.slots.adaptive, told.slots.least) == (True, 16)


# ---- planner ----

PLANNER = "partial_rollout.packing.planner"
DYNAMIC = {
    f"actor_rollout_ref.{key}": True
    for key in ("actor.use_dynamic_bsz", "rollout.log_prob_use_dynamic_bsz", "ref.log_prob_use_dynamic_bsz")
}
"""Passes whose micro-batches have as many responses as a number of tokens has room for."""


@pytest.mark.parametrize(
    ("changes", "planner", "seen"),
    [
        (DYNAMIC, "global", "strategy=fsdp2"),
        ({}, "verl", "actor.use_dynamic_bsz=False"),
        (
            {**DYNAMIC, "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": False},
            "verl",
            "rollout.log_prob_use_dynamic_bsz=False",
        ),
        (
            {**DYNAMIC, "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": False, "algorithm.use_kl_in_reward": True},
            "verl",
            "ref.log_prob_use_dynamic_bsz=False",
        ),
        ({"partial_rollout.packing.token_budget": 4096}, "global", "strategy=fsdp2"),
        ({"actor_rollout_ref.actor.strategy": "megatron"}, "verl", "strategy=megatron"),
        ({"actor_rollout_ref.actor.shuffle": True}, "verl", "shuffle=True"),
        ({"trainer.n_gpus_per_node": 3}, "verl", "for 3 ranks"),
    ],
)
def test_our_planner_is_taken_where_the_trainer_has_what_it_needs(composed: Composed, changes, planner: str, seen: str):
    config = composed({PLANNER: "auto", **changes})
    (choice,) = chosen(config, PLANNER)
    assert choice.value == planner
    assert seen in choice.seen
    assert started(config).packing.planner == planner


@pytest.mark.parametrize("planner", ["global", "verl"])
def test_a_planner_set_by_hand_stays(composed: Composed, planner: str):
    config = composed({PLANNER: planner})
    assert chosen(config, PLANNER) == []
    assert started(config).packing.planner == planner


# ---- correction ----

IS = "algorithm.rollout_correction.rollout_is"


def uncorrected(composed: Composed, changes: dict[str, Any] | None = None) -> DictConfig:
    """A configuration without the correction, as verl's defaults have it."""
    return composed({IS: None} | (changes or {}))


def test_the_correction_is_on(composed: Composed):
    config = uncorrected(composed)
    assert not is_corrected(config)
    (choice,) = chosen(config, IS)
    assert (choice.before, choice.value) == (None, "token")
    assert "at most 2.0" in choice.why
    started(config)
    assert config.algorithm.rollout_correction.rollout_is == "token"
    assert is_corrected(config)


@pytest.mark.parametrize("override", [f"{IS}=null", "algorithm.rollout_correction={rollout_is: null}"])
def test_a_correction_that_was_turned_off_by_hand_stays_off(composed: Composed, override: str):
    config = uncorrected(composed)
    assert chosen(config, IS, [override]) == []
    started(config, [override])
    assert not is_corrected(config)


@pytest.mark.parametrize("override", [f"{IS}_threshold=5", "algorithm.rollout_correction={rollout_is_threshold: 5}"])
def test_another_bound_leaves_the_correction_on(composed: Composed, override: str):
    config = uncorrected(composed, {f"{IS}_threshold": 5})
    started(config, [override])
    assert is_corrected(config)
    assert config.algorithm.rollout_correction.rollout_is == "token"


def test_the_choice_of_a_file_for_a_group_turns_no_correction_off(composed: Composed):
    (choice,) = chosen(uncorrected(composed), IS, ["algorithm=mine"])
    assert choice.value == "token"


@pytest.mark.parametrize("by_hand", ["sequence", "token"])
def test_a_correction_of_the_user_s_own_stays(composed: Composed, by_hand: str):
    config = uncorrected(composed, {IS: by_hand})
    assert chosen(config, IS) == []
    started(config)
    assert config.algorithm.rollout_correction.rollout_is == by_hand


@pytest.mark.parametrize(
    ("changes", "seen", "corrected"),
    [
        ({"algorithm.rollout_correction.bypass_mode": True}, "bypass_mode=True", True),
        ({"algorithm.rollout_correction.rollout_rs": "token_k1"}, "rollout_rs=token_k1", True),
        ({f"{ROLLOUT}.calculate_log_probs": False}, "calculate_log_probs=False", False),
        ({f"{IS}_threshold": None}, "rollout_is_threshold=null", False),
    ],
)
def test_another_correction_is_not_doubled(composed: Composed, changes: dict[str, Any], seen: str, corrected: bool):
    config = uncorrected(composed, changes)
    (choice,) = chosen(config, IS)
    assert choice.value is None
    assert seen in choice.seen
    started(config)
    assert is_corrected(config) == corrected


BYPASS, LOSS = "algorithm.rollout_correction.bypass_mode", "algorithm.rollout_correction.loss_type"
POLICY_LOSS = f"{ACTOR}.policy_loss"


MODEL = "actor_rollout_ref.model.path"


@pytest.mark.parametrize("changes", [{}, {"actor_rollout_ref.model.external_lib": [PACKED_ATTENTION_MODULE]}])
def test_a_batch_that_is_one_optimizer_step_gets_no_old_log_probs(
    composed: Composed, model: Path, changes: dict[str, Any]
):
    config = composed({MODEL: str(model)} | changes)
    for key, taken in ((BYPASS, True), (LOSS, "reinforce")):
        (choice,) = chosen(config, key)
        assert (choice.value, "the batch, so it is one optimizer step" in choice.seen) == (taken, True)
    started(config)
    correction = config.algorithm.rollout_correction
    assert (correction.bypass_mode, correction.loss_type, correction.rollout_is) == (True, "reinforce", "token")
    assert OmegaConf.select(config, POLICY_LOSS).loss_mode == "bypass_mode"
    assert is_corrected(config)


@pytest.mark.parametrize(
    "changes",
    [
        {f"{ACTOR}.ppo_mini_batch_size": 1},
        {f"{ACTOR}.ppo_epochs": 2},
        {f"{POLICY_LOSS}.loss_mode": "gspo"},
        {f"{ROLLOUT}.calculate_log_probs": False},
        {"algorithm.use_kl_in_reward": True},
        {"algorithm.adv_estimator": "optimal_token_baseline"},
        {IS: "sequence"},
        {f"{IS}_threshold": None},
        {"algorithm.rollout_correction.rollout_rs": "token_k1"},
        {"algorithm.rollout_correction.rollout_is_batch_normalize": True},
        {BYPASS: True},
        {"distillation.enabled": True},
        {f"{ACTOR}.router_replay.mode": "R2"},
        {f"{ACTOR}.fsdp_config.router_replay.mode": "R2"},
        {f"{TAIL}.past_staleness": "mask", f"{TAIL}.max_staleness": 4},
        {f"{ROLLOUT}.agent.agent_loop_config_path": "loops.yaml"},
        {f"{ROLLOUT}.agent.default_agent_loop": "mine"},
        {f"{ACTOR}.strategy": "megatron"},
        {"actor_rollout_ref.model.external_lib": "my_loops"},
        {"data.custom_cls.path": "my_data.py"},
        {"actor_rollout_ref.model.override_config": {"attention_dropout": 0.1}},
        {MODEL: "someone/not-downloaded"},
        {"algorithm.adv_estimator": "gae"},
        {"critic.enable": True},
        {"trainer.n_gpus_per_node": 3},
    ],
)
def test_old_log_probs_stay_where_they_may_weigh_something(composed: Composed, model: Path, changes: dict[str, Any]):
    config = composed({MODEL: str(model)} | changes)
    before = OmegaConf.select(config, BYPASS)
    assert chosen(config, BYPASS) == chosen(config, LOSS) == []
    OmegaConf.update(config, "async_training.partial_rollout", True, force_add=True)
    examine(config, ByHand())
    assert OmegaConf.select(config, BYPASS) == before


@pytest.mark.parametrize("given", [f"{BYPASS}=False", f"{LOSS}=ppo_clip", f"{POLICY_LOSS}.loss_mode=vanilla"])
def test_old_log_probs_that_were_typed_stay(composed: Composed, model: Path, given: str):
    config = composed({MODEL: str(model)})
    assert chosen(config, BYPASS, [given]) == chosen(config, LOSS, [given]) == []
    started(config, [given])
    assert config.algorithm.rollout_correction.bypass_mode is False
    assert OmegaConf.select(config, POLICY_LOSS).loss_mode == "vanilla"


def test_old_log_probs_stay_where_the_model_draws_numbers_while_it_trains(composed: Composed, model: Path):
    config = composed({MODEL: str(model)})
    assert chosen(config, BYPASS)
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"text_config": {"resid_pdrop": 0.1}}))
    assert chosen(config, BYPASS) == []


def test_old_log_probs_stay_where_a_model_brings_code_of_its_own(composed: Composed, model: Path):
    file, trusted = model / "config.json", {"actor_rollout_ref.model.trust_remote_code": True}
    assert chosen(composed({MODEL: str(model)} | trusted), BYPASS)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}))
    assert chosen(composed({MODEL: str(model)}), BYPASS)
    assert chosen(composed({MODEL: str(model)} | trusted), BYPASS) == []


@pytest.mark.parametrize(
    ("told", "asked", "left_out"),
    [
        ({}, [NAME, "config.json"], True),
        ({"attention_dropout": 0.1}, [NAME, "config.json"], False),
        (None, [], False),  # no way to the hub
    ],
)
def test_a_start_asks_the_hub_whether_a_model_that_is_not_downloaded_has_dropout(
    composed: Composed,
    model: Path,
    hub: list[str],
    monkeypatch: pytest.MonkeyPatch,
    told: dict[str, float] | None,
    asked: list[str],
    *,
    left_out: bool,
):
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (told or {})))
    if told is None:
        monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    config = composed({MODEL: NAME})
    started(config, ask=ask_hub)
    assert hub == asked
    assert config.algorithm.rollout_correction.bypass_mode is left_out


@pytest.mark.parametrize(("changes", "given"), [({f"{ACTOR}.ppo_mini_batch_size": 1}, []), ({}, [f"{BYPASS}=False"])])
def test_the_hub_is_not_asked_about_dropout_where_it_decides_nothing(
    composed: Composed, hub: list[str], changes: dict[str, Any], given: list[str]
):
    started(composed({MODEL: NAME} | changes), given, ask_hub)
    assert hub == []


def test_the_loss_that_weighs_tokens_reaches_the_actor_with_its_weights(composed: Composed):
    config = uncorrected(composed, {BYPASS: True, LOSS: "reinforce"})
    assert not is_corrected(config)
    started(config)
    assert is_corrected(config)
    given = OmegaConf.select(config, POLICY_LOSS)
    assert given.loss_mode == "bypass_mode"
    assert (given.rollout_correction.loss_type, given.rollout_correction.rollout_is) == ("reinforce", "token")
    assert given.rollout_correction.rollout_is_threshold == 2.0


def test_the_loss_that_clips_stays_the_trainer_s_own(composed: Composed):
    config = uncorrected(composed, {BYPASS: True})
    started(config)
    assert OmegaConf.select(config, POLICY_LOSS).loss_mode == "vanilla"


def test_a_correction_without_a_threshold_is_off(composed: Composed):
    assert is_corrected(composed({IS: "token"}))
    assert not is_corrected(composed({IS: "token", f"{IS}_threshold": None}))


# ---- how weights travel ----

WEIGHTS = "partial_rollout.weights.backend"


@pytest.mark.parametrize(
    ("changes", "taken", "seen"),
    [
        ({}, "channel", "trainer.device=cpu"),
        ({"trainer.device": "npu"}, "verl", "trainer.device=npu"),
        ({f"{ROLLOUT}.quantization": "fp8"}, "verl", f"weights quantised on arrival ({ROLLOUT}.quantization=fp8)"),
    ],
)
def test_weights_go_by_our_channel_where_it_carries_them(
    composed: Composed, changes: dict[str, Any], taken: str, seen: str
):
    config = composed(changes)
    (choice,) = chosen(config, WEIGHTS)
    assert (choice.value, choice.seen) == (taken, seen)
    assert started(config).weights.backend == taken
    assert config.partial_rollout.weights.backend == taken


@pytest.mark.parametrize("by_hand", ["channel", "verl"])
def test_a_way_of_weights_set_by_hand_stays(composed: Composed, by_hand: str):
    config = composed({WEIGHTS: by_hand})
    assert chosen(config, WEIGHTS) == []
    assert started(config).weights.backend == by_hand


# ---- all ----


def test_choosing_changes_nothing(composed: Composed):
    config = composed({IS: None, PLANNER: "auto"})
    before = OmegaConf.to_container(config)
    assert {choice.key for choice in choose(config)} == {
        MODE,
        "partial_rollout.prefetch_factor",
        ADAPTIVE,
        "partial_rollout.slots.least",
        PLANNER,
        IS,
        SAVE,
        WEIGHTS,
    }
    assert OmegaConf.to_container(config) == before


def test_a_choice_is_one_line_with_what_was_seen_and_why(composed: Composed):
    (choice,) = chosen(composed({}), MODE)
    assert str(choice) == (
        "auto: partial_rollout.tail.interrupt_mode = reuse_kv. Seen: actor_rollout_ref.rollout.free_cache_engine=False"
        ". Why: engines keep their memory over training, so an interrupted response finds its KV again "
        "(docs/modes.md#which-interrupt-mode)"
    )


# ---- checkpoints ----

UNSAVED = {"trainer.save_freq": -1}
"""verl's default."""


def test_a_run_whose_user_has_said_nothing_saves_by_time_and_keeps_the_newest_checkpoint(composed: Composed):
    config = composed(UNSAVED)
    (choice,) = chosen(config, SAVE)
    assert choice.value == 20
    assert "trainer.save_freq=-1, which nobody set" in str(choice)
    anew = "a new run needs another trainer.default_local_dir, or trainer.resume_mode=disable"
    assert f"The same command then goes on from it; {anew}" in choice.why
    (fresh,) = chosen(composed(UNSAVED | {"trainer.resume_mode": "disable"}), SAVE)
    assert "goes on" not in fresh.why
    assert started(config).minutes_between_saves == 20
    assert saves_by_time(config)
    assert num_kept_checkpoints(config) == 1
    assert num_kept_checkpoints(composed(UNSAVED | {SAVE: 5, "trainer.max_actor_ckpt_to_keep": 3})) == 3


@pytest.mark.parametrize(
    ("changes", "given", "seen"),
    [
        (UNSAVED, ["trainer.save_freq=-1"], "trainer.save_freq=-1 (set on the command line)"),
        ({"trainer.save_freq": 50}, [], "trainer.save_freq=50 (set in a configuration file)"),
        (UNSAVED | {f"{ACTOR}.checkpoint.async_save": True}, [], "async_save=True"),
    ],
)
def test_nothing_is_saved_by_time_beside_the_user_s_own_number_and_where_disks_would_fill(
    composed: Composed, changes: dict[str, Any], given: list[str], seen: str
):
    config = composed(changes)
    (choice,) = chosen(config, SAVE, given)
    assert choice.value is None
    assert seen in choice.seen
    kept = num_kept_checkpoints(config)
    assert started(config, given).minutes_between_saves is None
    assert not saves_by_time(config)
    assert num_kept_checkpoints(config) == kept


@pytest.mark.parametrize(("given", "bytes_each"), [([], 12), (["trainer.save_freq=-1"], 4)])
def test_a_checkpoint_that_is_never_written_takes_no_host_memory(
    composed: Composed, model: Path, given: list[str], bytes_each: int
):
    """The cluster counts the same: `save_minutes`, chosen here, is in the configuration when it decides."""
    config = composed(GPU | UNSAVED | {SAVE: "auto", "actor_rollout_ref.model.path": str(model)})
    (choice,) = chosen(config, MODE, given)
    assert f", training {bytes_each * 600_000_000 / GIB:.1f};" in choice.seen
    assert config.partial_rollout.save_minutes == "auto"


def test_minutes_set_by_hand_stay(composed: Composed):
    assert chosen(composed(UNSAVED | {SAVE: 3.5}), SAVE) == []
    assert chosen(composed(UNSAVED | {SAVE: None}), SAVE) == []
    assert not may_save(composed(UNSAVED | {SAVE: None}))
    assert may_save(composed(UNSAVED | {SAVE: 3.5}))
