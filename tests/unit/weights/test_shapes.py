"""Which tensors a served model's linear layers take; on real ones in tests/engine/test_weight_channel.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from partial_rollout.errors import WeightMismatch
from partial_rollout.weights.checks import ModelShapes

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HIDDEN, HEAD = 8, 4
ATTENTION = "model.layers.0.self_attn"


def layer(kind: type, *, quant_method: object = None, **sizes: int | list[int]) -> torch.nn.Module:
    """A layer with its sizes and nothing else: building one takes vLLM's process groups."""
    made = object.__new__(kind)
    torch.nn.Module.__init__(made)
    made.quant_method = quant_method or object.__new__(UnquantizedLinearMethod)
    for name, value in sizes.items():
        setattr(made, name, value)
    return made


def make_model(**options: object) -> torch.nn.Module:
    """Two query heads over one key-value head, of which each of four ranks has a copy."""
    attention, mlp, block = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    heads = {"total_num_heads": 2, "total_num_kv_heads": 1, "head_size": HEAD, "v_head_size": HEAD}
    copies = {"input_size": HIDDEN, "output_size": 10 * HEAD, "output_sizes": [2 * HEAD, 4 * HEAD, 4 * HEAD]}
    attention.qkv_proj = layer(QKVParallelLinear, **heads, **copies, **options)
    mlp.gate_up_proj = layer(
        MergedColumnParallelLinear, input_size=HIDDEN, output_size=24, output_sizes=[12, 12], **options
    )
    mlp.down_proj = layer(RowParallelLinear, input_size=12, output_size=HIDDEN, **options)
    block.self_attn, block.mlp = attention, mlp
    root, root.inner = torch.nn.Module(), torch.nn.Module()
    root.inner.layers = torch.nn.ModuleList([block])
    return root


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{ATTENTION}.q_proj.weight", (8, 8)),
        (f"{ATTENTION}.k_proj.weight", (4, 8)),
        (f"{ATTENTION}.v_proj.bias", (4,)),
        (f"{ATTENTION}.qkv_proj.weight", (16, 8)),
        ("model.layers.0.mlp.up_proj.weight", (12, 8)),
        ("model.layers.0.mlp.gate_up_proj.weight", (24, 8)),
        ("model.layers.0.mlp.down_proj.weight", (8, 12)),
    ],
)
def test_whole_shapes_are_taken_and_others_are_named(name, shape):
    shapes = ModelShapes(make_model(), PACKED)
    shapes.check(name, torch.empty(shape, dtype=torch.bfloat16))
    for wrong in ((shape[0] + 4, *shape[1:]), (shape[0] - 1, *shape[1:])):
        with pytest.raises(WeightMismatch, match=rf"{name}.* has shape .* the model's is"):
            shapes.check(name, torch.empty(wrong))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32])
def test_numbers_that_are_no_plain_floats_are_named(dtype):
    name = f"{ATTENTION}.k_proj.weight"
    with pytest.raises(WeightMismatch, match=f"{name}' is {dtype}"):
        ModelShapes(make_model(), PACKED).check(name, torch.empty(4, 8, dtype=dtype))


def test_a_transposed_matrix_is_left_to_the_models_loader():
    ModelShapes(make_model(), PACKED).check("0.mlp.down_proj.weight", torch.empty(12, 8))


@pytest.mark.parametrize(
    "name", ["model.norm.weight", f"{ATTENTION}.k_proj.weight_scale", f"{ATTENTION}.k_norm.weight"]
)
def test_what_is_no_linear_layers_is_left_to_vllm(name):
    ModelShapes(make_model(), PACKED).check(name, torch.empty(3, dtype=torch.int8))


def test_a_quantised_layer_is_left_to_vllm():
    ModelShapes(make_model(quant_method=object()), PACKED).check(f"{ATTENTION}.k_proj.weight", torch.empty(1))


def test_towers_with_the_same_names_each_have_their_shape():
    model, visual = make_model(), torch.nn.Module()
    visual.mlp = torch.nn.Module()
    visual.mlp.gate_up_proj = layer(MergedColumnParallelLinear, input_size=4, output_size=12, output_sizes=[6, 6])
    model.blocks = torch.nn.ModuleList([visual])
    shapes = ModelShapes(model, PACKED)
    shapes.check("visual.blocks.0.mlp.up_proj.weight", torch.empty(6, 4))
    shapes.check("model.layers.0.mlp.up_proj.weight", torch.empty(12, 8))
    with pytest.raises(WeightMismatch, match=r"the model's is \(6, 4\) or \(12, 8\)"):
        shapes.check("visual.blocks.0.mlp.up_proj.weight", torch.empty(7, 4))


def test_a_convolution_in_the_guise_of_a_linear_layer_and_a_layer_with_another_loader_are_left_to_vllm():
    model = make_model()
    model.inner.layers[0].mlp.conv1d = layer(ColumnParallelLinear, input_size=4, output_size=6)
    model.inner.layers[0].mlp.in_proj = layer(ColumnParallelLinear, input_size=4, output_size=6)
    weight = torch.nn.Parameter(torch.empty(6, 4))
    weight.weight_loader = lambda *_: None
    model.inner.layers[0].mlp.in_proj.weight = weight
    shapes = ModelShapes(model, PACKED)
    shapes.check("0.mlp.conv1d.weight", torch.empty(6, 1, 4))
    shapes.check("0.mlp.in_proj.weight", torch.empty(5, 4))


def test_whole_numbers_are_no_norm_and_no_embedding():
    model = make_model()
    model.inner.layers[0].norm = torch.nn.LayerNorm(4)
    with pytest.raises(WeightMismatch, match=r"norm.weight' is torch.int8"):
        ModelShapes(model, PACKED).check("model.layers.0.norm.weight", torch.empty(4, dtype=torch.int8))
