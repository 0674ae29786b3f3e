"""Weight updates of a server that fail, and engines that are relaunched after them."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("vllm")

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from partial_rollout.errors import EngineDead, WaitTimeout, WeightUpdateError
from partial_rollout.rollout import control, http_server
from partial_rollout.rollout.ends_with_server import VARIABLE
from partial_rollout.rollout.server import PartialRolloutServer
from partial_rollout.settings.block import PartialRolloutConfig, TimeoutConfig
from tests.fake_engine import FakeEngine, FakeServer
from tests.unit.rollout.servers import launched, let_run, start

LONG_S = 20.0
"""Never runs out in a test that passes."""


async def test_a_weight_update_forgets_caches_before_the_version_changes():
    server = await launched()
    await server.receive_weights(update_number=1, version=5)
    assert server.fake.calls == ["rpc receive_weights", "reset prefix cache", "reset mm cache", "reset encoder cache"]
    assert (await server.rollout_statistics()).version == 5


FAILURE = RuntimeError("tensor 'a' does not fit")


async def test_an_engine_that_dies_before_it_answers_an_update_is_noticed(monkeypatch):
    monkeypatch.setattr(control, "HEALTH_INTERVAL_S", 0.01)
    server = await launched()
    server.fake.answers_rpc, server.fake.is_dead = False, True
    with pytest.raises(WeightUpdateError, match=r"update 1 \(version 5\) failed: the engine \(pid .*\) died"):
        await server.receive_weights(update_number=1, version=5)
    assert await server.weights_failure() is not None


async def test_a_prefix_cache_that_is_not_cleared_fails_the_update():
    server = await launched()
    server.fake.forgets = False
    with pytest.raises(WeightUpdateError, match=r"update 1 .*prefix cache of the old weights was not cleared"):
        await server.receive_weights(update_number=1, version=5)
    assert (await server.rollout_statistics()).version == 0


async def test_an_update_that_a_training_rank_gives_up_ends_at_once_however_stuck_the_engine_is():
    server = await launched()
    server.fake.answers_rpc = False
    update = asyncio.create_task(server.receive_weights(update_number=2, version=5))
    await let_run()
    await server.give_up_update(update_number=1, reason="the one before")
    await let_run()
    assert not update.done()
    await server.give_up_update(update_number=2, reason="rank 1: silent for 30 s")
    with pytest.raises(WeightUpdateError, match=r"update 2 \(version 5\) failed: rank 1: silent for 30 s"):
        await asyncio.wait_for(update, LONG_S)
    assert "silent for 30 s" in await server.weights_failure()


async def test_an_update_that_was_given_up_before_its_call_came_fails_too():
    server = await launched()
    server.fake.answers_rpc = False
    await server.give_up_update(update_number=1, reason="no hello")
    with pytest.raises(EngineDead, match="update 1 was given up: no hello"):
        await asyncio.wait_for(server.receive_weights(update_number=1, version=5), LONG_S)
    assert "no hello" in await server.weights_failure()


async def test_an_update_that_a_rank_gives_up_after_the_engine_took_it_is_to_be_sent_again():
    server = await launched()
    await server.receive_weights(update_number=1, version=5)
    await server.give_up_update(update_number=1, reason="the confirmation was lost")
    assert "the confirmation was lost" in await server.weights_failure()
    with pytest.raises(EngineDead, match="confirmation was lost"):
        await server.open_submission_gate()


async def test_an_engine_that_dies_while_it_forgets_its_caches_is_noticed(monkeypatch):
    monkeypatch.setattr(control, "HEALTH_INTERVAL_S", 0.01)
    server = await launched()
    server.fake.answers_reset, server.fake.is_dead = False, True
    with pytest.raises(WeightUpdateError, match=r"update 1 \(version 5\) failed: the engine \(pid .*\) died"):
        await asyncio.wait_for(server.receive_weights(update_number=1, version=5), LONG_S)


@pytest.mark.parametrize("fault", ["dead", "stuck"])
async def test_an_engine_that_does_not_wake_up_for_an_update_is_to_be_relaunched(monkeypatch, fault):
    monkeypatch.setattr(control, "HEALTH_INTERVAL_S", 0.01)
    server = await launched(PartialRolloutConfig(timeouts=TimeoutConfig(resume_s=200.0 if fault == "dead" else 0.5)))
    server.fake.answers_wake_up, server.fake.is_dead = False, fault == "dead"
    why = r"the engine \(pid .*\) died" if fault == "dead" else "no answer within 0.0125 s, which is a fortieth"
    with pytest.raises(WeightUpdateError, match=rf"did not wake up \(\['weights'\]\): {why}"):
        await server.wake_up(["weights"])
    assert "did not wake up" in await server.weights_failure()
    server.settings = PartialRolloutConfig()  # an engine that wakes up may take longer on a busy machine
    await server.relaunch()
    await server.wake_up(["weights"])
    assert server.fake.calls == ["wake up ['weights']", "reset prefix cache"]


async def after_a_failed_update() -> FakeServer:
    return await broken(FakeServer())


async def broken(server: FakeServer) -> FakeServer:
    """Launched, and with half an update."""
    await server.launch_server()
    await server.set_global_steps(4)
    await server.abort_all_requests()
    server.fake.rpc_failure = FAILURE
    with pytest.raises(WeightUpdateError, match=r"replica 0 node 0 .*update 1 \(version 5\).*tensor 'a' does not fit"):
        await server.receive_weights(update_number=1, version=5)
    return server


async def test_after_a_failed_weight_update_nothing_is_generated():
    server = await after_a_failed_update()
    server.fake.rpc_failure = None
    parked = start(server)
    for call in (
        server.open_submission_gate(),
        server.require_health(),
        server.receive_weights(update_number=2, version=5),
    ):
        with pytest.raises(EngineDead, match="tensor 'a' does not fit"):
            await call
    await let_run()
    assert not parked.done()
    assert server.fake.queues == {}
    assert (await server.rollout_statistics()).version == 4
    assert "tensor 'a'" in await server.weights_failure()
    await server.reject_parked()
    await parked


async def test_a_request_at_an_open_gate_learns_that_the_weights_are_broken():
    server = await launched()
    server.fake.rpc_failure = FAILURE
    with pytest.raises(WeightUpdateError):
        await server.receive_weights(update_number=1, version=5)
    with pytest.raises(EngineDead, match="holds half an update: .*tensor 'a' does not fit"):
        await start(server)
    assert (await server.rollout_statistics()).gate.in_flight == 0


async def test_a_relaunched_engine_serves_who_was_parked_once_it_was_sent_weights():
    server = await after_a_failed_update()
    parked, broken = start(server), server.fake
    await server.relaunch()
    assert broken.calls[-1] == "shutdown"
    assert server.fake.calls == ["pause abort True"]
    with pytest.raises(EngineDead, match="started with after a failed update: .*tensor 'a'"):
        await server.resume_generation()
    await server.receive_weights(update_number=2, version=5)
    assert await server.weights_failure() is None
    await server.resume_generation()
    await let_run()
    server.fake.finish("a", [5])
    output = await parked
    assert (output.token_ids, output.extra_fields["global_steps"]) == ([5], 5)


async def test_a_relaunched_engine_whose_update_fails_again_must_be_relaunched_again():
    server = await after_a_failed_update()
    await server.relaunch()
    server.fake.rpc_failure = RuntimeError("again")
    with pytest.raises(WeightUpdateError, match="again"):
        await server.receive_weights(update_number=2, version=5)
    with pytest.raises(EngineDead, match=r"must be relaunched .*update 2 .*again"):
        await server.receive_weights(update_number=3, version=5)


async def test_an_engine_behind_an_open_gate_is_not_paused_by_a_relaunch():
    server = await launched()
    await server.relaunch()
    assert server.fake.calls == []


async def test_an_engine_over_several_nodes_is_not_relaunched():
    server = await after_a_failed_update()
    server.nnodes = 2
    with pytest.raises(EngineDead, match="several nodes is not relaunched; .*tensor 'a'"):
        await server.relaunch()


async def test_an_engine_that_does_not_start_again_is_told_with_what_was_wrong_before(monkeypatch):
    server = await after_a_failed_update()

    async def run_server(args):
        raise RuntimeError("no such model")

    monkeypatch.setattr(server, "run_server", run_server)
    with pytest.raises(EngineDead, match="did not start again: no such model; .*tensor 'a'"):
        await server.relaunch()


async def test_an_http_server_that_does_not_end_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(http_server, "STOP_S", 0.05)
    server = await launched()
    may_end = asyncio.Event()

    async def serve():
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    server._server_task = asyncio.create_task(serve())
    await let_run()
    with pytest.raises(WaitTimeout, match=r"replica 0 .*the HTTP server did not end within 0\.05 s"):
        await asyncio.wait_for(server.relaunch(), LONG_S)
    may_end.set()


async def test_an_http_server_that_has_failed_does_not_keep_the_engine_from_being_ended():
    server = await launched()
    ended = server.fake

    async def serve():
        raise OSError("no port")

    server._server_task = asyncio.create_task(serve())
    await let_run()
    await server.relaunch()
    assert ended.calls == ["shutdown"]


class SlowStart(FakeServer):
    """Is launched as verl's server is: the bare engine is there first, and then its HTTP server comes up."""

    run_server = PartialRolloutServer.run_server


async def test_a_request_that_comes_while_an_engine_is_relaunched_waits_at_the_gate(monkeypatch):
    starting, http_is_up = asyncio.Event(), asyncio.Event()

    async def run_server(server: FakeServer, _) -> None:
        server.engine = server.fake = FakeEngine()
        starting.set()
        await http_is_up.wait()
        server._server_task = asyncio.create_task(asyncio.Event().wait())

    monkeypatch.setattr(vLLMHttpServer, "run_server", run_server)
    monkeypatch.setenv(VARIABLE, "what the server sets here ends with the test")
    http_is_up.set()
    server = await broken(SlowStart())
    for event in (starting, http_is_up):
        event.clear()
    relaunch = asyncio.create_task(server.relaunch())
    await starting.wait()
    late = start(server)
    assert (await server.rollout_statistics()).kept == 0
    await let_run()
    assert not late.done()
    http_is_up.set()
    await relaunch
    await server.receive_weights(update_number=2, version=5)
    await server.resume_generation()
    await let_run()
    server.fake.finish("a", [5])
    assert (await late).token_ids == [5]


async def test_a_relaunched_engine_that_dies_before_it_pauses_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(control, "HEALTH_INTERVAL_S", 0.01)
    server = await after_a_failed_update()

    async def run_server(_) -> None:
        server.fake = FakeEngine()
        server.fake.answers_pause, server.fake.is_dead = False, True
        server._attach_engine(server.fake)

    monkeypatch.setattr(server, "run_server", run_server)
    with pytest.raises(EngineDead, match="replica 0 node 0 .*died"):
        await asyncio.wait_for(server.relaunch(), LONG_S)
