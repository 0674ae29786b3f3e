"""What of an update the model's own loader does not notice."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from partial_rollout.errors import WeightMismatch
from partial_rollout.weights.loading import require_parts

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
