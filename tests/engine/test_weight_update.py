"""New weights in a running engine, sent by verl's own sender."""

from __future__ import annotations

import asyncio
import copy

import pytest

pytestmark = pytest.mark.engine

PROMPT = [11, 12, 13, 14]
NUM_TOKENS = 48
LONG_PROMPT = [3 + i % 60 for i in range(100)]
"""Fills several blocks of the prefix cache."""
GREEDY = {"temperature": 0.0, "logprobs": True, "ignore_eos": True, "max_tokens": NUM_TOKENS}


async def update(replica, model, version, names=None):
    from tests.engine.support import send_weights

    await replica.abort_all_requests()
    await send_weights(replica, model, version, names)
    await replica.resume_generation()


async def assert_engine_equals(client, model, version, prompt=PROMPT):
    from tests.engine.support import greedy_reference

    output = await client.generate("w", prompt_ids=prompt, sampling_params=GREEDY)
    tokens, log_probs = greedy_reference(model, prompt, NUM_TOKENS)
    assert output.token_ids == tokens
    assert output.log_probs == pytest.approx(log_probs, abs=1e-4)
    assert output.extra_fields["version_spans"] == [[version, NUM_TOKENS]]
    return output


async def num_cached_tokens(client):
    """Prompt tokens that a new request finds in the prefix cache."""
    output = await client.generate("n", prompt_ids=LONG_PROMPT, sampling_params={**GREEDY, "max_tokens": 1})
    return output.extra_fields["num_cached_tokens"]


async def test_tied_model_generates_with_the_new_weights(engine, tmp_path):
    from tests.engine.support import make_model

    for version, seed in ((1, 101), (2, 102)):
        model = make_model(tmp_path / str(seed), seed=seed)
        await update(engine.replica, model, version)
        await assert_engine_equals(engine.client, model, version)


async def test_an_update_forgets_what_the_old_weights_cached(engine, tmp_path):
    from tests.engine.support import BLOCK_SIZE, make_model

    await num_cached_tokens(engine.client)
    assert await num_cached_tokens(engine.client) >= 2 * BLOCK_SIZE
    model = make_model(tmp_path, seed=151)
    await update(engine.replica, model, 3)
    output = await assert_engine_equals(engine.client, model, 3, LONG_PROMPT)
    assert output.extra_fields["num_cached_tokens"] == 0


async def test_a_drain_forgets_the_prefix_cache_by_itself(engine):
    from tests.engine.support import BLOCK_SIZE

    await num_cached_tokens(engine.client)
    assert await num_cached_tokens(engine.client) >= 2 * BLOCK_SIZE
    await engine.replica.abort_all_requests()
    await engine.replica.resume_generation()
    assert await num_cached_tokens(engine.client) == 0


async def test_a_request_parked_through_an_update_goes_on_with_the_new_weights(engine, tmp_path):
    from tests.engine.support import (
        begin_interruptions,
        end_interruptions,
        greedy_reference,
        in_time,
        make_model,
        send_weights,
        until,
    )

    first, second = (make_model(tmp_path / str(seed), seed=seed) for seed in (201, 202))
    await update(engine.replica, first, 10)

    async def interrupted():
        await begin_interruptions(engine.replica, [1], opens=True, stays_closed=True)
        task = asyncio.create_task(engine.client.generate("p", prompt_ids=PROMPT, sampling_params=GREEDY))
        await end_interruptions(engine.replica)
        await until(engine.replica, lambda statistics: task.done() or statistics.gate.parked == 1)
        return None if task.done() else task

    task = await in_time(interrupted)
    await send_weights(engine.replica, second, 11)
    await engine.replica.resume_generation()
    output = await task
    spans = output.extra_fields["version_spans"]
    num_old = sum(count for version, count in spans if version == 10)
    assert 0 < num_old < NUM_TOKENS
    assert spans[-1] == [11, NUM_TOKENS - num_old]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (spans[0][0], 11)
    assert output.token_ids[:num_old] == greedy_reference(first, PROMPT, num_old)[0]
    rest, log_probs = greedy_reference(second, PROMPT + output.token_ids[:num_old], NUM_TOKENS - num_old)
    assert output.token_ids[num_old:] == rest
    assert output.log_probs[num_old:] == pytest.approx(log_probs, abs=1e-4)


@pytest.fixture(scope="module")
def untied(engine_cluster, tmp_path_factory):
    from partial_rollout.rollout.client import ResumingLLMServerClient
    from tests.engine import support

    path = tmp_path_factory.mktemp("untied")
    support.make_model(path, seed=1, tied=False)
    config = support.make_config(path)
    replica = asyncio.run(support.launch(config, replica_rank=1))
    yield replica, ResumingLLMServerClient(config, support.make_router(replica))
    asyncio.run(replica.shutdown())


async def test_untied_model_generates_with_the_new_weights(untied, tmp_path):
    from tests.engine.support import make_model

    replica, client = untied
    model = make_model(tmp_path, seed=301, tied=False)
    await update(replica, model, 5)
    await assert_engine_equals(client, model, 5)


async def test_weights_that_were_not_sent_are_an_error(untied, tmp_path):
    from tests.engine.support import make_model

    replica, _ = untied
    model = make_model(tmp_path, seed=302, tied=False)
    names = [name for name in model.state_dict() if "layers.1.mlp.down_proj" not in name]
    # vLLM carries a worker's error to its front end as plain text.
    with pytest.raises(Exception, match=r"1 of \d+ parameters were not sent.*layers\.1\.mlp\.down_proj"):
        await update(replica, model, 6, names)


async def test_a_tensor_of_the_wrong_shape_is_reported_as_such(untied, tmp_path):
    from tests.engine.support import make_model

    replica, _ = untied
    model = copy.deepcopy(make_model(tmp_path, seed=303, tied=False))
    model.model.layers[0].mlp.down_proj.weight.data = model.model.layers[0].mlp.down_proj.weight.data[:, :-1].clone()
    with pytest.raises(Exception, match="failed while loading"):
        await update(replica, model, 7)
