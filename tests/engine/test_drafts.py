"""Speculative decoding with `SuffixDrafts`, on a real engine: drafts change how fast tokens come, and nothing else.

Tokens, log-probs and distributions are compared with transformers; vLLM's own counts say that drafts were made and
accepted, so that a test cannot pass without any.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

pytestmark = pytest.mark.engine

SPECULATION = {"method": "custom_class", "model": "partial_rollout.rollout.drafts.SuffixDrafts"}
DRAFTS = 3
TOLERANCE = 1e-4
NUM_TOKENS = 60
SIBLINGS = 3
PROMPTS = ([11, 12, 13, 14], [20, 3, 9], [3 + (7 * i) % 60 for i in range(100)], [3 + i % 60 for i in range(140)])
"""Of their greedy responses the model repeats little, so right drafts come from other responses."""
SAMPLED_PROMPT = [13, 41, 27, 39, 33, 15]
"""Its next token is nearly sure, so that siblings draft for each other, and the one after that is not."""
NUM_SAMPLED, SAMPLED_TOKENS = 600, 3
LEAST_EXPECTED = 5.0
"""Responses of a bin of the chi-square test; those that are expected less often share one."""
LEAST_P = 1e-4
MODES = ["reuse_kv", "abort", "keep_kv"]


@pytest.fixture(scope="module")
def engine(engine_cluster, tmp_path_factory):
    """A replica that drafts, and counts it."""
    from tests.engine import support
    from tests.engine.conftest import run_engine

    path = tmp_path_factory.mktemp("drafts")
    support.make_model(path, seed=0)
    rollout = "actor_rollout_ref.rollout"
    speculation = {**SPECULATION, "num_speculative_tokens": DRAFTS}
    overrides = {
        f"{rollout}.disable_log_stats": False,
        f"+{rollout}.custom.partial_rollout.tail.interrupt_mode": "reuse_kv",
        **{f"+{rollout}.engine_kwargs.vllm.speculative_config.{key}": value for key, value in speculation.items()},
    }
    yield from run_engine(path, support.make_config(path, **overrides), replica_rank=8)


@pytest.fixture(scope="module")
def model(engine):
    """The weights that the engine was started from."""
    from tests.engine.support import make_model

    return make_model(engine.model_path, seed=0)


def greedy(num_tokens=NUM_TOKENS, **more):
    return {"temperature": 0.0, "logprobs": True, "ignore_eos": True, "max_tokens": num_tokens, **more}


async def generate(engine, prompts, sampling):
    """All at the same time."""
    each = (engine.client.generate(str(i), prompt_ids=ids, sampling_params=sampling) for i, ids in enumerate(prompts))
    return await asyncio.gather(*each)


def assert_same(output, tokens, log_probs):
    assert output.token_ids == tokens
    assert output.log_probs == pytest.approx(log_probs, abs=TOLERANCE)


async def test_greedy_responses_are_the_models_own_and_later_epochs_take_fewer_steps(engine, model):
    from tests.engine.support import count_drafts, greedy_reference

    expected = [greedy_reference(model, ids, NUM_TOKENS) for ids in PROMPTS for _ in range(SIBLINGS)]
    accepted = []
    for _ in range(2):
        before = await count_drafts(engine.replica)
        outputs = await generate(engine, [ids for ids in PROMPTS for _ in range(SIBLINGS)], greedy())
        for output, (tokens, log_probs) in zip(outputs, expected, strict=True):
            assert_same(output, tokens, log_probs)
        counted = await count_drafts(engine.replica) - before
        print("COUNTED", counted)
        assert counted.drafts > 0
        accepted.append(counted.accepted / (len(outputs) * NUM_TOKENS))
    # At most DRAFTS of DRAFTS + 1 tokens; the last step may be cut, and the first token has no draft.
    assert accepted[0] < 0.3
    assert accepted[1] > 0.65
