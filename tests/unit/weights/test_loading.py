"""What of an update the model's own loader does not notice."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from partial_rollout.errors import WeightMismatch
from partial_rollout.weights.loading import require_experts, require_parts

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
NAMES = [
    f"model.layers.{layer}.{block}.weight"
    for layer in (0, 1)
    for block in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
]


def test_all_parts_are_enough() -> None:
    require_parts(PACKED, [*NAMES, "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"][:-1])


def test_a_checkpoint_may_hold_fused_weights() -> None:
    require_parts(PACKED, ["model.layers.0.self_attn.qkv_proj.weight"])


@pytest.mark.parametrize("missing", ["model.layers.1.self_attn.v_proj.weight", "model.layers.0.mlp.up_proj.weight"])
def test_a_missing_part_is_named(missing: str) -> None:
    name = missing.removeprefix("model.layers.").replace(".", r"\.")
    with pytest.raises(WeightMismatch, match=f"{name} was not sent"):
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
