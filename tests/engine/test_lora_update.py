"""LoRA adapters in a running engine, sent by our own channel."""

from __future__ import annotations

import asyncio

import pytest
import torch

pytestmark = pytest.mark.engine

EVENTS = "+actor_rollout_ref.rollout.custom.partial_rollout.events"


@pytest.fixture(scope="module")
def lora(engine_cluster, tmp_path_factory):
    """An engine that takes adapters, and the model below them, which it loaded by itself."""
    from tests.engine import support
    from tests.engine.conftest import run_engine

    path = tmp_path_factory.mktemp("lora")
    model = support.make_model(path, seed=41)
    options = {"actor_rollout_ref.model.lora_rank": 8, EVENTS: path / "events"}
    config = support.make_config(path, **options)
    for engine in run_engine(path, config, replica_rank=5):
        yield engine, support.ChannelDriver(engine.replica), model


def with_adapter(model, seed):
    """A copy of the model with a random adapter, the adapter's tensors and its configuration, as verl sends them."""
    import copy

    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(seed)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    options = LoraConfig(r=8, lora_alpha=16, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(copy.deepcopy(model), options).eval()
    return adapted, get_peft_model_state_dict(adapted), adapted.peft_config["default"].to_dict()


async def test_an_adapter_and_the_one_after_it_are_generated_with(lora):
    engine, driver, model = lora
    for version, seed in ((3, 1), (4, 2)):
        await assert_generates_with(engine, driver, *with_adapter(model, seed), version=version)


async def test_an_adapter_the_model_cannot_take_is_an_error(lora):
    from partial_rollout.errors import WeightUpdateError

    engine, driver, model = lora
    _, tensors, peft_config = with_adapter(model, 3)
    await engine.replica.abort_all_requests()
    changed = {name.replace("q_proj", "no_such_proj"): tensor for name, tensor in tensors.items()}
    with pytest.raises(WeightUpdateError, match=r"version 5.*layers.0.self_attn.no_such_proj.* belongs to no module"):
        await asyncio.to_thread(driver.update, changed.items, 5, peft_config=peft_config)


async def test_an_engine_over_http_asks_for_the_key_of_the_run_and_a_relaunched_one_leaves_no_port(lora):
    from partial_rollout.rollout.http_server import KEY_FILE
    from tests.engine.support import CALL_S, http_status

    engine, _, _ = lora
    server = engine.replica.server_handle
    key = (engine.model_path / "events" / KEY_FILE).read_text().strip()
    old = await asyncio.wait_for(server.get_server_address.remote(), CALL_S)
    await engine.replica.relaunch()
    new = await asyncio.wait_for(server.get_server_address.remote(), CALL_S)
    (was, now) = (f"{host}:{port}" for host, port in (old, new))
    assert http_status(was, "/health") == 0
    assert [http_status(now, path) for path in ("/health", "/metrics")] == [200, 200]
    assert [http_status(now, "/v1/models", given) for given in (None, "another", key)] == [401, 401, 200]


async def test_a_relaunched_engine_loads_its_base_weights_and_takes_the_adapter_again(lora):
    from partial_rollout.errors import WeightUpdateError

    engine, driver, model = lora
    adapted, tensors, peft_config = with_adapter(model, 4)
    await engine.replica.relaunch()
    await assert_generates_with(engine, driver, adapted, tensors, peft_config, version=6)
    await engine.replica.abort_all_requests()
    first = next(name for name in tensors if "lora_B" in name)
    del tensors[first]
    with pytest.raises(WeightUpdateError, match=r"lora_B of module 'model.layers.0.* was not sent"):
        await asyncio.to_thread(driver.update, tensors.items, 7, peft_config=peft_config)


async def assert_generates_with(engine, driver, adapted, tensors, peft_config, *, version):
    from tests.engine.support import NUM_PROBE_TOKENS, PROBES, greedy_reference, probe

    await engine.replica.abort_all_requests()
    await asyncio.to_thread(driver.update, tensors.items, version, peft_config=peft_config)
    await engine.replica.resume_generation()
    outputs = await probe(engine.client)
    for (tokens, log_probs), ids in zip(outputs, PROBES, strict=True):
        wanted_tokens, wanted_log_probs = greedy_reference(adapted, ids, NUM_PROBE_TOKENS)
        assert tokens == wanted_tokens
        assert log_probs == pytest.approx(wanted_log_probs, abs=1e-4)
    assert [tokens for tokens, _ in outputs] != [tokens for tokens, _ in engine.fresh]
    assert (await engine.replica.statistics())[0].version == version
