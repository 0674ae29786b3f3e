"""verl's adapter with our channel, around a server without an engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import zmq
from ray.exceptions import RayTaskError
from verl.workers.engine_workers import ActorRolloutRefWorker

from partial_rollout.errors import EngineDead, WaitTimeout, WeightProtocolError, WeightUpdateError
from partial_rollout.settings.block import PartialRolloutConfig, TimeoutConfig, WeightsConfig
from partial_rollout.weights.adapter import ChannelActorWorker, ChannelAdapter
from tests.unit.weights.support import LONG_S, SHORT_S, Method, make_weights, receive_all

if TYPE_CHECKING:
    from partial_rollout.weights.sender import WeightSender


def make_adapter(channels, *, leads: bool = True, timeout_s: float = 20.0) -> ChannelAdapter:
    adapter = object.__new__(ChannelAdapter)  # its parent's constructor needs Ray
    adapter.zmq_handle, adapter.replica_rank, adapter._has_server = "test", 0, leads
    timeouts = TimeoutConfig(resume_s=10 * timeout_s)
    adapter._settings = PartialRolloutConfig(timeouts=timeouts, weights=WeightsConfig(bucket_mb=1))
    adapter.node_rank = 0
    adapter.failure, adapter._update_number = None, 0
    adapter._server = SimpleNamespace(receive_weights=Method(), give_up_update=Method(), weight_channel=Method())
    adapter._server.weight_channel.answer.set_result(channels.address)
    adapter._server.give_up_update.answer.set_result(None)
    return adapter


async def test_the_engine_is_called_with_the_number_of_the_update_and_waited_for(channels):
    adapter, weights = make_adapter(channels), make_weights(2)
    call = adapter._server.receive_weights
    received = asyncio.get_running_loop().run_in_executor(None, lambda: receive_all(channels.address))
    received.add_done_callback(lambda _: call.answer.set_result(None))
    await adapter.update_weights(iter(weights), global_steps=3)
    assert call.calls == [{"update_number": 1, "version": 3, "peft_config": None}]
    assert [name for name, _ in await received] == [name for name, _ in weights]


async def test_the_engine_is_told_that_an_adapter_comes(channels):
    adapter = make_adapter(channels)
    call = adapter._server.receive_weights
    received = asyncio.get_running_loop().run_in_executor(None, lambda: receive_all(channels.address))
    received.add_done_callback(lambda _: call.answer.set_result(None))
    await adapter.update_weights(iter(make_weights(1)), global_steps=3, peft_config={"r": 8}, base_sync_done=True)
    assert call.calls == [{"update_number": 1, "version": 3, "peft_config": {"r": 8}}]
    assert len(await received) == 1


async def test_a_rank_that_does_not_lead_sends_but_calls_nobody(channels):
    adapter = make_adapter(channels, leads=False)
    received = asyncio.get_running_loop().run_in_executor(None, lambda: receive_all(channels.address))
    await adapter.update_weights(iter(make_weights(1)), global_steps=3)
    assert adapter._server.receive_weights.calls == []
    assert len(await received) == 1


async def test_an_engine_call_that_fails_ends_the_wait_for_its_worker_and_all_is_gathered_nevertheless(channels):
    """Other ranks meet this one in the gathering, and would wait for ever."""
    adapter = make_adapter(channels)
    adapter._server.receive_weights.answer.set_exception(EngineDead("must be relaunched"))
    gathered: list[str] = []

    def weights():
        for name, tensor in make_weights(3):
            yield name, tensor
            gathered.append(name)

    await adapter.update_weights(weights(), global_steps=3)
    assert str(adapter.failure) == "must be relaunched"
    assert len(gathered) == 3
    assert adapter._server.give_up_update.calls == [{"update_number": 1, "reason": "must be relaunched"}]


async def test_the_words_of_a_failure_are_those_of_the_server_without_rays_traceback(channels):
    adapter = make_adapter(channels)
    raised = RayTaskError("f", "File x, line 3", EngineDead("replica 0: the engine (pid 4711) died"))
    adapter._server.receive_weights.answer.set_exception(raised.as_instanceof_cause())
    await adapter.update_weights(iter(make_weights(1)), global_steps=3)
    (told,) = adapter._server.give_up_update.calls
    assert told["reason"] == str(adapter.failure) == "replica 0: the engine (pid 4711) died"


async def test_the_server_is_told_of_an_error_without_a_text_by_its_name(channels):
    adapter = make_adapter(channels)
    adapter._server.receive_weights.answer.set_exception(RuntimeError())
    await adapter.update_weights(iter(make_weights(1)), global_steps=3)
    assert adapter._server.give_up_update.calls == [{"update_number": 1, "reason": "RuntimeError()"}]


class Broken:
    """Stands where the socket or the GPU would fail."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def remote(self, **_):
        raise self._error


@pytest.mark.parametrize(
    "error", [zmq.ZMQError(zmq.ETERM), OSError("no such folder"), RuntimeError("CUDA error"), ValueError("closed")]
)
async def test_whatever_the_engines_end_raises_the_rank_goes_on_gathering(channels, error):
    adapter, weights = make_adapter(channels), iter(make_weights(3))
    adapter._server.receive_weights = Broken(error)
    await adapter.update_weights(weights, global_steps=3)
    assert adapter.failure is error
    assert list(weights) == []


async def test_a_rank_that_loses_its_worker_tells_the_server_which_waits_for_all_of_them(channels):
    adapter = make_adapter(channels, leads=False, timeout_s=2 * SHORT_S)
    await adapter.update_weights(iter(make_weights(1)), global_steps=3)
    (call,) = adapter._server.give_up_update.calls
    assert call["update_number"] == 1
    assert "was silent for 0.2 s" in call["reason"]


async def test_a_server_that_cannot_be_told_does_not_stop_the_gathering(channels):
    adapter, weights = make_adapter(channels), iter(make_weights(3))
    adapter._server.receive_weights.answer.set_exception(EngineDead("gone"))
    adapter._server.give_up_update.answer = Future()
    adapter._server.give_up_update.answer.set_exception(EngineDead("gone for good"))
    await adapter.update_weights(weights, global_steps=3)
    assert (str(adapter.failure), list(weights)) == ("gone", [])


async def test_after_a_failure_the_engine_is_left_alone_until_the_next_update(channels):
    adapter = make_adapter(channels)
    adapter.failure = EngineDead("the first half of this update")
    await adapter.update_weights(iter(make_weights(1)), global_steps=3)
    await adapter.resume(["kv_cache"])
    assert adapter._server.receive_weights.calls == []
    assert adapter._update_number == 1


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("NCCL error")])
async def test_a_failure_in_gathering_the_weights_is_raised(channels, error):
    def weights():
        yield from make_weights(1)
        raise error

    adapter = make_adapter(channels)
    received = asyncio.get_running_loop().run_in_executor(None, lambda: receive_all(channels.address))
    with pytest.raises(type(error)):
        await adapter.update_weights(weights(), global_steps=3)
    with pytest.raises(WeightUpdateError, match=type(error).__name__):
        await received
    assert adapter.failure is (error if isinstance(error, RuntimeError) else None)


def patient(sender: WeightSender) -> WeightSender:
    """`sender`, which waits for its receiver longer than the adapter does for the server: the machine may be busy."""
    sender._line_options["patience"] = lambda: LONG_S
    return sender


async def test_a_server_that_does_not_answer_is_named(channels):
    adapter = make_adapter(channels, timeout_s=1.0)
    adapter._sender = lambda *given: patient(ChannelAdapter._sender(adapter, *given))
    received = asyncio.get_running_loop().run_in_executor(None, lambda: receive_all(channels.address))
    await adapter.update_weights(iter(make_weights(1)), global_steps=3)
    assert isinstance(adapter.failure, WaitTimeout)
    assert "waits for replica 0 to load new weights: no answer within 1 s" in str(adapter.failure)
    await received


async def test_a_training_worker_ends_verls_update_before_it_tells_of_a_failure(monkeypatch):
    """verl's has a barrier of all ranks after the sending."""
    events = []

    async def verls(self, global_steps, mode):
        self.rollout.failure = EngineDead("killed")
        events.append((global_steps, mode))

    monkeypatch.setattr(ActorRolloutRefWorker, "update_weights", verls)
    worker = object.__new__(ChannelActorWorker)
    worker.rollout = SimpleNamespace(failure=None, replica_rank=3)
    with pytest.raises(WeightUpdateError, match="replica 3: killed"):
        await worker.update_weights(global_steps=2, mode="naive")
    assert events == [(2, "naive")]


@pytest.mark.parametrize("options", [{"wire_format": "delta_flush"}, {"peft_config": {"r": 8}}])
async def test_what_the_channel_does_not_carry_is_refused_before_anything_is_sent(channels, options):
    adapter = make_adapter(channels)
    with pytest.raises(WeightProtocolError, match="backend=verl"):
        await adapter.update_weights(iter(make_weights(1)), **options)
    assert adapter._server.receive_weights.calls == []


def test_verl_dispatches_our_worker_as_its_own():
    from verl.single_controller.base.decorator import MAGIC_ATTR

    for method in ("init_model", "update_weights"):
        ours, theirs = (getattr(cls, method) for cls in (ChannelActorWorker, ActorRolloutRefWorker))
        assert getattr(ours, MAGIC_ATTR) == getattr(theirs, MAGIC_ATTR)
