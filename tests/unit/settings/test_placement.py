"""Engines on devices of their own: what follows for verl's settings, what is chosen, and what is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

from partial_rollout.settings.by_hand import ByHand
from partial_rollout.settings.derived import num_engine_devices, num_rollout_devices, read_block
from partial_rollout.settings.matrix import rows_of
from partial_rollout.settings.memory import GIB, DeviceNeed
from partial_rollout.settings.prepare import examine

if TYPE_CHECKING:
    from partial_rollout.settings.prepare import Examined
    from tests.unit.settings.support import Composed

ROLLOUT = "actor_rollout_ref.rollout"
TAIL = "partial_rollout.tail"
PLACEMENT = "partial_rollout.placement"


def examined(composed: Composed, changes: dict[str, Any] | None = None, given: tuple[str, ...] = ()) -> Examined:
    flag = {"async_training.partial_rollout": True, PLACEMENT: "separate"}
    return examine(composed(flag | (changes or {})), ByHand.read([*given]))


def test_engines_get_devices_and_weights_by_our_checkpoint_engine(composed: Composed):
    result = examined(composed, {"partial_rollout.weights.bucket_mb": 2, "partial_rollout.weights.encrypt": True})
    assert not result.refusals
    assert result.prepared is not None
    config = result.prepared.config
    wanted = {
        "trainer.v1.trainer_mode": "partial_rollout_separate",
        f"{ROLLOUT}.nnodes": 1,
        f"{ROLLOUT}.free_cache_engine": False,
        f"{ROLLOUT}.checkpoint_engine.backend": "partial_rollout",
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module": "partial_rollout.weights.checkpoint_engine",
        f"{TAIL}.interrupt_mode": "keep_kv",
    }
    assert {key: OmegaConf.select(config, key) for key in wanted} == wanted
    options = OmegaConf.select(config, f"{ROLLOUT}.checkpoint_engine.engine_kwargs.partial_rollout")
    timeout_s = result.prepared.settings.block.timeouts.weights_s
    assert options == {"timeout_s": timeout_s, "buffer_bytes": 2 << 20, "encrypt": True}
    assert result.prepared.settings.uses_channel
    assert (num_rollout_devices(config), num_engine_devices(config)) == (1, 1)


def test_shared_placement_changes_none_of_it(composed: Composed):
    result = examined(composed, {PLACEMENT: "shared"})
    assert not result.refusals
    config = result.changes
    assert not any("checkpoint_engine" in change.key or change.key.endswith("nnodes") for change in config)


def test_the_numbers_of_devices_may_differ(composed: Composed):
    result = examined(composed, {f"{ROLLOUT}.nnodes": 2, f"{ROLLOUT}.n_gpus_per_node": 4, "trainer.n_gpus_per_node": 1})
    assert not result.refusals
    assert result.prepared is not None
    config = result.prepared.config
    assert (num_rollout_devices(config), num_engine_devices(config)) == (8, 8)


@pytest.mark.parametrize(
    ("sizes", "nodes", "parts"),
    [
        ({f"{ROLLOUT}.n_gpus_per_node": 2}, 1, {"several replicas"}),
        ({f"{ROLLOUT}.n_gpus_per_node": 2, f"{ROLLOUT}.tensor_model_parallel_size": 2}, 1, set()),
        (
            {f"{ROLLOUT}.nnodes": 2, f"{ROLLOUT}.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 8},
            2,
            {"an engine over several nodes", "engines on several nodes, on a CPU"},
        ),
        (
            {f"{ROLLOUT}.n_gpus_per_node": 2, f"{ROLLOUT}.tensor_model_parallel_size": 2, "trainer.nnodes": 2},
            1,
            {"engines on several nodes, on a CPU"},
        ),
    ],
)
def test_what_is_known_of_engines_follows_their_own_devices(
    composed: Composed, sizes: dict[str, int], nodes: int, parts: set[str]
):
    """`rollout.nnodes` is verl's 0 until the start has set it."""
    config = composed({PLACEMENT: "separate", f"{ROLLOUT}.n_gpus_per_node": 1, f"{ROLLOUT}.nnodes": 0} | sizes)
    of_sizes = {"several replicas", "an engine over several nodes", "engines on several nodes, on a CPU"}
    assert {row.what for row in rows_of(config)} & of_sizes == parts
    assert num_engine_devices(config) == nodes * config.actor_rollout_ref.rollout.n_gpus_per_node


def test_where_a_request_cannot_stay_in_its_engine_its_kv_is_found_again(composed: Composed):
    result = examined(composed, {f"{ROLLOUT}.engine_kwargs.vllm.stream_interval": 8})
    assert [choice.value for choice in result.choices if choice.key == f"{TAIL}.interrupt_mode"] == ["reuse_kv"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"partial_rollout.weights.backend": "verl"}, "weights.backend=verl with .* must be auto"),
        ({"actor_rollout_ref.model.lora_rank": 8, f"{ROLLOUT}.load_format": "safetensors"}, "model.lora_rank with"),
        ({f"{TAIL}.policy": "wait"}, "tail.policy=wait with .* must be partial"),
        ({f"{TAIL}.max_staleness": 1, f"{TAIL}.past_staleness": "finish"}, "past_staleness=finish with"),
        ({f"{TAIL}.max_staleness": 0}, "max_staleness=0 with .* at least 1"),
        ({f"{TAIL}.keep_engine_memory": True}, "keep_engine_memory=true with"),
        ({f"{TAIL}.interrupt_mode": "offload_kv", f"{TAIL}.offload_gib": 1}, "interrupt_mode=offload_kv with"),
        ({f"{ROLLOUT}.data_parallel_size": 2, f"{ROLLOUT}.n_gpus_per_node": 2}, "data_parallel_size=2 with"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2, f"{ROLLOUT}.nnodes": 2}, "n_gpus_per_node=1 with .* a multiple"),
        (
            {f"{ROLLOUT}.pipeline_model_parallel_size": 2, f"{ROLLOUT}.nnodes": 2},
            "n_gpus_per_node=1 with .* a multiple of the 2 devices of an engine",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(composed: Composed, changes: dict[str, Any], text: str):
    told = "\n".join(str(refusal) for refusal in examined(composed, changes).refusals)
    assert re.search(text, told), told


@pytest.mark.parametrize(
    ("changes", "given", "texts"),
    [
        (
            {"trainer.device": "npu", f"{TAIL}.interrupt_mode": "abort"},
            (),
            ["trainer.device=npu with partial_rollout.placement=separate is not allowed: must be cpu or cuda: "],
        ),
        (
            {f"{ROLLOUT}.quantization": "fp8"},
            (),
            ["rollout.quantization=fp8 with .* must be null: weights .* does not carry weights quantised on arrival$"],
        ),
        (
            {f"{ROLLOUT}.quantization": "fp8", "partial_rollout.weights.backend": "channel"},
            (),
            ["rollout.quantization=fp8 with .* must be null: "],
        ),
        (
            {"actor_rollout_ref.model.lora_rank": 8, f"{ROLLOUT}.load_format": "dummy"},
            (),
            ["model.lora_rank with .* must be 0, or model.lora.merge=True"],
        ),
        (
            {f"{ROLLOUT}.checkpoint_engine.backend": "nccl"},
            (f"{ROLLOUT}.checkpoint_engine.backend=nccl",),
            [r"checkpoint_engine.backend=nccl \(set on the command line\) is not possible"],
        ),
    ],
)
def test_what_keeps_weights_from_our_channel_is_told_once_and_as_it_is(
    composed: Composed, changes: dict[str, Any], given: tuple[str, ...], texts: list[str]
):
    told = [str(refusal) for refusal in examined(composed, changes, given).refusals]
    assert len(told) == len(texts), told
    assert all(re.search(text, refusal) for text, refusal in zip(texts, told, strict=True)), told


def test_engines_without_training_beside_them_are_pointed_to_the_placement(composed: Composed):
    result = examined(composed, {PLACEMENT: "shared", "actor_rollout_ref.hybrid_engine": False})
    assert any("partial_rollout.placement=separate" in str(refusal) for refusal in result.refusals)


@pytest.mark.parametrize(("placement", "depths"), [("shared", (2.0, 2.0)), ("separate", (1.0, 1.0))])
def test_prompts_that_are_admitted_an_update_earlier_count_for_the_bound_on_staleness(
    composed: Composed, placement: str, depths: tuple[float, float]
):
    assert read_block(composed({PLACEMENT: placement, f"{TAIL}.max_staleness": 1})).depths == depths


def test_the_memory_of_training_is_not_shared_with_an_engine():
    need = DeviceNeed(state_bytes=20 * GIB, row_bytes=16 * GIB, row_tokens=8192, engine_share=0.0)
    assert str(need).endswith("4 for the rest), engines have GPUs of their own")
