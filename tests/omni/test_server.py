"""The server's gate, hold and weights over an AsyncOmni without an engine."""

from __future__ import annotations

import asyncio
import os

import pytest

from partial_rollout.core.gate import GateState
from partial_rollout.diffusion import server as server_module
from partial_rollout.diffusion.contract import QWEN_IMAGE, resolve
from partial_rollout.diffusion.engine import BOUNDARY, HOLD, RELEASE
from partial_rollout.diffusion.sampling import Interrupted, SampleRequest, SamplingLimits
from partial_rollout.diffusion.sde_window import NO_WINDOW
from partial_rollout.diffusion.server import FORGET, PACK, DiffusionServer, ServerOptions
from partial_rollout.errors import (
    DrainTimeout,
    EngineDead,
    EngineError,
    IllegalTransition,
    WaitTimeout,
    WeightUpdateError,
)
from partial_rollout.weights.directory import DIRECTORY_VARIABLE, SECRET_VARIABLE
from tests.omni.fake_omni import FakeOmni


@pytest.fixture
def omni(monkeypatch, tmp_path):
    monkeypatch.setattr(server_module, "AsyncOmni", FakeOmni)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # A server exports them to its process, where the real server of other tests lives as well: put back afterwards.
    monkeypatch.setenv(DIRECTORY_VARIABLE, os.environ.get(DIRECTORY_VARIABLE, ""))
    monkeypatch.setenv(SECRET_VARIABLE, os.environ.get(SECRET_VARIABLE, ""))


@pytest.fixture
def server(omni):
    server = make_server()
    yield server
    server.shutdown()
    assert FakeOmni.instance.is_shut_down


def make_server(*, stepwise=True, timeout_s=10.0, sleep_mode=False):
    return DiffusionServer(
        ServerOptions(
            model_path="m",
            adapter=resolve(QWEN_IMAGE, "flow_grpo", step_execution=stepwise),
            limits=SamplingLimits(sizes=((8, 8),), multiple=8, max_steps=3),
            timeout_s=timeout_s,
            sleep_mode=sleep_mode,
        )
    )


def request(name):
    return SampleRequest(request_id=name, prompt_ids=(1,), seed=0, height=8, width=8, num_steps=3, window=NO_WINDOW)


async def send(server, *names):
    tasks = [asyncio.ensure_future(server.generate(request(name))) for name in names]
    return tasks, [await FakeOmni.instance.sent.get() for _ in names]


async def start(server, *names):
    tasks, sent = await send(server, *names)
    for name in sent:
        FakeOmni.instance.let_in(name)
    return tasks


async def test_a_drain_brings_back_each_as_it_stands(server):
    tasks = await start(server, "begun", "waiting", "done")
    begun, waiting, done = list(FakeOmni.instance.queues)
    FakeOmni.instance.begun = {begun, done}
    FakeOmni.instance.finish(done)
    assert await server.drain() == [begun, waiting, done]
    first, second, third = await asyncio.gather(*tasks)
    assert (first.step_index, second) == (2, Interrupted(None, 0, 0))
    assert first.snapshot is not None
    assert third.request_id == "done"
    assert FakeOmni.instance.calls == [HOLD, PACK, FORGET]
    statistics = server.statistics()
    assert (statistics.num_finished, statistics.num_interrupted, statistics.gate.in_flight) == (1, 2, 0)
    assert statistics.holders == ["drain"]


@pytest.mark.parametrize("lost", [HOLD, PACK, FORGET])
async def test_wherever_a_drain_stops_short_the_engine_stands_and_the_next_one_ends_it(server, lost):
    begun, waiting = await start(server, "begun", "waiting")
    FakeOmni.instance.begun = {"begun#0"}
    FakeOmni.instance.unanswered = [lost]
    with pytest.raises(DrainTimeout):
        await server.drain()
    with pytest.raises(IllegalTransition, match="gate draining"):
        await server.resume()
    assert RELEASE not in FakeOmni.instance.calls
    await server.drain()
    assert (await begun).step_index == 2
    assert (await waiting).snapshot is None
    assert server._interrupted == {}
    await server.resume()
    assert server.statistics().gate.state is GateState.OPEN


async def test_after_a_drain_requests_park_until_the_server_resumes(server):
    await server.drain()
    parked = asyncio.ensure_future(server.generate(request("late")))
    await asyncio.sleep(0)
    assert server.statistics().gate.parked == 1
    await server.resume()
    await FakeOmni.instance.sent.get()
    FakeOmni.instance.finish(*FakeOmni.instance.queues)
    assert (await parked).request_id == "late"
    assert FakeOmni.instance.calls[-1] == RELEASE


async def test_an_update_in_place_leaves_requests_alone(server):
    [task] = await start(server, "r")
    await server.hold()
    await server.receive_weights(1, 5.0)
    await server.release()
    assert FakeOmni.instance.calls == [HOLD, "receive_weights", RELEASE]
    assert server.statistics().version == 1
    FakeOmni.instance.finish(*FakeOmni.instance.queues)
    assert (await task).request_id == "r"


async def test_a_drain_during_an_update_goes_on_when_both_let_go(server):
    await server.hold()
    await server.drain()
    await server.release()
    assert RELEASE not in FakeOmni.instance.calls
    await server.resume()
    assert FakeOmni.instance.calls[-1] == RELEASE


@pytest.mark.parametrize(("hold", "go_on"), [("hold", "release"), ("drain", "resume")])
async def test_an_engine_that_did_not_answer_the_release_is_told_again(server, hold, go_on):
    await getattr(server, hold)()
    FakeOmni.instance.unanswered = [RELEASE]
    with pytest.raises(WaitTimeout, match=rf"waits for the diffusion engine to answer '{RELEASE}': .* within 10 s"):
        await getattr(server, go_on)()
    await getattr(server, go_on)()
    assert FakeOmni.instance.calls.count(RELEASE) == 2
    assert server.statistics().gate.state is GateState.OPEN


@pytest.fixture
def sleeper(omni):
    server = make_server(sleep_mode=True)
    yield server
    server.shutdown()


async def test_a_drained_engine_sleeps_and_is_used_again_when_it_is_awake(sleeper):
    with pytest.raises(IllegalTransition, match="gate open: a drain has to come first"):
        await sleeper.sleep()
    await sleeper.drain()
    await sleeper.sleep()
    for call in (sleeper.resume(), sleeper.receive_weights(1, 5.0)):
        with pytest.raises(EngineError, match="sleeps"):
            await call
    await sleeper.wake()
    await sleeper.receive_weights(1, 5.0)
    await sleeper.resume()
    assert FakeOmni.instance.calls[-4:] == ["sleep 1", "wake_up", "receive_weights", RELEASE]
    await sleeper.wake()
    assert FakeOmni.instance.calls.count("wake_up") == 1


async def test_an_engine_that_failed_to_wake_is_not_used(sleeper):
    await sleeper.drain()
    await sleeper.sleep()
    FakeOmni.instance.ack_error = "no memory"
    with pytest.raises(EngineError, match="'wake_up' failed in the diffusion engine: no memory"):
        await sleeper.wake()
    with pytest.raises(EngineError, match="sleeps"):
        await sleeper.resume()
    FakeOmni.instance.ack_error, FakeOmni.instance.death = None, "the orchestrator died"
    with pytest.raises(EngineError, match="'wake_up' failed .*: the orchestrator died"):
        await sleeper.wake()
    FakeOmni.instance.death = None
    await sleeper.wake()
    await sleeper.resume()


async def test_half_an_update_ends_all_use(server):
    FakeOmni.instance.update_error = "WeightMismatch: x"
    with pytest.raises(WeightUpdateError, match="version 1 did not reach .* WeightMismatch: x"):
        await server.receive_weights(1, 5.0)
    with pytest.raises(EngineDead):
        await server.generate(request("r"))
    with pytest.raises(EngineDead):
        await server.receive_weights(2, 5.0)
    assert server.statistics().gate.in_flight == 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"unanswered": ["receive_weights"]}, "the server waits .* 'receive_weights': no answer within 5 s"),
        ({"death": "the orchestrator died"}, "'receive_weights' failed .*: the orchestrator died"),
    ],
    ids=["unanswered", "dead"],
)
async def test_an_update_that_is_not_answered_ends_all_use_of_an_engine_of_whole_requests(omni, fault, reason):
    server = make_server(stepwise=False)
    for name, value in fault.items():
        setattr(FakeOmni.instance, name, value)
    with pytest.raises(WeightUpdateError, match=f"version 1 did not reach the diffusion engine: {reason}"):
        await server.receive_weights(1, 5.0)
    FakeOmni.instance.death = None
    with pytest.raises(EngineDead, match=reason):
        await server.generate(request("r"))
    with pytest.raises(EngineDead, match=reason):
        await server.receive_weights(2, 5.0)
    server.shutdown()


@pytest.mark.parametrize(("ask", "call"), [("hold", HOLD), ("count_steps", BOUNDARY)])
async def test_a_wait_for_the_engine_that_runs_out_says_what_for_and_one_that_is_gone_is_an_engine_error(
    server, ask, call
):
    FakeOmni.instance.unanswered = [call]
    with pytest.raises(WaitTimeout, match=f"waits for the diffusion engine to answer '{call}': no answer within 10 s"):
        await getattr(server, ask)()
    FakeOmni.instance.death = "the orchestrator died"
    with pytest.raises(EngineError, match=f"'{call}' failed in the diffusion engine: the orchestrator died"):
        await getattr(server, ask)()


def fails(weights):
    weights.begun(1, "the update to version 1")
    weights.failed("WeightMismatch: x", 1)


def goes_on(weights):
    weights.begun(1, "the update to version 1")


@pytest.mark.parametrize(("update", "reason"), [(fails, "half an update"), (goes_on, "version 1 has not ended")])
async def test_a_held_engine_is_not_released_on_half_an_update(server, update, reason):
    await server.hold()
    update(server._weights)
    with pytest.raises(EngineDead, match=reason):
        await server.release()
    assert RELEASE not in FakeOmni.instance.calls


async def test_an_image_that_half_an_update_had_a_part_in_is_refused(server):
    [task] = await start(server, "r")
    fails(server._weights)
    FakeOmni.instance.finish(*FakeOmni.instance.queues)
    with pytest.raises(EngineDead, match="half an update"):
        await task
    statistics = server.statistics()
    assert (statistics.num_finished, statistics.gate.in_flight) == (0, 0)


async def let_run():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_drain_takes_nothing_out_before_all_have_arrived(server):
    """What comes in behind the abort would go on in an engine that was said to be empty."""
    tasks, [early, late] = await send(server, "early", "late")
    FakeOmni.instance.let_in(early)
    drain = asyncio.ensure_future(server.drain())
    await let_run()
    assert FakeOmni.instance.calls == []
    FakeOmni.instance.let_in(late)
    assert await drain == [early, late]
    assert await asyncio.gather(*tasks) == [Interrupted(None, 0, 0)] * 2


async def test_who_gives_up_on_the_way_is_not_waited_for_and_may_still_arrive(server):
    [task], [name] = await send(server, "r")
    drain = asyncio.ensure_future(server.drain())
    await let_run()
    task.cancel()
    assert await drain == [name]
    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["message"]))
    FakeOmni.instance.let_in(name)
    await let_run()
    assert failures == []
    assert FakeOmni.instance.aborted == [name]  # it would run for nobody


async def test_who_gives_up_after_the_arrival_is_aborted_as_well(server):
    """AsyncOmni's abort may have passed the request on the way and found nothing."""
    [task] = await start(server, "r")
    await let_run()
    assert FakeOmni.instance.aborted == []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert FakeOmni.instance.aborted == ["r#0"]


async def test_nothing_is_kept_of_a_request_that_was_given_up(server):
    given_up, kept = await start(server, "given up", "kept")
    FakeOmni.instance.begun = {"given up#0", "kept#1"}
    await let_run()
    given_up.cancel()
    await server.drain()
    assert (await kept).step_index == 2
    assert server._interrupted == {}


async def test_a_request_that_never_arrives_is_named(omni):
    server = make_server(timeout_s=0.0)
    [task], _ = await send(server, "lost")
    with pytest.raises(DrainTimeout, match=r"\(1 not yet accepted by it, .*\[lost#0\]"):
        await server.drain()
    assert FakeOmni.instance.calls == []
    task.cancel()
    server.shutdown()


async def test_steps_are_counted_whenever_the_engine_stands_or_is_asked(server):
    FakeOmni.instance.num_steps = 7
    await server.hold()
    FakeOmni.instance.num_steps = 9
    assert server.statistics().num_denoise_steps == 7
    assert await server.count_steps() == server.statistics().num_denoise_steps == 9
    assert FakeOmni.instance.calls == [HOLD, BOUNDARY]


async def test_a_request_that_a_drain_leaves_behind_is_named(omni):
    server = make_server(timeout_s=0.0)
    [task] = await start(server, "left")
    with pytest.raises(DrainTimeout, match=r"1 request\(s\) still in the engine .*\[left#0\]"):
        await server.drain()
    task.cancel()
    server.shutdown()


async def test_whole_requests_cannot_be_held(omni):
    server = make_server(stepwise=False)
    with pytest.raises(EngineError, match=r"rollout\.step_execution=true"):
        await server.hold()
    server.shutdown()


async def test_an_engine_without_sleep_mode_is_not_sent_to_sleep(server):
    await server.drain()
    with pytest.raises(EngineError, match="sleep_mode=False"):
        await server.sleep()
    await server.resume()


async def test_an_answer_without_an_image_is_an_error(server):
    [task] = await start(server, "r")
    [name] = FakeOmni.instance.queues
    FakeOmni.instance.fail(name)
    with pytest.raises(EngineError, match="without an image"):
        await task
