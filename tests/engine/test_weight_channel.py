"""New weights in a running engine, sent by our own channel."""

from __future__ import annotations

import asyncio

import pytest
import torch

pytestmark = pytest.mark.engine

LONG_PROMPT = [3 + i % 60 for i in range(140)]
"""Fills several blocks of the prefix cache, also at vLLM's default block size of 128."""
PROMPTS = ([11, 12, 13, 14], [20, 3, 9], LONG_PROMPT)
NUM_TOKENS = 32
GREEDY = {"temperature": 0.0, "logprobs": True, "ignore_eos": True, "max_tokens": NUM_TOKENS}


@pytest.fixture(scope="module")
def tensor_parallel(engine_cluster, tmp_path_factory):
    """Two engine workers with untied embeddings; the weights it was started from, and what it generated with them."""
    from partial_rollout.rollout.client import ResumingLLMServerClient
    from tests.engine import support

    path = tmp_path_factory.mktemp("untied_tp")
    model = support.make_model(path, seed=21, tied=False)
    overrides = {
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "+actor_rollout_ref.rollout.custom.partial_rollout.weights.validate": True,
    }
    config = support.make_config(path, **overrides)
    replica = asyncio.run(support.launch(config, replica_rank=4))
    client = ResumingLLMServerClient(config, support.make_router(replica))
    fresh = asyncio.run(generate(client))
    yield support.ChannelDriver(replica), client, model, fresh
    asyncio.run(replica.shutdown())


@pytest.fixture(scope="module")
def tied(engine_cluster, tmp_path_factory):
    """One engine worker with tied embeddings."""
    from partial_rollout.rollout.client import ResumingLLMServerClient
    from tests.engine import support

    path = tmp_path_factory.mktemp("tied_channel")
    model = support.make_model(path, seed=22)
    config = support.make_config(path)
    replica = asyncio.run(support.launch(config, replica_rank=5))
    client = ResumingLLMServerClient(config, support.make_router(replica))
    fresh = asyncio.run(generate(client))
    yield support.ChannelDriver(replica), client, model, fresh
    asyncio.run(replica.shutdown())


async def generate(client):
    outputs = []
    for prompt in PROMPTS:
        outputs.append(await client.generate("g", prompt_ids=prompt, sampling_params=GREEDY))
    return [(output.token_ids, output.log_probs) for output in outputs]


async def update(driver, weights, version):
    await driver.replica.abort_all_requests()
    await asyncio.to_thread(driver.update, weights, version)
    await driver.replica.resume_generation()


def assert_equal(outputs, wanted):
    for (tokens, log_probs), (wanted_tokens, wanted_log_probs) in zip(outputs, wanted, strict=True):
        assert tokens == wanted_tokens
        assert log_probs == pytest.approx(wanted_log_probs, abs=1e-6)


async def there_and_back(setup, tmp_path, order):
    """To other weights and back to those the engine was started from: it must be as fresh."""
    from tests.engine.support import greedy_reference, make_model, sent_weights

    driver, client, model, fresh = setup
    other = make_model(tmp_path, seed=121, tied=model.config.tie_word_embeddings)
    await update(driver, order(sent_weights(other)), 7)
    changed = await generate(client)
    assert [tokens for tokens, _ in changed] == [greedy_reference(other, p, NUM_TOKENS)[0] for p in PROMPTS]
    assert changed != fresh
    await update(driver, order(sent_weights(model)), 8)
    assert_equal(await generate(client), fresh)
    assert (await driver.replica.statistics())[0].version == 8


def file_order(weights):
    return weights.items()


def shuffled(weights):
    from tests.engine.support import spread_order

    return [(name, weights[name]) for name in spread_order(list(weights))]


@pytest.mark.parametrize("order", [file_order, shuffled])
async def test_a_tied_model_is_as_if_started_from_the_new_weights(tied, tmp_path, order):
    await there_and_back(tied, tmp_path, order)


@pytest.mark.parametrize("order", [file_order, shuffled])
async def test_every_rank_of_an_untied_model_gets_its_part(tensor_parallel, tmp_path, order):
    await there_and_back(tensor_parallel, tmp_path, order)


# ---- from here on the engines are no longer usable: the order of the tests in this file matters ----

DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"


def without_one(weights):
    return {name: tensor for name, tensor in weights.items() if name != DOWN_PROJ}


def with_another_shape(weights):
    return weights | {DOWN_PROJ: weights[DOWN_PROJ][:-1]}


def with_a_stranger(weights):
    return {"model.layers.9.mlp.weight": weights[DOWN_PROJ], **weights}


def with_nan(weights):
    return weights | {DOWN_PROJ: torch.full_like(weights[DOWN_PROJ], float("nan"))}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_one, rf"1 of \d+ parameters were not sent.*{DOWN_PROJ}"),
        (with_another_shape, rf"failed while loading .*{DOWN_PROJ}"),
        (with_a_stranger, r"layers\.9\.mlp\.weight"),
        (with_nan, f"{DOWN_PROJ}' holds NaN"),
    ],
)
async def test_weights_the_model_cannot_take_are_named(tensor_parallel, change, text):
    from partial_rollout.errors import WeightUpdateError
    from tests.engine.support import sent_weights

    driver, _, model, _ = tensor_parallel
    await driver.replica.abort_all_requests()
    with pytest.raises(WeightUpdateError, match=text):
        await asyncio.to_thread(driver.update, change(sent_weights(model)).items(), 9)


async def test_an_engine_with_half_an_update_generates_nothing(tensor_parallel):
    from partial_rollout.errors import EngineDead

    driver, _, _, _ = tensor_parallel
    replica = driver.replica
    with pytest.raises(EngineDead, match="weight update"):
        await replica.check_health()
    with pytest.raises(EngineDead, match="weight update"):
        await replica.resume_generation()
    with pytest.raises(EngineDead, match="weight update"):
        await replica.server_handle.generate.remote([5, 6], dict(GREEDY), "x")
    assert (await replica.statistics())[0].version == 8


async def test_a_worker_killed_in_the_middle_is_named_on_both_ends(tied):
    from partial_rollout.errors import PartialRolloutError, WeightPeerLost, WeightUpdateError
    from tests.engine.support import sent_weights, worker_process

    driver, _, model, _ = tied
    await driver.replica.abort_all_requests()
    worker = await worker_process(driver.replica)
    driver.round += 1

    def weights():
        for count, item in enumerate(sent_weights(model).items()):
            if count == 5:
                worker.kill()
            yield item

    with driver.sender(0) as sender:
        update = driver.replica.server_handle.receive_weights.remote(round=driver.round, version=9)
        with pytest.raises(WeightPeerLost, match="is gone"):
            await asyncio.to_thread(sender.send, weights())
    with pytest.raises(WeightUpdateError, match="version 9"):
        await update
    with pytest.raises(PartialRolloutError, match="weight update"):
        await driver.replica.check_health()
