"""What of an update the model's own loader does not notice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from partial_rollout.errors import WeightMismatch
from partial_rollout.weights.checks import parts_left_out, require_experts, require_parts
from partial_rollout.weights.loading import Reload

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
NAMES = [
    f"model.layers.{layer}.{block}.weight"
    for layer in (0, 1)
    for block in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
]


def test_all_parts_are_enough() -> None:
    require_parts(PACKED, [*NAMES, "model.embed_tokens.weight"])


def test_a_bias_that_no_layer_has_is_not_missed_and_one_that_others_have_is() -> None:
    biases = [f"model.layers.{layer}.self_attn.{part}_proj.bias" for layer in (0, 1) for part in "qv"]
    require_parts(PACKED, [*NAMES, *biases])
    with pytest.raises(WeightMismatch, match=r"layers\.1\.self_attn\.v_proj\.bias was not sent"):
        require_parts(PACKED, [*NAMES, *biases[:-1]])


def test_a_tower_does_not_stand_in_for_another_one() -> None:
    visual = [f"visual.blocks.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    require_parts(PACKED, [*NAMES, *visual])
    with pytest.raises(WeightMismatch, match=r"visual\.blocks\.0\.mlp\.up_proj\.weight was not sent"):
        require_parts(PACKED, [*NAMES, *visual[:1]])


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [({}, ()), ({"attention_k_eq_v": True}, ("v_proj",)), ({"num_kv_shared_layers": 2}, ("k_proj", "v_proj"))],
)
def test_parts_that_layers_do_without_by_configuration_are_not_missed(settings, left_out) -> None:
    text = SimpleNamespace(**settings)
    for config in (text, SimpleNamespace(text_config=text)):
        assert parts_left_out(SimpleNamespace(config=config)) == set(left_out)
    names = [name for name in NAMES if not any(f"1.self_attn.{part}" in name for part in left_out)]
    require_parts(PACKED, names, without=left_out)
    with pytest.raises(WeightMismatch, match="up_proj"):
        require_parts(PACKED, [name for name in names if "0.mlp.up" not in name], without=left_out)


def embedding(weight: torch.Tensor) -> torch.nn.Module:
    """Without its constructor, which needs vLLM's process groups."""
    made = object.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(made)
    made.weight = torch.nn.Parameter(weight)
    return made


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_a_tied_head_is_neither_expected_nor_forgotten_wherever_it_is(tied, nested) -> None:
    text, weight = torch.nn.Module(), torch.ones(2, 2)
    text.embed_tokens = embedding(weight)
    text.lm_head = embedding(weight if tied else torch.zeros(2, 2))
    packed = []
    text.lm_head.quant_method = SimpleNamespace(process_weights_after_loading=packed.append)
    model, prefix = text, ""
    if nested:
        model, prefix = torch.nn.Module(), "language_model."
        model.language_model = text
    reload = Reload(model)
    assert reload.expected() == {f"{prefix}embed_tokens.weight"} | (set() if tied else {f"{prefix}lm_head.weight"})
    for head in reload._tied.values():
        head.quant_method.process_weights_after_loading(head)
    assert packed == ([text.lm_head] if tied else [])


def test_a_checkpoint_may_hold_fused_weights() -> None:
    require_parts(PACKED, ["model.layers.0.self_attn.qkv_proj.weight"])


@pytest.mark.parametrize("missing", ["model.layers.1.self_attn.v_proj.weight", "model.layers.0.mlp.up_proj.weight"])
def test_a_missing_part_is_named(missing: str) -> None:
    with pytest.raises(WeightMismatch, match=f"{missing} was not sent"):
        require_parts(PACKED, [each for each in NAMES if each != missing])


EXPERTS = [
    f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
    for layer in (0, 3)
    for expert in range(3)
    for part in ("gate", "up", "down")
]


def test_all_experts_are_enough_and_none_is_too() -> None:
    require_experts([*EXPERTS, "model.layers.1.mlp.up_proj.weight"])
    require_experts(["model.layers.0.mlp.experts.gate_up_proj"])


@pytest.mark.parametrize("missing", ["3.mlp.experts.1.up_proj", "0.mlp.experts.2.down_proj"])
def test_a_missing_part_of_an_expert_is_named(missing: str) -> None:
    with pytest.raises(WeightMismatch, match=f"layers.{missing}.weight was not sent, one of 3 experts"):
        require_experts([each for each in EXPERTS if missing not in each])


def test_an_expert_that_only_one_layer_lacks_is_named() -> None:
    with pytest.raises(WeightMismatch, match=r"layers\.3\.mlp\.experts\.2\..* was not sent, one of 3 experts"):
        require_experts([each for each in EXPERTS if "3.mlp.experts.2." not in each])


def test_a_buffer_that_no_update_carries_is_the_same_after_a_reload() -> None:
    """Rotary embeddings have such a buffer; vLLM warns "Failed to load weights" of them and puts the buffer back."""
    model, table = torch.nn.Module(), torch.arange(4.0)
    model.rotary_emb = torch.nn.Module()
    model.rotary_emb.register_buffer("cos_sin_cache", table, persistent=False)
    record_metadata_for_reloading(model)
    reload = Reload(model)
    reload.start()
    assert model.rotary_emb.cos_sin_cache.is_meta
    assert reload.expected() == set()
    reload.finish(SimpleNamespace(dtype=torch.float32))
    assert model.rotary_emb.cos_sin_cache.tolist() == [0, 1, 2, 3]
    assert model.rotary_emb.cos_sin_cache.data_ptr() == table.data_ptr()
