"""Requests that leave something in a real engine when they are interrupted: tokens, KV, and what they are worth.

Greedy tokens and their log-probs are compared with transformers, whose cache can be made of two sets of weights.
"""

from __future__ import annotations

import asyncio
import random

import pytest

pytestmark = pytest.mark.engine

NUM_TOKENS = 90
PROMPT = [3 + (7 * i) % 60 for i in range(100)]
"""Fills several blocks of the prefix cache."""
TOLERANCE = 1e-4
VISIBLE = 1e-2
"""By far more than rounding: KV of other weights."""
MODES = ["keep_kv", "reuse_kv"]


def greedy(num_tokens=NUM_TOKENS):
    return {"temperature": 0.0, "logprobs": True, "ignore_eos": True, "max_tokens": num_tokens}


@pytest.fixture(scope="module")
def engine(engine_cluster, tmp_path_factory):
    """A replica whose requests stay in it, with an untied model."""
    from tests.engine import support
    from tests.engine.conftest import run_engine

    path = tmp_path_factory.mktemp("kept")
    support.make_model(path, seed=400, tied=False)
    mode = {"+actor_rollout_ref.rollout.custom.partial_rollout.tail.interrupt_mode": "keep_kv"}
    yield from run_engine(path, support.make_config(path, **mode), replica_rank=6)


@pytest.fixture
def models(tmp_path):
    from tests.engine.support import make_model

    return [make_model(tmp_path / str(seed), seed=seed, tied=False) for seed in (401, 402)]


async def set_weights(engine, model, version):
    from tests.engine.support import send_weights

    await engine.replica.abort_all_requests()
    await send_weights(engine.replica, model, version)
    await engine.replica.resume_generation()


async def over_an_update(engine, model, *, at_least, lifted=None):
    """One response that weights change in; the numbers of requests that stayed, and that were still there after.

    `lifted`: until then the response does not come back to the engine.
    """
    from tests.engine.support import begin_interruptions, end_interruptions, in_time, send_weights, until

    replica, client = engine.replica, engine.client
    version = (await replica.statistics())[0].version

    async def interrupted():
        segments = []

        async def hold():
            segments.append(len(segments))
            if len(segments) > 1:
                await lifted.wait()

        client.before_segment = lifted and hold
        await begin_interruptions(replica, [at_least], opens=True, stays_closed=True)
        task = asyncio.create_task(client.generate("k", prompt_ids=PROMPT, sampling_params=greedy()))
        aborted = await end_interruptions(replica)
        await until(replica, lambda now: task.done() or now.gate.parked == 1 or len(segments) > 1)
        if task.done():
            return None
        assert aborted == [1]
        return task

    task = await in_time(interrupted)
    kept = (await replica.statistics())[0]
    await send_weights(replica, model, version + 1)
    after = (await replica.statistics())[0]
    assert (kept.gate.in_flight, after.num_generated_tokens) == (0, kept.num_generated_tokens)
    await replica.resume_generation()
    return task, kept.kept


def parts(output):
    """Versions of the two spans, and where the first ends."""
    (first, num_first), (second, num_second) = output.extra_fields["version_spans"]
    assert num_first + num_second == NUM_TOKENS
    return first, second, num_first


@pytest.mark.parametrize("mode", MODES)
async def test_tokens_after_an_update_are_of_the_new_weights_on_the_kv_that_the_mode_says(engine, models, mode):
    from tests.engine.support import BLOCK_SIZE, continued, greedy_reference, set_interrupt_mode

    await set_interrupt_mode(engine.replica, mode)
    await set_weights(engine, models[0], 10)
    before = (await engine.replica.statistics())[0]
    task, kept = await over_an_update(engine, models[1], at_least=20)
    assert kept == (0 if mode == "reuse_kv" else 1)
    fresh = [await engine.client.generate(str(i), prompt_ids=PROMPT, sampling_params=greedy(30)) for i in range(2)]
    output = await task
    first, second, cut = parts(output)
    assert (first, second) == (10, 11)
    assert cut >= 20

    # What was said before the update is of the first weights, to the last token.
    assert output.token_ids[:cut] == greedy_reference(models[0], PROMPT, cut)[0]
    # What came after is of the second, on KV that is as old as recorded.
    context = PROMPT + output.token_ids[:cut]
    num_old = {"keep_kv": len(context) - 1, "reuse_kv": (len(context) - 1) // BLOCK_SIZE * BLOCK_SIZE}[mode]
    tokens, log_probs = continued(*models, context, num_old, NUM_TOKENS - cut)
    assert output.token_ids[cut:] == tokens
    assert output.log_probs[cut:] == pytest.approx(log_probs, abs=TOLERANCE)
    recomputed = continued(*models, context, 0, NUM_TOKENS - cut)
    is_recomputed = output.log_probs[cut:] == pytest.approx(recomputed[1], abs=VISIBLE)
    assert not is_recomputed
    assert output.extra_fields["context_spans"] == [[10, "fresh", cut], [10, mode, NUM_TOKENS - cut]]
    computed_again = {"keep_kv": 0, "reuse_kv": len(context) - num_old}[mode]
    assert output.extra_fields["num_reprefilled_tokens"] == computed_again
    after = (await engine.replica.statistics())[0]
    assert after.num_reprefilled_tokens - before.num_reprefilled_tokens == computed_again

    # Nobody else meets the old KV, though the prompt is the same; who comes second finds the first one's prompt.
    tokens, log_probs = greedy_reference(models[1], PROMPT, 30)
    for each in fresh:
        assert each.token_ids == tokens
        assert each.log_probs == pytest.approx(log_probs, abs=TOLERANCE)
    found = [each.extra_fields["num_cached_tokens"] for each in fresh]
    assert found[1] == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
    assert found[0] == 0


async def test_a_request_that_nobody_comes_back_for_leaves_the_engine_and_can_go_on_later(engine, models):
    from tests.engine.support import set_interrupt_mode, until

    await set_interrupt_mode(engine.replica, "keep_kv")
    await set_weights(engine, models[0], 20)
    lifted = asyncio.Event()
    task, kept = await over_an_update(engine, models[1], at_least=20, lifted=lifted)
    assert kept == 1
    now = await until(engine.replica, lambda s: s.kept == 0)
    assert (now.gate.in_flight, now.gate.parked) == (0, 0)
    lifted.set()
    output = await task
    engine.client.before_segment = None
    _, _, cut = parts(output)
    # The request's blocks are still in the prefix cache, under its own salt.
    assert output.extra_fields["context_spans"] == [[20, "fresh", cut], [20, "keep_kv", NUM_TOKENS - cut]]


@pytest.mark.parametrize("mode", MODES)
async def test_a_group_interrupted_ten_times_at_random_moments_equals_itself(engine, models, mode):
    from tests.engine.support import begin_interruptions, end_interruptions, in_time, set_interrupt_mode, until

    replica = engine.replica
    await set_interrupt_mode(replica, mode)
    prompts = [[10 + i, 20, 30 + i, 40] for i in range(8)]

    def start(name):
        return [
            asyncio.create_task(engine.client.generate(f"{name}{i}", prompt_ids=p, sampling_params=greedy(120)))
            for i, p in enumerate(prompts)
        ]

    reference = await asyncio.gather(*start("r"))
    moments = random.Random(0)

    async def interrupted():
        await replica.abort_all_requests()
        tasks, num_interrupted = start("i"), 0
        for _ in range(10):
            await begin_interruptions(replica, [moments.randint(1, 60)], opens=True, stays_closed=True)
            await end_interruptions(replica, is_enough=lambda: all(task.done() for task in tasks))
            done = sum(task.done() for task in tasks)
            now = await until(
                engine.replica, lambda s: s.gate.parked + sum(task.done() for task in tasks) == len(tasks)
            )
            num_interrupted += now.gate.parked
            assert now.kept <= (0 if mode == "reuse_kv" else len(tasks) - done)
        await replica.resume_generation()
        for output, expected in zip(await asyncio.gather(*tasks), reference, strict=True):
            assert output.token_ids == expected.token_ids
            assert output.log_probs == pytest.approx(expected.log_probs, abs=TOLERANCE)
            assert sum(count for *_, count in output.extra_fields["context_spans"]) == 120
        return True if num_interrupted >= 10 else None

    assert await in_time(interrupted)
