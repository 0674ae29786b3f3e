"""An engine that dies while it generates: its requests keep their tokens, wait, and go on in the relaunched one."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("vllm")

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.v1.engine.exceptions import EngineDeadError

from partial_rollout.core.gate import GateState
from partial_rollout.core.interrupt import Context
from partial_rollout.errors import ActorLost, EngineDead, WeightUpdateError
from partial_rollout.observability.events import EventReader, Fault
from partial_rollout.rollout import control
from partial_rollout.rollout import server as module
from partial_rollout.rollout.server import PartialRolloutServer
from partial_rollout.settings.block import PartialRolloutConfig, TimeoutConfig, WeightsConfig
from tests.fake_engine import FakeServer
from tests.unit.rollout.servers import launched, let_run, start, with_mode
from tests.unit.runtime.virtual_time import run_virtual

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

LONG_S, HOUR_S = 20.0, 3600.0


async def killed(server: FakeServer, *tokens: int, request_id: str = "a"):
    """Generate, and let the engine die after `tokens`; the segment that came."""
    task = start(server, request_id)
    await let_run()
    if tokens:
        server.fake.stream(request_id, list(tokens))
        await let_run()
    server.fake.die()
    server.fake.is_dead = True
    return await asyncio.wait_for(task, LONG_S)


@pytest.mark.parametrize("tokens", [[5, 6, 7], []])
async def test_the_tokens_that_have_come_are_handed_over_as_an_interrupted_segment(tokens: list[int]):
    server = await launched()
    await server.set_global_steps(3)
    segment = await killed(server, *tokens)
    assert (segment.token_ids, segment.stop_reason) == (tokens, "aborted")
    assert segment.extra_fields["global_steps"] == 3
    assert segment.extra_fields["gate_openings"] == 0
    gate = (await server.rollout_statistics()).gate
    assert (gate.state, gate.in_flight) == (GateState.DRAINING, 0)
    assert "abort a" not in server.fake.calls  # a dead engine is asked nothing


@pytest.mark.parametrize("mode", ["abort", "reuse_kv", "keep_kv"])
async def test_requests_wait_for_the_relaunched_engine_and_go_on_in_it(mode: str):
    server = await launched(with_mode(mode))
    server.config.free_cache_engine = False
    death = asyncio.create_task(server.engine_death())
    first = await killed(server, 5)
    assert (await asyncio.wait_for(death, LONG_S)).startswith("replica 0 node 0 (fake:1): the engine (pid ) died")
    goes_on = start(server, "b", is_resumption=True, retained=first.extra_fields["retained"])
    fresh = start(server, "c")
    await let_run()
    assert (await server.rollout_statistics()).gate.parked == 2

    dead = server.fake
    assert (await server.abort_all_requests())["aborted_count"] == 0
    assert not any(call.startswith("pause") for call in dead.calls)
    assert "the engine (pid ) died" in (await server.weights_failure() or "")
    await server.relaunch()
    await server.wait_for_requests_to_drain()
    await server.sleep()
    with pytest.raises(EngineDead, match="started with after a failed update"):
        await server.open_submission_gate()  # it has no weights yet
    await server.receive_weights(update_number=1, version=3)
    await server.resume_generation()
    await let_run()
    server.fake.finish("b", [6])
    server.fake.finish("c", [9])
    segment = await goes_on
    assert (segment.token_ids, segment.extra_fields["context"]) == ([6], Context(3, "abort"))
    assert segment.extra_fields["gate_openings"] == 1
    assert (await fresh).token_ids == [9]
    assert not asyncio.create_task(server.engine_death()).done()


async def stands_still(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """A server whose engine's process is stopped: killed, it is gone. It waits for 0.2 s for most answers.

    An engine that answers may be slower than that on a busy machine, so the next one has the usual limits.
    """
    monkeypatch.setattr(control, "HEALTH_INTERVAL_S", 0.01)
    timeouts = TimeoutConfig(drain_s=4.0, resume_s=2.0)
    server = await launched(PartialRolloutConfig(timeouts=timeouts))

    class Process:
        pid = 7

        def status(self) -> str:
            return "stopped"

        def kill(self) -> None:
            server.fake.die()
            server.fake.is_dead = True

    assert server._watch is not None
    server._watch._processes = cast("Any", [Process()])
    return server


async def test_an_engine_that_does_not_pause_is_ended_and_its_requests_keep_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
):
    server = await stands_still(monkeypatch)
    server.fake.answers_pause = False
    request = start(server, "a")
    await let_run()
    server.fake.stream("a", [5, 6])
    await let_run()
    drained = await asyncio.wait_for(server.abort_all_requests(), LONG_S)
    assert drained == {"aborted_count": 1, "request_ids": ["a"]}
    assert ((await request).token_ids, (await request).stop_reason) == ([5, 6], "aborted")
    assert "(pid 7 stopped) was asked to pause and did not answer" in (await server.weights_failure() or "")
    assert (await server.rollout_statistics()).gate.state is GateState.CLOSED
    server.settings = PartialRolloutConfig()
    await server.relaunch()
    await server.receive_weights(update_number=1, version=3)
    await server.resume_generation()


async def test_an_engine_that_does_not_release_its_memory_is_ended_and_relaunched(monkeypatch: pytest.MonkeyPatch):
    server = await stands_still(monkeypatch)

    async def sleep(_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(vLLMHttpServer, "sleep", sleep)
    await server.abort_all_requests()
    await asyncio.wait_for(server.sleep(), LONG_S)
    assert "was asked to release its memory and did not answer" in (await server.weights_failure() or "")
    server.settings = PartialRolloutConfig()
    await server.relaunch()
    await server.receive_weights(update_number=1, version=3)
    await server.resume_generation()


async def test_an_engine_that_does_not_go_on_is_ended_and_its_requests_wait_for_the_relaunched_one(
    monkeypatch: pytest.MonkeyPatch,
):
    server = await stands_still(monkeypatch)

    async def resume() -> None:
        await asyncio.Event().wait()

    server.fake.resume_generation = resume
    waits = start(server, "b")
    await server.abort_all_requests()
    death = asyncio.create_task(server.engine_death())
    with pytest.raises(EngineDead, match="was asked to go on and did not answer"):
        await asyncio.wait_for(server.resume_generation(), LONG_S)
    assert "a tenth of partial_rollout.timeouts.resume_s" in await asyncio.wait_for(death, LONG_S)
    assert await server.weights_failure()  # the trainer relaunches it
    server.settings = PartialRolloutConfig()
    await server.abort_all_requests()
    await server.relaunch()
    await server.receive_weights(update_number=1, version=3)
    await server.resume_generation()
    await let_run()
    server.fake.finish("b", [6])
    assert (await waits).token_ids == [6]


async def test_requests_wait_in_a_server_that_ray_has_started_again_and_go_on_in_its_new_engine():
    """The server has lost engine, requests and weights; Ray makes the calls again that it had not answered."""
    server = FakeServer()
    server._begin_without_engine()
    death = asyncio.create_task(server.engine_death())
    goes_on = start(server, "b", is_resumption=True)
    await let_run()
    assert "the engine server of replica 0 has died" in await asyncio.wait_for(death, LONG_S)
    assert (await server.rollout_statistics()).gate.parked == 1

    with pytest.raises(EngineDead, match="must be relaunched"):
        await server.receive_weights(update_number=7, version=3)
    with pytest.raises(WeightUpdateError, match="did not wake up"):
        await server.wake_up()
    assert (await server.abort_all_requests())["aborted_count"] == 0
    await server.wait_for_requests_to_drain()
    await server.sleep()
    assert await server.weights_failure()
    await server.adopt_loop()
    await server.relaunch()
    await server.receive_weights(update_number=8, version=3)
    await server.resume_generation()
    await let_run()
    server.fake.finish("b", [6])
    assert (await goes_on).token_ids == [6]
    assert await server.weights_failure() is None
    later = asyncio.create_task(server.engine_death())
    await let_run()
    assert not later.done()
    later.cancel()


@pytest.mark.parametrize("is_told_meanwhile", [False, True])
async def test_a_server_that_ray_has_started_again_starts_no_engine_on_another_loop_than_that_of_its_requests(
    monkeypatch: pytest.MonkeyPatch, is_told_meanwhile: bool
) -> None:
    """Ray makes the call again in the new process, which nobody has told its loop, or tells while the call begins."""
    server = FakeServer()
    server._begin_without_engine()

    another = asyncio.new_event_loop()

    async def begin_here(call: Coroutine[Any, Any, Any]) -> None:
        server._engine_loop = another if is_told_meanwhile else None
        await call

    monkeypatch.setattr(server, "_on_engine_loop", begin_here)
    with pytest.raises(ActorLost, match="its process is new and has not been told its loop"):
        await server.relaunch()
    another.close()


async def test_a_server_that_ray_has_started_again_and_that_no_request_has_reached_is_drained_at_once() -> None:
    """A process that does not know its event loop yet: a wait for the lock would bind that to another one."""
    server = FakeServer()
    server._begin_without_engine()
    await server.reject_parked()
    async with server._control_lock:
        drained = await asyncio.wait_for(server.abort_all_requests(), LONG_S)
    assert drained["aborted_count"] == 0
    assert (await server.rollout_statistics()).gate.state is GateState.CLOSED
    waits = start(server)
    await let_run()
    assert (await server.rollout_statistics()).gate.parked == 1  # after a drain requests wait, also after a rejection
    waits.cancel()


async def test_requests_of_an_engine_that_was_ended_hear_of_it_though_vllm_does_not_tell_them_and_go_on() -> None:
    server = await launched()
    assert server._watch is not None
    server._watch._processes = []
    death = asyncio.create_task(server.engine_death())
    waits = start(server)
    await let_run()
    server._watch._end("held 1 requests and generated nothing", 1.0, "the limit")
    assert "generated nothing for 1 s, which is the limit: it was ended" in await asyncio.wait_for(death, LONG_S)
    assert (await asyncio.wait_for(waits, LONG_S)).stop_reason == "aborted"
    await server.abort_all_requests()
    await server.relaunch()
    await server.receive_weights(update_number=1, version=3)
    await server.resume_generation()
    later = start(server, "b", is_resumption=True)
    await let_run()
    server.fake.finish("b", [6])
    assert (await asyncio.wait_for(later, LONG_S)).token_ids == [6]


async def test_a_server_that_dies_after_the_drain_of_its_step_opens_with_the_weights_of_that_step():
    """While the model trains: the trainer has drained the server before, and does not drain it again."""
    server = FakeServer()
    server._begin_without_engine()
    waits = start(server, "b", is_resumption=True)
    await let_run()
    await server.adopt_loop()
    with pytest.raises(EngineDead, match="must be relaunched"):
        await server.receive_weights(update_number=8, version=3)
    with pytest.raises(EngineDead, match="has died"):
        await server.open_submission_gate()
    await server.relaunch()
    await server.receive_weights(update_number=9, version=3)
    await server.resume_generation()
    await let_run()
    server.fake.finish("b", [6])
    assert (await waits).token_ids == [6]


async def test_a_server_that_dies_while_it_is_launched_is_not_launched_again_and_again():
    server = FakeServer()
    server._begin_without_engine()
    with pytest.raises(ActorLost, match="its process died while it started the engine"):
        await PartialRolloutServer.launch_server(server, master_address="fake")


async def test_a_server_that_has_lost_its_engine_can_be_shut_down():
    server = FakeServer()
    server._channels = SimpleNamespace(remove=lambda: None)
    server._begin_without_engine()
    await server.shutdown()


async def test_a_death_is_an_event_of_the_run(tmp_path):
    server = await launched(PartialRolloutConfig(events=str(tmp_path)))
    await killed(server, 5)
    (fault,) = [event for event in EventReader(tmp_path).read() if isinstance(event, Fault)]
    assert (fault.role, fault.name, fault.text) == ("engine", "replica 0", "replica 0: the engine (pid ) died")
    assert fault.action == "it is started again, and all engines get all weights; its requests wait"


async def test_a_death_that_a_weight_update_finds_is_an_event_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "HEALTH_INTERVAL_S", 0.01)
    server = await launched(PartialRolloutConfig(events=str(tmp_path)))
    server.fake.answers_rpc, server.fake.is_dead = False, True
    with pytest.raises(WeightUpdateError):
        await server.receive_weights(update_number=1, version=5)
    await server.relaunch()
    (fault,) = [event for event in EventReader(tmp_path).read() if isinstance(event, Fault)]
    text = "replica 0: weight update 1 (version 5) failed: the engine (pid ) died"
    assert (fault.role, fault.name, fault.text) == ("engine", "replica 0", text)


async def test_a_death_is_told_once(tmp_path):
    server = await launched(PartialRolloutConfig(events=str(tmp_path)))
    await killed(server, 5)
    await server.abort_all_requests()
    await server.adopt_loop()
    await server.relaunch()
    assert len([event for event in EventReader(tmp_path).read() if isinstance(event, Fault)]) == 1


async def test_a_request_that_comes_to_a_dead_engine_waits_as_well():
    server = await launched()

    async def refuse(*_, **__):
        raise EngineDeadError

    server.fake.add_request = refuse
    output = await start(server)
    assert (output.token_ids, output.stop_reason) == ([], "aborted")
    later = start(server, "b")
    await let_run()
    assert not later.done()
    later.cancel()


async def test_an_engine_that_dies_while_it_is_interrupted_is_left_to_the_next_update(monkeypatch):
    monkeypatch.setattr(control, "HEALTH_INTERVAL_S", 0.01)
    server = await launched()
    server.config.free_cache_engine = True
    task = start(server)
    await let_run()
    server.fake.answers_pause = False
    drain = asyncio.create_task(server.abort_all_requests())
    await let_run()
    server.fake.die()
    server.fake.is_dead = True
    assert (await asyncio.wait_for(drain, LONG_S))["aborted_count"] == 1
    assert (await task).stop_reason == "aborted"
    await asyncio.wait_for(server.sleep(), LONG_S)
    assert "died" in (await server.weights_failure() or "")
    with pytest.raises(EngineDead, match="must be relaunched before new weights"):
        await server.receive_weights(update_number=1, version=5)


@pytest.mark.parametrize("weights", [WeightsConfig(relaunches=0), WeightsConfig(backend="verl")])
async def test_without_a_relaunch_the_death_is_an_error(weights: WeightsConfig):
    server = await launched(PartialRolloutConfig(weights=weights))
    with pytest.raises(EngineDead, match="replica 0 node 0 .*died while it held request 'a'"):
        await killed(server, 5)


async def test_at_the_end_of_the_run_nobody_waits_for_a_relaunch():
    server = await launched()
    channels: Any = SimpleNamespace(remove=lambda: None)
    server._channels = channels
    death = asyncio.create_task(server.engine_death())
    task = start(server)
    await let_run()
    await server.shutdown()
    assert (await asyncio.wait_for(death, LONG_S)).endswith("the run ends")
    server.fake.die()
    with pytest.raises(EngineDead):
        await task
    assert (await start(server, "late")).extra_fields["rejected"]


@pytest.mark.parametrize(
    ("counted", "has_statistics", "is_ended"), [(64, True, False), (0, True, True), (0, False, False)]
)
def test_an_engine_that_hands_over_tokens_at_the_end_goes_on_while_vllm_counts_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counted: int, has_statistics: bool, is_ended: bool
):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(time, "monotonic", loop.time)
        monkeypatch.setattr(module, "counted_tokens", lambda: int(loop.time()) * counted)
        server = FakeServer(PartialRolloutConfig(events=str(tmp_path)))
        server.config.enable_rollout_routing_replay = True
        await server.launch_server()
        server.fake.log_stats = has_statistics
        task = start(server)
        await asyncio.sleep(HOUR_S)  # and no token is handed over
        task.cancel()

    run_virtual(main())
    faults = [event.text for event in EventReader(tmp_path).read() if isinstance(event, Fault)]
    assert (["held 1 requests and generated nothing" in text for text in faults]) == [True] * is_ended
