"""Our vLLM backend on both interfaces of vLLM, and how vLLM finds it."""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from partial_rollout.errors import ConfigError, VersionError, WeightMismatch
from partial_rollout.integrations import vllm_plugin
from partial_rollout.integrations.vllm_plugin import BACKEND, register_backend
from partial_rollout.weights.transfer_engine import (
    ChannelReceiving,
    ChannelTransferEngine,
    ChannelUpdate,
    choose_backend,
    require_known_interface,
)
from tests.unit.weights.support import BUFFER_BYTES, LONG_S, make_weights, send_all

UPDATE = dataclasses.asdict(ChannelUpdate("test", 1, LONG_S, False))


class Base024:
    """What vLLM 0.24 has of WeightTransferEngine, so far as ours touches it."""

    def __init__(self, config, parallel_config, model) -> None:
        self.config, self.parallel_config, self.model = config, parallel_config, model

    def receive_weights(self, update_info, load_weights) -> None:
        raise NotImplementedError


class Engine024(ChannelReceiving, Base024):
    """ChannelTransferEngine as it is where vLLM 0.24 is installed."""


class Model(torch.nn.Module):
    """Takes the tensors it has parameters for."""

    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        self.layer = torch.nn.ParameterList([torch.zeros(4096) for _ in range(num_tensors)])

    def load_weights(self, weights) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
            loaded.add(name)
        return loaded


def make_engine(kind: str, model: Model):
    if kind == "0.24":
        return Engine024(None, None, model)
    config = SimpleNamespace(parallel_config=None, model_config=None)
    return WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=BACKEND), config, torch.device("cpu"), model
    )


def receive(kind: str, engine) -> None:
    if kind == "0.24":
        # Which function vLLM's worker hands over depends on the kind of update.
        load, engine.model.load_weights = engine.model.load_weights, None
        engine.receive_weights(ChannelUpdate(**UPDATE), load_weights=load)
    else:
        engine.update_weights(UPDATE)


@pytest.fixture
def inherited(channels, monkeypatch):
    """The folder, as an engine worker finds it."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    channels.address.export()
    return channels.address


@pytest.mark.parametrize("kind", ["0.24", "0.28"])
def test_all_weights_arrive_by_either_interface(inherited, kind):
    register_backend()
    weights = make_weights(2)
    engine = make_engine(kind, Model(2))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send_all, inherited, weights)
        receive(kind, engine)
        assert sent.result().num_tensors == 2
    for name, tensor in weights:
        assert torch.equal(engine.model.get_parameter(name), tensor)


@pytest.mark.parametrize("kind", ["0.24", "0.28"])
def test_a_parameter_that_was_not_sent_is_named_by_either_interface(inherited, kind):
    register_backend()
    engine = make_engine(kind, Model(3))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(send_all, inherited, make_weights(2))
        with pytest.raises(WeightMismatch, match=r"1 of 3 parameters were not sent, first: \['layer.2'\]"):
            receive(kind, engine)


@pytest.mark.parametrize("kind", ["0.24", "0.28"])
def test_a_part_of_a_fused_parameter_that_was_not_sent_is_named_by_either_interface(inherited, kind):
    class Fused(torch.nn.Module):
        packed_modules_mapping = {"qkv_proj": ["q_proj", "v_proj"]}

        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = torch.nn.Linear(2, 2, bias=False)

        def load_weights(self, weights) -> set[str]:
            return {"qkv_proj.weight" for _ in weights}

    register_backend()
    engine = make_engine(kind, Fused())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(send_all, inherited, [("layers.0.q_proj.weight", torch.ones(2))])
        with pytest.raises(WeightMismatch, match=r"layers\.0\.v_proj\.weight was not sent, a part of qkv_proj"):
            receive(kind, engine)


@pytest.mark.parametrize("kind", ["0.24", "0.28"])
def test_a_parameter_that_is_lent_memory_is_named_by_either_interface(inherited, kind):
    def keep(weights):
        for _, tensor in weights:
            model.layer[0].data = tensor
        return {"layer.0"}

    register_backend()
    model = Model(1)
    model.load_weights = keep
    with ThreadPoolExecutor(1) as pool:
        pool.submit(send_all, inherited, [("layer.0", torch.ones(BUFFER_BYTES // 4))])
        with pytest.raises(WeightMismatch, match="parameter 'layer.0' instead of copying"):
            receive(kind, make_engine(kind, model))


def test_both_interfaces_are_known_and_ours_fits_the_installed_one():
    assert require_known_interface(Base024) == "0.24"
    assert require_known_interface() == "0.28"
    assert not ChannelTransferEngine.__abstractmethods__


def test_another_interface_is_refused_with_what_was_found_and_what_is_known():
    class Base099(Base024):
        def receive_weights(self, stream) -> None: ...

    text = r"parallel_config.*receive_weights\('stream',\).*0\.24.*0\.28.*backend=verl"
    with pytest.raises(VersionError, match=text):
        require_known_interface(Base099)


def test_another_backend_among_the_engines_arguments_is_refused():
    chosen = {}
    choose_backend(chosen)
    assert chosen == {"weight_transfer_config": {"backend": BACKEND}}
    with pytest.raises(ConfigError, match=r"weight_transfer_config=.*nccl.*backend=verl"):
        choose_backend({"weight_transfer_config": {"backend": "nccl"}})


def test_vllm_finds_the_backend_by_its_entry_point(repository, tmp_path, monkeypatch):
    """An editable installation has the entry points of its last installation, so a folder stands for a fresh one."""
    group = "vllm.general_plugins"
    section = (repository / "pyproject.toml").read_text().partition(f'[project.entry-points."{group}"]')[2]
    folder = tmp_path / "fresh-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fresh\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[{group}]{section.partition('[')[0]}".replace('"', ""))
    (found,) = metadata.distributions(path=[str(tmp_path)])
    for _ in range(2):
        for entry in found.entry_points.select(group=group):
            entry.load()()
    assert WeightTransferEngineFactory._registry[BACKEND]() is ChannelTransferEngine


def test_the_plugin_has_a_process_of_an_engine_end_with_its_server(monkeypatch):
    calls = []
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    monkeypatch.setattr(vllm_plugin, "end_with_parent", lambda: calls.append("watched"))
    register_backend.__wrapped__()
    assert calls == ["watched"]
