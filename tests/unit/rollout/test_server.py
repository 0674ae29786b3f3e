"""The real server class around a fake engine, without Ray."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("vllm")


from partial_rollout.errors import DataError, DrainTimeout, EngineDead
from partial_rollout.rollout import control
from partial_rollout.rollout.gated_engine import drop_repeated_logprobs
from partial_rollout.settings.block import PartialRolloutConfig, TimeoutConfig
from tests.fake_engine import FakeServer, completion, output
from tests.unit.rollout.servers import launched, let_run, start, without_relaunches

LONG_S = 20.0
"""Never runs out in a test that passes; the deadlines of these calls are longer."""


async def never(*_, **__):
    await asyncio.Event().wait()


@pytest.mark.parametrize(("reason", "told"), [("END", "END"), (7, None), (None, None)])
async def test_the_client_is_told_of_the_stop_string_at_which_the_engine_ended(reason, told):
    server = await launched()
    task = start(server)
    await let_run()
    last = output([5], "stop")
    last.outputs[0].stop_reason = reason
    server.fake.queues.pop("a").put(last)
    assert (await task).extra_fields["stop_string"] == told


async def test_streamed_tokens_come_back_with_an_abort():
    server = await launched()
    task = start(server)
    await let_run()
    server.fake.stream("a", [5, 6])
    server.fake.stream("a", [7])
    await let_run()
    assert (await server.rollout_statistics()).num_generated_tokens == 3
    await server.abort_all_requests()
    output = await task
    assert (output.token_ids, output.stop_reason) == ([5, 6, 7], "aborted")


async def test_the_version_is_the_one_that_sampled_the_tokens():
    server = await launched()
    await server.set_global_steps(3)
    task = start(server)
    await let_run()
    await server.set_global_steps(4)
    server.fake.finish("a", [5])
    assert (await task).extra_fields["global_steps"] == 3


async def test_a_drain_forgets_the_prefix_cache_unless_told_otherwise():
    server = await launched()
    await server.abort_all_requests()
    await server.resume_generation()
    await server.abort_all_requests(reset_prefix_cache=False)
    assert server.fake.calls == ["pause abort True", "resume", "pause abort False"]


async def test_a_request_still_on_its_way_is_drained_too():
    server = await launched()
    server.fake.accept.clear()
    task = start(server)
    await let_run()
    drain = asyncio.create_task(server.abort_all_requests(reset_prefix_cache=False))
    await let_run()
    assert server.fake.calls == []
    server.fake.accept.set()
    assert await drain == {"aborted_count": 1, "request_ids": ["a"]}
    assert server.fake.calls == ["add a", "pause abort False"]
    assert (await task).stop_reason == "aborted"


async def test_an_engine_that_keeps_a_request_is_named():
    server = await launched(PartialRolloutConfig(timeouts=TimeoutConfig(drain_s=0.01)))
    server.fake.abort_on_pause = False
    task = start(server, "keeps-running")
    await let_run()
    with pytest.raises(DrainTimeout, match="keeps-running"):
        await server.abort_all_requests()
    server.fake.finish("keeps-running", [1])
    await task


async def test_a_dead_engine_is_named_and_leaves_nobody_inside():
    server = await launched(without_relaunches())
    task = start(server)
    await let_run()
    server.fake.die()
    with pytest.raises(EngineDead, match="replica 0 node 0"):
        await task
    assert (await server.rollout_statistics()).gate.in_flight == 0


@pytest.mark.parametrize("is_busy", [False, True])
async def test_an_engine_that_dies_while_it_is_paused_is_not_waited_for(monkeypatch, is_busy):
    monkeypatch.setattr(control, "HEALTH_INTERVAL_S", 0.01)
    server = await launched(without_relaunches())
    task = start(server) if is_busy else None
    await let_run()
    server.fake.answers_pause = False
    drain = asyncio.create_task(server.abort_all_requests())
    await let_run()
    server.fake.die()
    server.fake.is_dead = True
    with pytest.raises(EngineDead, match="replica 0 node 0 .*died"):
        await asyncio.wait_for(drain, LONG_S)
    if task is not None:
        with pytest.raises(EngineDead):
            await task


@pytest.mark.parametrize(("call", "engine_call"), [("resume_generation", "resume_generation"), ("sleep", "sleep")])
async def test_an_engine_that_dies_while_it_resumes_or_goes_to_sleep_is_not_waited_for(monkeypatch, call, engine_call):
    monkeypatch.setattr(control, "HEALTH_INTERVAL_S", 0.01)
    server = await launched(without_relaunches())
    server.config.free_cache_engine = True
    await server.abort_all_requests()
    setattr(server.fake, engine_call, never)
    server.fake.is_dead = True
    with pytest.raises(EngineDead, match="replica 0 node 0 .*died"):
        await asyncio.wait_for(getattr(server, call)(), LONG_S)


async def test_a_dead_engine_is_named_by_who_asks_for_its_health():
    server = await launched()
    await server.require_health()
    server.fake.is_dead = True
    with pytest.raises(EngineDead, match="replica 0 node 0 .*died"):
        await server.require_health()


async def test_a_cancelled_request_is_aborted_in_the_engine():
    server = await launched()
    task = start(server)
    await let_run()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.fake.calls == ["add a", "abort a"]
    assert (await server.rollout_statistics()).gate.in_flight == 0


async def test_reprefilled_tokens_are_counted_for_resumed_requests_only():
    server = await launched()
    for request_id, resumed in (("a", False), ("b", True)):
        task = start(server, request_id, is_resumption=resumed)
        await let_run()
        server.fake.finish(request_id, [9])
        await task
    assert (await server.rollout_statistics()).num_reprefilled_tokens == 3


async def test_a_full_context_is_an_end_for_a_resumed_request_and_an_error_for_a_fresh_one():
    server = await launched()
    server.config.max_model_len = 3
    assert (await server.generate([1, 2, 3], {}, "a", is_resumption=True)).stop_reason == "completed"
    with pytest.raises(DataError, match="3 tokens leaves no room in .*max_model_len=3"):
        await server.generate([1, 2, 3], {}, "b")


async def test_abort_with_reject_turns_requests_away_until_resumed():
    server = await launched()
    await server.abort_all_requests(reject_request=True)
    output = await start(server)
    assert (output.stop_reason, output.extra_fields["rejected"], output.token_ids) == ("aborted", True, [])
    await server.resume_generation()
    task = start(server)
    await let_run()
    server.fake.finish("a", [1])
    assert (await task).stop_reason == "completed"


def test_logprobs_without_a_token_are_cut():
    repeated = completion([7], logprobs=["of 7", "of 5", "of 6"], finish_reason="abort")
    drop_repeated_logprobs(repeated)
    assert repeated.logprobs == ["of 7"]
    empty = completion([], logprobs=["of 5"], finish_reason="abort")
    drop_repeated_logprobs(empty)
    assert empty.logprobs == []
    none = completion([7], logprobs=None, finish_reason="stop")
    drop_repeated_logprobs(none)
    assert none.logprobs is None


async def test_a_further_node_of_a_replica_is_healthy_without_an_engine_of_its_own():
    server = FakeServer()
    server.node_rank = 1
    await server.require_health()
