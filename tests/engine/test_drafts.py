"""Speculative decoding with `SuffixDrafts`, on a real engine: drafts change how fast tokens come, and nothing else.

Tokens, log-probs and distributions are compared with transformers. vLLM's own counts say how many drafts were right,
so that no test passes without any.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import torch

pytestmark = pytest.mark.engine

PROPOSER = "partial_rollout.rollout.drafts.SuffixDrafts"
DRAFTS = 3
TOLERANCE = 1e-4
NUM_TOKENS = 60
SIBLINGS = 3
STREAM_INTERVAL = 32
"""The default: in a mode whose requests leave the engine, so many tokens are handed over at a time."""


def spaced(length, step):
    """A prompt; the greedy responses to those below repeat themselves little, and have no near-ties."""
    return [3 + step * i % 60 for i in range(length)]


PROMPTS = [spaced(3, 29), spaced(5, 11), spaced(60, 13), spaced(100, 23), spaced(130, 11)]
STOPPED = {2: 49, 4: 22}
"""Where in the responses to some of them the stop token is."""
LONG_PROMPT, LONG = spaced(60, 7), 240
UPDATE_PROMPT = spaced(40, 11)
SAMPLED_PROMPT = [13, 41, 27, 39, 33, 15]
"""The next token is nearly sure, so that siblings draft for each other, and the one after that is not."""
NUM_SAMPLED, SAMPLED_TOKENS = 600, 3
SAMPLINGS = [(1.0, 1.0), (0.75, 0.9)]
"""Temperatures, each with top_p. No sum of likely tokens is within 0.005 of it, which TF32 on a GPU could move past."""
LEAST_EXPECTED = 5.0
"""Responses of a bin of the chi-square test; those that are expected less often share one."""
LEAST_P = 1e-5
MODES = ["reuse_kv", "abort", "keep_kv"]


@pytest.fixture(scope="module")
def engine(engine_cluster, tmp_path_factory):
    """A replica that drafts, and counts it."""
    from verl.plugin.platform import get_platform

    from tests.engine import support
    from tests.engine.conftest import run_engine

    path = tmp_path_factory.mktemp("drafts")
    support.make_model(path, seed=0)
    rollout = "actor_rollout_ref.rollout"
    speculation = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": DRAFTS}
    overrides = {
        f"{rollout}.disable_log_stats": False,
        f"+{rollout}.custom.partial_rollout.tail.interrupt_mode": "reuse_kv",
        f"+{rollout}.custom.partial_rollout.stream_interval": STREAM_INTERVAL,
        **{f"+{rollout}.engine_kwargs.vllm.speculative_config.{key}": value for key, value in speculation.items()},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(get_platform()), "rollout_env_vars", lambda _: support.ANY_CALL)
        running = run_engine(path, support.make_config(path, **overrides), replica_rank=8)
        engine = next(running)
    asyncio.run(support.mend_sampling(engine.replica))
    asyncio.run(take_all_steps_for_equally_long(engine.replica))
    yield engine
    next(running, None)


async def take_all_steps_for_equally_long(replica):
    """By the drafter's clock: on a busy machine the times of its steps may tell it that drafts do not pay."""

    def even(worker):
        import itertools

        worker.model_runner.drafter._clock = map(float, itertools.count()).__next__

    await replica.server_handle.collective_rpc.remote(even)


@pytest.fixture(scope="module")
def model(engine):
    """The weights that the engine was started from."""
    from tests.engine.support import make_model

    return make_model(engine.model_path, seed=0)


@pytest.fixture(scope="module")
def driver(engine):
    """Sends weights by our channel."""
    from tests.engine.support import ChannelDriver

    return ChannelDriver(engine.replica)


def greedy(num_tokens=NUM_TOKENS, **more):
    return {"temperature": 0.0, "logprobs": True, "ignore_eos": True, "max_tokens": num_tokens, **more}


async def generate(engine, prompts, *sampling):
    """All at the same time."""
    params = sampling * len(prompts) if len(sampling) == 1 else sampling
    pairs = enumerate(zip(prompts, params, strict=True))
    return await asyncio.gather(
        *(engine.client.generate(str(i), prompt_ids=ids, sampling_params=dict(each)) for i, (ids, each) in pairs)
    )


def assert_same(output, tokens, log_probs):
    assert output.token_ids == tokens
    assert output.log_probs == pytest.approx(log_probs, abs=TOLERANCE)


async def set_mode(replica, name):
    """Change the mode of the running server, and how often it hands over."""
    from tests.engine.support import set_interrupt_mode

    def change(server, interval):
        server.engine.output_processor.stream_interval = interval

    await set_interrupt_mode(replica, name)
    await replica.server_handle.__ray_call__.remote(change, 1 if name == "keep_kv" else STREAM_INTERVAL)


async def test_greedy_responses_are_the_models_own_and_later_epochs_take_fewer_steps(engine, model):
    from tests.engine.support import count_drafts, greedy_reference

    expected = [greedy_reference(model, ids, NUM_TOKENS) for ids in PROMPTS for _ in range(SIBLINGS)]
    for _ in range(2):
        before = await count_drafts(engine.replica)
        outputs = await generate(engine, [ids for ids in PROMPTS for _ in range(SIBLINGS)], greedy())
        for output, (tokens, log_probs) in zip(outputs, expected, strict=True):
            assert_same(output, tokens, log_probs)
        counted = await count_drafts(engine.replica) - before
        assert counted.drafts > 0
    # At most DRAFTS of DRAFTS + 1 tokens; the first token has no draft.
    assert counted.accepted > 0.65 * len(outputs) * NUM_TOKENS


async def test_a_response_ends_at_a_limit_and_at_a_stop_token_also_within_right_drafts(engine, model):
    from tests.engine.support import MAX_MODEL_LEN, count_drafts, greedy_reference

    references = [greedy_reference(model, ids, NUM_TOKENS) for ids in PROMPTS]
    await generate(engine, PROMPTS, greedy())  # drafts go on after the stop token
    before = await count_drafts(engine.replica)
    limits = range(1, 2 * (DRAFTS + 1) + 1)
    limited = await generate(engine, [PROMPTS[0]] * len(limits), *map(greedy, limits))
    for limit, output in zip(limits, limited, strict=True):
        assert_same(output, *(each[:limit] for each in references[0]))
    ended = await generate(engine, [PROMPTS[i] for i in STOPPED], greedy(ignore_eos=False))
    for output, (which, place) in zip(ended, STOPPED.items(), strict=True):
        assert_same(output, *(each[: place + 1] for each in references[which]))
    assert (await count_drafts(engine.replica) - before).accepted > sum(STOPPED.values()) / 2
    room = 2 * (DRAFTS + 1)
    nearly_full = spaced(MAX_MODEL_LEN - room, 7)
    for _ in range(2):
        (output,) = await generate(engine, [nearly_full], greedy())
        assert_same(output, *greedy_reference(model, nearly_full, room))


async def test_a_response_ends_at_a_stop_string_also_within_right_drafts(engine, model):
    from transformers import AutoTokenizer

    from tests.engine.support import greedy_reference

    tokenizer = engine.client.stop_tokenizer = AutoTokenizer.from_pretrained(engine.model_path)
    tokens, log_probs = greedy_reference(model, PROMPTS[0], NUM_TOKENS)
    await generate(engine, [PROMPTS[0]], greedy())
    ends = range(40, 40 + DRAFTS + 1)
    params = [greedy(stop=[tokenizer.decode(tokens[end - 5 : end])]) for end in ends]
    for end, output in zip(ends, await generate(engine, [PROMPTS[0]] * len(ends), *params), strict=True):
        assert_same(output, tokens[:end], log_probs[:end])


@pytest.mark.parametrize(("temperature", "top_p"), SAMPLINGS)
async def test_sampled_responses_have_the_models_distribution(engine, model, temperature, top_p):
    from tests.engine.support import count_drafts

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": -1, "logprobs": True, "ignore_eos": True}
    before = await count_drafts(engine.replica)
    outputs = await generate(engine, [SAMPLED_PROMPT] * NUM_SAMPLED, {**sampling, "max_tokens": SAMPLED_TOKENS})
    counted = await count_drafts(engine.replica) - before
    responses = torch.tensor([output.token_ids for output in outputs])
    log_probs = following(model, responses[:, :-1], temperature, top_p).log().gather(2, responses[:, :, None])[:, :, 0]
    assert torch.tensor([output.log_probs for output in outputs]).allclose(log_probs, rtol=0, atol=TOLERANCE)
    assert chi_square_p(Counter(map(tuple, responses.tolist())), distribution(model, temperature, top_p)) > LEAST_P
    assert counted.accepted > NUM_SAMPLED / 4


def following(model, responses, temperature, top_p):
    """(responses, tokens + 1, vocabulary): probabilities of each token of a response and of the one after it."""
    ids = torch.cat([torch.tensor([SAMPLED_PROMPT] * len(responses)), responses], dim=1)
    with torch.no_grad():
        likely = torch.softmax(model(ids).logits[:, len(SAMPLED_PROMPT) - 1 :] / temperature, dim=-1)
    ordered, order = likely.sort(dim=-1, descending=True)
    ordered[ordered.cumsum(dim=-1) - ordered >= top_p] = 0  # the more likely ones have the share already
    likely = torch.zeros_like(likely).scatter(-1, order, ordered)
    return likely / likely.sum(dim=-1, keepdim=True)


def distribution(model, temperature, top_p):
    """All responses of SAMPLED_TOKENS tokens that can be, with their probabilities."""
    known = {(): 1.0}
    for _ in range(SAMPLED_TOKENS):
        responses = torch.tensor([*known], dtype=torch.long).view(len(known), -1)
        rows = following(model, responses, temperature, top_p)[:, -1].tolist()
        known = {
            (*before, token): share * each
            for (before, share), row in zip(known.items(), rows, strict=True)
            for token, each in enumerate(row)
            if each
        }
    return known


def chi_square_p(found, expected):
    """How probable it is that counts are as far from what is expected, or farther; by Pearson's test."""
    total = sum(found.values())
    bins = {each: total * share for each, share in expected.items() if total * share >= LEAST_EXPECTED}
    rest = total - sum(found[each] for each in bins), total - sum(bins.values())
    pairs = [*((found[each], number) for each, number in bins.items()), rest]
    statistic = sum((number - wanted) ** 2 / wanted for number, wanted in pairs)
    return float(torch.special.gammaincc(torch.tensor((len(pairs) - 1) / 2), torch.tensor(statistic / 2)))


async def interrupted(engine, prompt, num_tokens, moments):
    """One response whose last interruption has left the gate closed, and its tokens so far; None if it has ended."""
    from tests.engine.support import begin_interruptions, end_interruptions, until

    replica = engine.replica
    start = (await replica.statistics())[0].num_generated_tokens
    await begin_interruptions(replica, moments, opens=True, stays_closed=True)
    task = asyncio.create_task(engine.client.generate("i", prompt_ids=prompt, sampling_params=greedy(num_tokens)))
    aborted = await end_interruptions(replica, is_enough=task.done)
    now = await until(replica, lambda now: task.done() or now.gate.parked == 1)
    if task.done():
        return None
    assert aborted == [1] * len(moments)
    return task, now.num_generated_tokens - start


@pytest.mark.parametrize("mode", MODES)
async def test_an_interrupted_response_goes_on_as_before_and_with_drafts(engine, model, mode):
    from tests.engine.support import continued, count_drafts, in_time

    await set_mode(engine.replica, mode)
    reference = continued(model, model, LONG_PROMPT, 0, LONG)
    (whole,) = await generate(engine, [LONG_PROMPT], greedy(LONG))
    assert_same(whole, *reference)
    task, so_far = await in_time(lambda: interrupted(engine, LONG_PROMPT, LONG, [20, 20]))
    before = await count_drafts(engine.replica)
    await engine.replica.resume_generation()
    output = await task
    counted = await count_drafts(engine.replica) - before
    assert_same(output, *reference)
    assert output.extra_fields["num_interruptions"] == 2
    assert counted.accepted > 0.6 * (LONG - so_far)


@pytest.mark.parametrize("mode", MODES)
async def test_new_weights_check_the_drafts_that_old_ones_left(engine, driver, tmp_path, mode):
    from tests.engine.support import BLOCK_SIZE, continued, count_drafts, in_time, make_model

    replica = engine.replica
    await set_mode(replica, mode)
    version = (await replica.statistics())[0].version
    old, new = (make_model(tmp_path / str(seed), seed=seed) for seed in (501, 502))
    await replica.abort_all_requests()
    await asyncio.to_thread(driver.update, lambda: sent(old), version + 1)
    await replica.resume_generation()
    for _ in range(2):
        (whole,) = await generate(engine, [UPDATE_PROMPT], greedy(LONG))
        assert_same(whole, *continued(old, old, UPDATE_PROMPT, 0, LONG))
    task, cut = await in_time(lambda: interrupted(engine, UPDATE_PROMPT, LONG, [40]))
    await asyncio.to_thread(driver.update, lambda: sent(new), version + 2)
    before = await count_drafts(replica)
    await replica.resume_generation()
    output = await task
    assert output.extra_fields["version_spans"] == [[version + 1, cut], [version + 2, LONG - cut]]
    context = UPDATE_PROMPT + output.token_ids[:cut]
    assert output.token_ids[:cut] == whole.token_ids[:cut]
    kept = len(context) - 1
    num_old = {"keep_kv": kept, "reuse_kv": kept // BLOCK_SIZE * BLOCK_SIZE, "abort": 0}[mode]
    tokens, log_probs = continued(old, new, context, num_old, LONG - cut)
    assert output.token_ids[cut:] == tokens
    assert output.log_probs[cut:] == pytest.approx(log_probs, abs=TOLERANCE)
    assert (await count_drafts(replica) - before).drafts > 0
    await assert_drafts_what_it_said(engine, new)


async def assert_drafts_what_it_said(engine, model):
    """A later epoch drafts what these weights have said."""
    from tests.engine.support import count_drafts, greedy_reference

    for _ in range(2):
        before = await count_drafts(engine.replica)
        (output,) = await generate(engine, [UPDATE_PROMPT], greedy())
        assert_same(output, *greedy_reference(model, UPDATE_PROMPT, NUM_TOKENS))
    assert (await count_drafts(engine.replica) - before).accepted > 0.6 * NUM_TOKENS


def sent(model):
    from tests.engine.support import sent_weights

    return sent_weights(model).items()


async def test_an_engine_that_was_started_again_drafts_with_the_weights_that_it_is_sent(engine, driver, tmp_path):
    from tests.engine.support import make_model

    new = make_model(tmp_path, seed=503)
    await engine.replica.abort_all_requests()
    await engine.replica.relaunch()
    await asyncio.to_thread(driver.update, lambda: sent(new), 100)
    await engine.replica.resume_generation()
    await assert_drafts_what_it_said(engine, new)
