"""Which adapters' tensors are taken for a model that vLLM serves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.models.utils import WeightsMapper

from partial_rollout.errors import WeightMismatch
from partial_rollout.weights.checks import require_known_modules, require_whole_adapter

STACKED = {".q_proj": (".qkv_proj", "q"), ".k_proj": (".qkv_proj", "k"), ".up_proj": (".gate_up_proj", 1)}
MAPPERS = {
    "none": (None, "model"),
    "that packs": (WeightsMapper(orig_to_new_stacked=STACKED), "model"),
    "that renames": (WeightsMapper(orig_to_new_stacked=STACKED, orig_to_new_prefix={"model.": "inner."}), "inner"),
}


class MapperOf024:
    """What vLLM 0.24 has of WeightsMapper, so far as LoRA touches it."""

    def _map_name(self, name: str) -> str | None:
        return name.replace("model.", "inner.", 1)


def make_model(mapper, prefix) -> SimpleNamespace:
    """A model of which vLLM gives adapters to the attention's first projection and to the experts."""
    modules = {f"{prefix}.0.qkv_proj": None, f"{prefix}.0.o_proj": None, f"{prefix}.0.experts": None}
    packed = {f"{prefix}.0.qkv_proj": [f"{prefix}.0.q_proj", f"{prefix}.0.k_proj"]}
    packed[f"{prefix}.0.experts"] = [f"{prefix}.0.experts.{i}.up_proj" for i in range(2)]
    manager = SimpleNamespace(modules=modules, packed_modules=packed)
    return SimpleNamespace(hf_to_vllm_mapper=mapper, lora_manager=manager)


def peft_name(module: str) -> str:
    return f"base_model.model.model.{module}.lora_A.weight"


@pytest.fixture(params=[*MAPPERS.values(), (MapperOf024(), "inner")], ids=[*MAPPERS, "of 0.24"])
def model(request):
    return make_model(*request.param)


def test_modules_their_packed_parts_and_experts_are_taken(model):
    modules = ["0.q_proj", "0.k_proj", "0.o_proj", "0.experts", "0.experts.base_layer", "0.experts.1.up_proj"]
    require_known_modules(model, [*map(peft_name, modules), "base_model.model.model.embed_tokens.base_layer.weight"])


@pytest.mark.parametrize("module", ["0.no_such_proj", "1.q_proj", "0.norm", "0.experts.2.up_proj"])
def test_a_module_that_takes_no_adapter_is_refused(model, module):
    with pytest.raises(WeightMismatch, match=rf"{module}.* belongs to no module"):
        require_known_modules(model, [peft_name("0.q_proj"), peft_name(module)])


def test_a_tensor_of_no_adapter_is_refused(model):
    with pytest.raises(WeightMismatch, match=r"o_proj.weight' belongs to no module"):
        require_known_modules(model, ["base_model.model.model.0.o_proj.weight"])


def test_an_engine_without_lora_is_told():
    with pytest.raises(WeightMismatch, match="set actor_rollout_ref.model.lora_rank"):
        require_known_modules(SimpleNamespace(), [peft_name("0.q_proj")])


TARGETS = {"target_modules": ["q_proj", "o_proj"]}


def layers_of(*numbers: int) -> SimpleNamespace:
    """A model of layers with an attention each."""
    modules = {f"model.{i}.{name}": None for i in numbers for name in ("qkv_proj", "o_proj")}
    packed = {f"model.{i}.qkv_proj": [f"model.{i}.q_proj", f"model.{i}.k_proj"] for i in numbers}
    return SimpleNamespace(lora_manager=SimpleNamespace(modules=modules, packed_modules=packed))


def adapter_of(*modules: str) -> list[str]:
    return [f"base_model.model.model.{name}.lora_{matrix}.weight" for name in modules for matrix in "AB"]


WHOLE = adapter_of("0.q_proj", "0.o_proj", "1.q_proj", "1.o_proj")


def test_an_adapter_of_some_projections_in_every_layer_is_whole():
    require_whole_adapter(layers_of(0, 1), WHOLE, TARGETS)


@pytest.mark.parametrize("matrix", ["A", "B"])
def test_a_missing_matrix_is_named(matrix):
    names = [name for name in WHOLE if not name.endswith(f"1.o_proj.lora_{matrix}.weight")]
    with pytest.raises(WeightMismatch, match=f"lora_{matrix} of module 'model.1.o_proj' was not sent"):
        require_whole_adapter(layers_of(0, 1), names, TARGETS)


@pytest.mark.parametrize("missing", ["1.o_proj", "0.q_proj"])
def test_a_module_that_one_layer_lacks_is_named(missing):
    names = [name for name in WHOLE if missing not in name]
    with pytest.raises(WeightMismatch, match=f"module 'model.{missing}' was not sent"):
        require_whole_adapter(layers_of(0, 1), names, TARGETS)


@pytest.mark.parametrize("choice", [{"layers_to_transform": [0]}, {"exclude_modules": "x"}, {"target_modules": "0.*"}])
def test_layers_that_the_configuration_chooses_among_are_not_missed(choice):
    require_whole_adapter(layers_of(0, 1), adapter_of("0.q_proj"), TARGETS | choice)


def test_a_part_that_layers_do_without_by_configuration_is_not_missed():
    model = layers_of(0, 1)
    model.config = SimpleNamespace(num_kv_shared_layers=1)
    require_whole_adapter(model, adapter_of("0.q_proj", "0.k_proj", "1.q_proj"), TARGETS)
    model.config = SimpleNamespace()
    with pytest.raises(WeightMismatch, match=r"module 'model.1.k_proj' was not sent"):
        require_whole_adapter(model, adapter_of("0.q_proj", "0.k_proj", "1.q_proj"), TARGETS)
