"""KV that `offload_kv` has copied to host memory is right when interrupted requests come back for it.

Greedy requests are cut in the middle as a server's drain does it, the engine releases its memory, and they go on from
their tokens. Weights stay the same, so tokens and log-probs must be those of requests that were never cut. That wrong
KV would be seen is shown by the same tokens after other prompts.
"""

from __future__ import annotations

import asyncio

import pytest

NUM_REQUESTS, NUM_PROMPT, NUM_TOKENS, CUT = 8, 200, 400, 200
"""Tokens of a prompt and of a response, and after how many it is cut at the earliest."""
MAX_MODEL_LEN, VOCABULARY = 1024, 1024
SPREAD = 0.3
"""Standard deviation of weights: with so much, what is said depends on all of the context."""
GIB, KV_BYTES = 2, 1 << 28
"""Host memory for KV, and the engine's own cache, which holds it all."""
LIMIT_S = 120.0
TOLERANCE = 0.1
"""Difference of log-probs: batches of other sizes are summed in another order, in bfloat16."""
EQUAL, OTHER = 0.95, 0.5
"""At least this share of tokens is equal; at most this share after other prompts."""
LEAST_ROWS = 2
"""Responses with the same tokens before the cut: the others cannot be compared."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random Qwen3."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        initializer_range=SPREAD,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(path)
    return path, config.to_dict()


class Engine:
    """vLLM as a server of the mode starts it and drains it."""

    def __init__(self, path, model):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from partial_rollout.core.engine_meter import EngineMeter
        from partial_rollout.rollout.admission import Admission
        from partial_rollout.rollout.gated_engine import GatedEngine, Interruption
        from partial_rollout.settings.block import PartialRolloutConfig, TailConfig

        interruption = Interruption(PartialRolloutConfig(tail=TailConfig(interrupt_mode="offload_kv", offload_gib=GIB)))
        arguments = {"stream_interval": 1}  # a cut is to come where it is asked for
        interruption.engine_arguments(arguments, model)
        self.copy_tokens = arguments["kv_transfer_config"]["kv_connector_extra_config"]["block_size"]
        self.vllm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                str(path),
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=2 * NUM_REQUESTS,
                enable_sleep_mode=True,
                gpu_memory_utilization=0.1,
                kv_cache_memory_bytes=KV_BYTES,
                dtype="bfloat16",
                **arguments,
            )
        )
        interruption.unlink_host_memory()
        self._gated = GatedEngine(self.vllm, Admission(), interruption.mode, EngineMeter())

    async def over_a_boundary(self):
        """Interrupt what runs, release all memory, and go on."""
        await self._gated.interrupt(clear_cache=True)
        await self._gated.sleep(level=1)
        await self._gated.wake_up()
        await self._gated.resume_generation()

    async def say(self, salt, prompts, num_tokens, on_tokens=lambda _: None):
        """(tokens, log-probs) of each prompt's response, and how many tokens of all were found in a cache."""
        said = await asyncio.gather(*(self._say(salt, *each, num_tokens, on_tokens) for each in enumerate(prompts)))
        return [each[:2] for each in said], sum(each[2] for each in said)

    async def _say(self, salt, number, prompt, num_tokens, on_tokens):
        from vllm import SamplingParams

        from partial_rollout.rollout.gated_engine import drop_repeated_logprobs

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=0, ignore_eos=True, detokenize=False)
        asked = {"prompt_token_ids": prompt, "cache_salt": salt}
        answer = None
        async for answer in self.vllm.generate(asked, params, f"{salt}-{number}"):
            on_tokens(len(answer.outputs[0].token_ids))
        drop_repeated_logprobs(answer.outputs[0])
        tokens = list(answer.outputs[0].token_ids)
        log_probs = [at[token].logprob for at, token in zip(answer.outputs[0].logprobs, tokens, strict=True)]
        return tokens, log_probs, answer.num_cached_tokens


async def cut_and_continued(engine, prompts):
    """What was said before the cut and after it, and how many tokens were sent again and found."""
    half_done = asyncio.Event()

    async def boundary():
        await half_done.wait()
        await engine.over_a_boundary()

    saying = engine.say("cut", prompts, NUM_TOKENS, lambda num: half_done.set() if num >= CUT else None)
    (parts, _), _ = await asyncio.gather(saying, boundary())
    contexts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, parts, strict=True)]
    rest, num_found = await engine.say("cut", contexts, NUM_TOKENS - max(len(tokens) for tokens, _ in parts))
    return parts, rest, sum(map(len, contexts)), num_found


def compared(found, wanted):
    """Equal tokens, all tokens, and the largest difference of log-probs, of responses that should be the same.

    After a first other token the contexts are no longer the same, and nothing is compared.
    """
    equal, difference = 0, 0.0
    for (tokens, log_probs), (others, other_log_probs) in zip(found, wanted, strict=True):
        pairs = list(zip(tokens, others, strict=False))
        same = next((place for place, (token, other) in enumerate(pairs) if token != other), len(pairs))
        equal += same
        differences = (abs(x - y) for x, y in zip(log_probs[: same + 1], other_log_probs, strict=False))
        difference = max(difference, *differences)
    return equal, sum(len(tokens) for tokens, _ in found), difference


async def test_it_is_that_of_requests_that_were_never_cut(checkpoint):
    engine = Engine(*checkpoint)
    try:
        async with asyncio.timeout(LIMIT_S):
            prompts = [
                [3 + (7 * i + 31 * row) % (VOCABULARY - 3) for i in range(NUM_PROMPT)] for row in range(NUM_REQUESTS)
            ]
            whole, _ = await engine.say("whole", prompts, NUM_TOKENS)
            parts, rest, num_sent, num_found = await cut_and_continued(engine, prompts)
            others = [prompts[row - 1] + tokens for row, (tokens, _) in enumerate(parts)]
            strange, _ = await engine.say("strange", others, len(rest[0][0]))
    finally:
        engine.vllm.shutdown()
    cuts = [len(tokens) for tokens, _ in parts]
    assert all(CUT <= cut < NUM_TOKENS for cut in cuts)
    assert engine.copy_tokens == 64
    assert num_sent - NUM_REQUESTS * engine.copy_tokens <= num_found <= num_sent
    # Requests that have not begun in the same step may have said something else before the cut.
    rows = [row for row, cut in enumerate(cuts) if parts[row][0] == whole[row][0][:cut]]
    wanted = [tuple(each[cuts[row] : cuts[row] + len(rest[row][0])] for each in whole[row]) for row in rows]
    equal, total, difference = compared([rest[row] for row in rows], wanted)
    equal_after_others, _, _ = compared([strange[row] for row in rows], wanted)
    print({"cuts": cuts, "rows": rows, "sent": num_sent, "found": num_found, "equal": equal, "of": total})
    print({"difference": difference, "equal_after_others": equal_after_others})
    assert len(rows) >= LEAST_ROWS
    assert difference <= TOLERANCE
    assert equal >= EQUAL * total
    assert equal_after_others < OTHER * total
