"""Requests find a server, come back and go on; servers are plain objects with awaitable `remote` calls."""

from __future__ import annotations

import asyncio

import pytest
import torch
from ray.exceptions import RayActorError

from partial_rollout.diffusion import replicas as replicas_module
from partial_rollout.diffusion.replicas import Replicas
from partial_rollout.diffusion.sampling import Interrupted, SampleRequest
from partial_rollout.errors import ActorLost, DrainTimeout, ResumeStalled, WaitTimeout
from tests.unit.diffusion.results import make_result


class Call:
    def __init__(self, function):
        self.remote = function


class FakeServer:
    """Interrupts each request as often as its script says, then finishes it."""

    def __init__(self, name, outcomes=()):
        self.name, self.outcomes, self.seen, self.gate = name, list(outcomes), [], asyncio.Event()
        self.gate.set()
        self.generate = Call(self._generate)
        self.hold = self.release = self.resume = Call(self._answer)
        self.weight_channel, self.receive_weights = Call(self._channel), Call(self._receive)
        self.drain = Call(self._drain)

    async def _generate(self, request):
        self.seen.append(request)
        await self.gate.wait()
        return self.outcomes.pop(0) if self.outcomes else make_result(self.name)

    async def _answer(self):
        await self.gate.wait()

    async def _channel(self):
        return "address"

    async def _receive(self, version, limit_s):
        await self.gate.wait()
        return version

    async def _drain(self):
        return ["a", "b"]


async def refuse():
    raise DrainTimeout("left: r")


def request(name="r"):
    return SampleRequest(request_id=name, prompt_ids=(1,), seed=0, height=8, width=8, num_steps=3)


class FakeSender:
    """Sends at once."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def send(self, weights):
        list(weights)


def replicas(*servers, timeout_s=60.0, sample_timeout_s=60.0):
    return Replicas(servers, workers_per_server=1, timeout_s=timeout_s, sample_timeout_s=sample_timeout_s)


async def test_an_interrupted_request_goes_on_from_its_snapshot_wherever_there_is_room():
    first = FakeServer("first", [Interrupted(b"s", 2, 0)])
    second = FakeServer("second")
    second.gate.clear()
    both = replicas(second, first)
    waiting = asyncio.ensure_future(both.sample(request("b")))
    await asyncio.sleep(0)
    done = await both.sample(request("a"))
    assert (done.result.request_id, done.num_interruptions) == ("first", 1)
    assert done.servers == (1, 1, 1)
    assert [item.snapshot for item in first.seen] == [None, b"s"]
    second.gate.set()
    assert (await waiting).result.request_id == "second"


async def test_each_denoise_step_is_of_the_server_that_computed_it():
    """While a request is interrupted at the first server, the second one becomes free, and the first gets another."""
    first, second = FakeServer("first"), FakeServer("second")
    both, others = replicas(first, second), []

    async def generate(asked):
        if asked.request_id != "a":
            return await first._generate(asked)
        others.extend(asyncio.ensure_future(both.sample(request(name))) for name in "bc")
        await others[0]
        return Interrupted(b"s", 2, 0)

    first.generate = Call(generate)
    first.gate.clear()
    done = await both.sample(request("a"))
    first.gate.set()
    await asyncio.gather(*others)
    assert done.servers == (0, 0, 1)


async def test_one_that_had_not_begun_starts_again():
    server = FakeServer("x", [Interrupted(None, 0, 0)])
    await replicas(server).sample(request())
    assert server.seen == [request(), request()]


async def test_one_that_never_moves_is_an_error():
    server = FakeServer("x", [Interrupted(None, 0, 0)] * 9)
    with pytest.raises(ResumeStalled):
        await replicas(server).sample(request())


async def test_a_drain_counts_what_came_out_of_all():
    assert await replicas(FakeServer("a"), FakeServer("b")).drain() == 4


async def test_a_server_that_does_not_answer_is_an_error():
    silent = FakeServer("x")
    silent.gate.clear()
    with pytest.raises(WaitTimeout, match=r"the job for hold of 1 server"):
        await replicas(silent, timeout_s=0.01).hold()


async def test_an_image_that_does_not_come_is_named():
    silent = FakeServer("x")
    silent.gate.clear()
    with pytest.raises(WaitTimeout, match=r"request 'r' for its image by server 0, .* rollout\.timeout_s=0\.01"):
        await replicas(silent, sample_timeout_s=0.01).sample(request())


@pytest.mark.parametrize("method", ["hold", "generate"])
async def test_a_server_that_has_died_is_named(method):
    async def dead(*_):
        raise RayActorError(error_msg="pid 7 on 10.0.0.2")

    server = FakeServer("x")
    setattr(server, method, Call(dead))
    both = replicas(FakeServer("y"), server)
    with pytest.raises(ActorLost, match=r"image server 1 has died: .*pid 7 on 10\.0\.0\.2"):
        await (
            both.hold() if method == "hold" else asyncio.gather(both.sample(request("a")), both.sample(request("b")))
        )


async def test_what_a_server_raises_is_not_taken_for_silence():
    server = FakeServer("x")
    server.hold = Call(refuse)
    with pytest.raises(DrainTimeout, match="left"):
        await replicas(server).hold()


async def test_an_update_has_its_own_limit_beside_that_of_control_calls(monkeypatch):
    """A server that answers after the limit of control calls, and within that of the update."""
    limits = {}

    async def noted(call, *, timeout_s, who_waits):
        limits[who_waits] = timeout_s
        return await call

    monkeypatch.setattr(replicas_module, "WeightSender", FakeSender)
    monkeypatch.setattr(replicas_module, "answer_of", noted)
    await replicas(FakeServer("x"), timeout_s=1.0).update(list, 1, torch.device("cpu"), 500.0)
    assert list(limits.values()) == [1.0, 501.0]


async def test_an_update_that_no_server_ends_is_named(monkeypatch):
    silent = FakeServer("x")
    silent.gate.clear()
    monkeypatch.setattr(replicas_module, "WeightSender", FakeSender)
    with pytest.raises(WaitTimeout, match=r"receive_weights of 1 server.*within 0\.02 s"):
        await replicas(silent, timeout_s=0.01).update(list, 1, torch.device("cpu"), 0.01)
