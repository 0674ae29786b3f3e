"""Interruption, resumption and the closed gate, on a real engine."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from partial_rollout.core.gate import GateState
from partial_rollout.errors import ConfigError, DataError, RunEnded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from partial_rollout.rollout.engine_process import RolloutStatistics
    from partial_rollout.rollout.replica import PartialRolloutReplica
    from tests.engine.conftest import EngineUnderTest

pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7, 8, 9]
NUM_TOKENS = 100
LOG_PROB_TOLERANCE = 1e-4


def greedy(num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    return {"temperature": 0.0, "logprobs": True, "ignore_eos": True, "max_tokens": num_tokens}


async def statistics(engine: EngineUnderTest) -> RolloutStatistics:
    return (await engine.replica.statistics())[0]


async def until(replica: PartialRolloutReplica, condition: Callable[[RolloutStatistics], bool]) -> None:
    # Imported late: it imports verl, which reads its environment then.
    from tests.engine import support

    await support.until(replica, condition)


async def begin(engine: EngineUnderTest, moments: list[int]) -> None:
    from tests.engine import support

    await support.begin_interruptions(engine.replica, moments)


async def end(engine: EngineUnderTest) -> list[int]:
    from tests.engine import support

    return await support.end_interruptions(engine.replica, is_enough=lambda: True)


async def in_time(attempt: Callable[[], Awaitable[Any]]) -> Any:
    from tests.engine import support

    return await support.in_time(attempt)


def assert_same(output: Any, reference: Any) -> None:
    assert output.token_ids == reference.token_ids
    assert output.log_probs == pytest.approx(reference.log_probs, abs=LOG_PROB_TOLERANCE)


async def test_an_interrupted_generation_equals_the_uninterrupted_one(engine):
    reference = await engine.client.generate("r", prompt_ids=PROMPT, sampling_params=greedy())
    assert len(reference.token_ids) == NUM_TOKENS

    async def interrupted() -> Any:
        # The first streamed token shows that the request is being decoded.
        await begin(engine, [1])
        output = await engine.client.generate("i", prompt_ids=PROMPT, sampling_params=greedy())
        aborted = await end(engine)
        assert_same(output, reference)
        return (output, aborted) if output.extra_fields["num_interruptions"] else None

    output, aborted = await in_time(interrupted)
    assert aborted == [1]
    assert output.extra_fields["num_interruptions"] == 1
    assert output.extra_fields["num_reprefilled_tokens"] > len(PROMPT)
    assert sum(count for _, count in output.extra_fields["version_spans"]) == NUM_TOKENS


async def test_a_group_interrupted_at_random_moments_equals_itself(engine):
    prompts = [[10 + i, 20, 30 + i, 40] for i in range(8)]

    def start(name: str) -> list[asyncio.Task]:
        return [
            asyncio.create_task(engine.client.generate(f"{name}{i}", prompt_ids=p, sampling_params=greedy(120)))
            for i, p in enumerate(prompts)
        ]

    reference = await asyncio.gather(*start("r"))
    moments = random.Random(0)

    async def interrupted() -> Any:
        await begin(engine, [moments.randint(1, 8) for _ in range(10)])
        outputs = await asyncio.gather(*start("i"))
        num_met = len(await end(engine))
        for output, expected in zip(outputs, reference, strict=True):
            assert_same(output, expected)
        num_interruptions = sum(output.extra_fields["num_interruptions"] for output in outputs)
        return True if num_met > 1 and num_interruptions >= 10 else None

    assert await in_time(interrupted)


async def test_nothing_is_generated_while_the_gate_is_closed(engine):
    await engine.replica.abort_all_requests()
    closed = await statistics(engine)
    task = asyncio.create_task(engine.client.generate("c", prompt_ids=PROMPT, sampling_params=greedy(8)))
    await until(engine.replica, lambda statistics: statistics.gate.parked == 1)
    # One engine round trip after the request was parked: had it reached the engine, it would have been scheduled.
    await engine.replica.server_handle.clear_kv_cache.remote()
    during = await statistics(engine)
    assert during.gate.state is GateState.CLOSED
    assert during.num_generated_tokens == closed.num_generated_tokens
    assert during.gate.in_flight == 0
    assert not task.done()
    await engine.replica.resume_generation()
    output = await task
    assert len(output.token_ids) == 8
    assert output.extra_fields["num_interruptions"] == 0


async def test_draining_an_empty_engine_twice_is_allowed(engine):
    assert (await engine.replica.abort_all_requests())["aborted_count"] == 0
    assert (await engine.replica.abort_all_requests())["aborted_count"] == 0
    await engine.replica.resume_generation()


async def test_the_budget_holds_over_interruptions_at_every_token(engine):
    reference = await engine.client.generate("r", prompt_ids=PROMPT, sampling_params=greedy(40))

    async def interrupted() -> Any:
        await begin(engine, [1] * 40)
        output = await engine.client.generate("i", prompt_ids=PROMPT, sampling_params=greedy(40))
        num_interruptions = output.extra_fields["num_interruptions"]
        assert sum(await end(engine)) >= num_interruptions
        assert_same(output, reference)
        return True if num_interruptions > 5 else None

    assert await in_time(interrupted)


async def test_a_full_context_ends_a_resumed_generation(engine):
    room = engine.config.actor_rollout_ref.rollout.max_model_len
    prompt = [7] * (room - 3)
    output = await engine.client.generate("f", prompt_ids=prompt, sampling_params=greedy(50))
    assert len(output.token_ids) == 3
    with pytest.raises(DataError, match="leaves no room"):
        await engine.client.generate("g", prompt_ids=[7] * room, sampling_params=greedy(50))


async def test_rejected_requests_end_with_run_ended(engine):
    await engine.replica.abort_all_requests()
    task = asyncio.create_task(engine.client.generate("x", prompt_ids=PROMPT, sampling_params=greedy(8)))
    await until(engine.replica, lambda statistics: statistics.gate.parked == 1)
    assert await engine.replica.reject_parked() == 1
    with pytest.raises(RunEnded):
        await task
    await engine.replica.resume_generation()
    output = await engine.client.generate("y", prompt_ids=PROMPT, sampling_params=greedy(8))
    assert len(output.token_ids) == 8


async def test_what_cannot_be_resumed_exactly_is_refused(engine):
    with pytest.raises(ConfigError, match="bad_words"):
        await engine.client.generate("s", prompt_ids=PROMPT, sampling_params={"bad_words": ["A"]})


@pytest.mark.parametrize("min_tokens", [0, 70])
async def test_a_stop_string_ends_a_response_that_is_interrupted_at_every_token_where_it_ends_in_one_request(
    engine, min_tokens
):
    """The string is of several tokens, so that some interruption falls between them."""
    tokenizer = engine.client.stop_tokenizer = AutoTokenizer.from_pretrained(engine.model_path)
    whole = await engine.client.generate("w", prompt_ids=PROMPT, sampling_params=greedy())
    stop = tokenizer.decode(whole.token_ids[60:75], skip_special_tokens=True)
    params = greedy() | {"stop": ["never there", stop], "min_tokens": min_tokens}
    reference = await engine.client.generate("r", prompt_ids=PROMPT, sampling_params=params)
    assert 0 < len(reference.token_ids) < NUM_TOKENS
    assert reference.extra_fields["num_interruptions"] == 0

    async def interrupted() -> Any:
        await begin(engine, [1] * NUM_TOKENS)
        output = await engine.client.generate("i", prompt_ids=PROMPT, sampling_params=params)
        num_interruptions = output.extra_fields["num_interruptions"]
        assert sum(await end(engine)) >= num_interruptions
        assert_same(output, reference)
        assert sum(count for _, count in output.extra_fields["version_spans"]) == len(output.token_ids)
        return True if num_interruptions > 10 else None

    assert await in_time(interrupted)
