"""Speculative decoding with `SuffixDrafts` on a GPU, where drafts are checked by other kernels than on a CPU.

With the older runner's CUDA graphs, as in a run. Tokens, log-probs and distributions are compared with transformers.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.engine import test_drafts as on_a_cpu

TOLERANCE = 2e-2
"""Difference of log-probs: attention multiplies in TF32."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """The model of the tests on a CPU."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(model_path):
    """The weights of that model."""
    from tests.engine.support import make_model

    return make_model(model_path, seed=0)


@pytest.fixture(scope="module")
def engine(model, model_path):
    """An engine that drafts."""
    from vllm import LLM

    speculation = {"method": "custom_class", "model": on_a_cpu.PROPOSER, "num_speculative_tokens": on_a_cpu.DRAFTS}
    return LLM(
        str(model_path),
        dtype="float32",
        max_model_len=model.config.max_position_embeddings,
        max_num_seqs=64,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 28,
        logprobs_mode="processed_logprobs",
        speculative_config=speculation,
        disable_log_stats=False,
    )


def counts(engine):
    """Checked steps, and drafts that were right."""
    found = {each.name: each for each in engine.get_metrics()}
    return [found[f"vllm:spec_decode_num_{name}"].value for name in ("drafts", "accepted_tokens")]


def generate(engine, prompts, **sampling):
    """(tokens, log-probs) of each response."""
    from vllm import SamplingParams

    params = SamplingParams(logprobs=0, ignore_eos=True, **sampling)
    answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    said = [answer.outputs[0] for answer in answers]
    return [
        (
            list(each.token_ids),
            [at[token].logprob for at, token in zip(each.logprobs, each.token_ids, strict=True)],
        )
        for each in said
    ]


def test_greedy_responses_are_the_models_own_and_later_epochs_take_fewer_steps(engine, model):
    from tests.engine.support import greedy_reference

    prompts = [ids for ids in on_a_cpu.PROMPTS for _ in range(on_a_cpu.SIBLINGS)]
    expected = [greedy_reference(model, ids, on_a_cpu.NUM_TOKENS) for ids in prompts]
    for _ in range(2):
        before = counts(engine)
        found = generate(engine, prompts, temperature=0.0, max_tokens=on_a_cpu.NUM_TOKENS)
        difference = max(
            abs(x - y) for (_, a), (_, b) in zip(found, expected, strict=True) for x, y in zip(a, b, strict=True)
        )
        print("greedy", difference, [x - y for x, y in zip(counts(engine), before, strict=True)])
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert difference < TOLERANCE
    assert counts(engine)[1] - before[1] > 0.65 * len(prompts) * on_a_cpu.NUM_TOKENS


@pytest.mark.parametrize(("temperature", "top_p"), on_a_cpu.SAMPLINGS)
def test_sampled_responses_have_the_models_distribution(engine, model, temperature, top_p):
    before = counts(engine)
    number, sampling = on_a_cpu.NUM_SAMPLED, {"temperature": temperature, "top_p": top_p}
    found = generate(engine, [on_a_cpu.SAMPLED_PROMPT] * number, max_tokens=on_a_cpu.SAMPLED_TOKENS, **sampling)
    responses, log_probs = (torch.tensor(each) for each in zip(*found, strict=True))
    likely = on_a_cpu.following(model, responses[:, :-1], **sampling)
    expected = likely.log().gather(2, responses[:, :, None])[:, :, 0]
    found_p = on_a_cpu.chi_square_p(Counter(map(tuple, responses.tolist())), on_a_cpu.distribution(model, **sampling))
    print("sampled", float((log_probs - expected).abs().max()), found_p, counts(engine)[1] - before[1])
    assert torch.allclose(log_probs, expected, rtol=0, atol=TOLERANCE)
    assert found_p > on_a_cpu.LEAST_P
    assert counts(engine)[1] - before[1] > number / 4
