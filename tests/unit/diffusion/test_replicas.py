"""Requests find a server, come back and go on; servers are plain objects with awaitable `remote` calls."""

from __future__ import annotations

import asyncio

import pytest

from partial_rollout.core.sampling import Interrupted, SampleRequest
from partial_rollout.diffusion.replicas import Replicas
from partial_rollout.errors import ResumeStalled, WaitTimeout
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
        self.drain = Call(self._drain)

    async def _generate(self, request):
        self.seen.append(request)
        await self.gate.wait()
        return self.outcomes.pop(0) if self.outcomes else make_result(self.name)

    async def _answer(self):
        await self.gate.wait()

    async def _drain(self):
        return ["a", "b"]


def request(name="r"):
    return SampleRequest(request_id=name, prompt_ids=(1,), seed=0, height=8, width=8, num_steps=3)


def replicas(*servers, timeout_s=60.0):
    return Replicas(servers, workers_per_server=1, timeout_s=timeout_s)


async def test_an_interrupted_request_goes_on_from_its_snapshot_wherever_there_is_room():
    first = FakeServer("first", [Interrupted(b"s", 2, 0)])
    second = FakeServer("second")
    second.gate.clear()
    both = replicas(second, first)
    waiting = asyncio.ensure_future(both.sample(request("b")))
    await asyncio.sleep(0)
    done = await both.sample(request("a"))
    assert (done.result.request_id, done.num_interruptions) == ("first", 1)
    assert [item.snapshot for item in first.seen] == [None, b"s"]
    second.gate.set()
    assert (await waiting).result.request_id == "second"


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
    with pytest.raises(WaitTimeout, match="hold: not all 1 servers"):
        await replicas(silent, timeout_s=0.01).hold()
