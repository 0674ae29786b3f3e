"""New weights in a running engine, sent by our own channel."""

from __future__ import annotations

import asyncio

import pytest
import torch

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def tied(engine):
    """The session's engine: one worker, tied embeddings; and the weights it was started from."""
    from tests.engine import support

    return engine, support.ChannelDriver(engine.replica), support.make_model(engine.model_path, seed=0)


@pytest.fixture(scope="module")
def tensor_parallel(engine_cluster, tmp_path_factory):
    """Two engine workers with untied embeddings, which refuse NaN."""
    from tests.engine import support
    from tests.engine.conftest import run_engine

    path = tmp_path_factory.mktemp("untied_tp")
    model = support.make_model(path, seed=21, tied=False)
    overrides = {
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "+actor_rollout_ref.rollout.custom.partial_rollout.weights.validate": True,
    }
    for engine in run_engine(path, support.make_config(path, **overrides), replica_rank=4):
        yield engine, support.ChannelDriver(engine.replica), model


async def update(driver, weights, version):
    await driver.replica.abort_all_requests()
    await asyncio.to_thread(driver.update, weights, version)
    await driver.replica.resume_generation()


def assert_equal(outputs, wanted):
    for (tokens, log_probs), (wanted_tokens, wanted_log_probs) in zip(outputs, wanted, strict=True):
        assert tokens == wanted_tokens
        assert log_probs == pytest.approx(wanted_log_probs, abs=1e-6)


async def there_and_back(setup, tmp_path, order):
    """To other weights and back to those the engine was started from: it must be as it was when fresh."""
    from tests.engine.support import (
        NUM_PROBE_TOKENS,
        PROBES,
        greedy_reference,
        make_model,
        mapped_segments,
        probe,
        sent_weights,
    )

    engine, driver, model = setup
    other = make_model(tmp_path, seed=121, tied=model.config.tie_word_embeddings)
    await update(driver, order(sent_weights(other)), 7)
    changed = [tokens for tokens, _ in await probe(engine.client)]
    assert changed == [greedy_reference(other, ids, NUM_PROBE_TOKENS)[0] for ids in PROBES]
    assert changed != [tokens for tokens, _ in engine.fresh]
    await update(driver, order(sent_weights(model)), 8)
    assert await mapped_segments(driver.replica) == []
    assert_equal(await probe(engine.client), engine.fresh)
    assert (await engine.replica.statistics())[0].version == 8


def file_order(weights):
    return weights.items()


def shuffled(weights):
    from tests.engine.support import spread_order

    return [(name, weights[name]) for name in spread_order(list(weights))]


@pytest.mark.parametrize("slot_bytes", [None, 64 << 10], ids=["every tensor fits a slot", "few tensors fit a slot"])
@pytest.mark.parametrize("order", [file_order, shuffled])
async def test_a_tied_model_is_as_if_started_from_the_new_weights(tied, tmp_path, order, slot_bytes):
    tied[1].slot_bytes = slot_bytes
    await there_and_back(tied, tmp_path, order)


@pytest.mark.parametrize("order", [file_order, shuffled])
async def test_every_rank_of_an_untied_model_gets_its_part(tensor_parallel, tmp_path, order):
    await there_and_back(tensor_parallel, tmp_path, order)


# ---- from here on the tensor-parallel engine cannot be used any more: the order of the tests matters ----

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

    _, driver, model = tensor_parallel
    # Nothing but updates from here: after a failed call vLLM takes the second worker's answer for that of the next one.
    with pytest.raises(WeightUpdateError, match=text):
        await asyncio.to_thread(driver.update, change(sent_weights(model)).items(), 9)


async def test_an_engine_with_half_an_update_generates_nothing(tensor_parallel):
    from partial_rollout.errors import EngineDead

    replica = tensor_parallel[0].replica
    with pytest.raises(EngineDead, match="weight update"):
        await replica.check_health()
    with pytest.raises(EngineDead, match="weight update"):
        await replica.server_handle.open_submission_gate.remote()
    with pytest.raises(EngineDead, match="weight update"):
        await replica.server_handle.generate.remote([5, 6], {"max_tokens": 4}, "x")
    assert (await replica.statistics())[0].version == 8


async def test_a_worker_killed_in_the_middle_is_named_on_both_ends(tensor_parallel):
    from partial_rollout.errors import WeightPeerLost, WeightUpdateError
    from tests.engine.support import sent_weights, worker_process

    _, driver, model = tensor_parallel
    worker = await worker_process(driver.replica, rank=0)
    weights = sent_weights(model)

    def killing():
        for count, item in enumerate(weights.items()):
            if count == 5:
                worker.kill()
            yield item

    update, sent = await asyncio.to_thread(driver.run, [killing(), weights.items()], 9)
    with pytest.raises(WeightPeerLost, match="rank-0.sock is gone"):
        sent[0].result()
    with pytest.raises(WeightUpdateError, match="version 9"):
        await update
