"""Requests find a server, come back and go on; servers are plain objects with awaitable `remote` calls."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch
from ray.exceptions import RayActorError

from partial_rollout.diffusion import replicas as replicas_module
from partial_rollout.diffusion.replicas import Replicas
from partial_rollout.diffusion.sampling import Interrupted, SampleRequest
from partial_rollout.errors import ActorLost, DrainTimeout, ResumeStalled, WaitTimeout, WeightUpdateError
from partial_rollout.types import Process
from tests.unit.diffusion.results import make_result

WAIT_S = 20.0


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
        self.statistics, self.place, self.count_steps = Call(self._statistics), Call(self._place), Call(self._count)
        self.is_dead, self.frozen, self.breaks, self.version = False, False, False, 0
        self.death = asyncio.Event()

    async def _statistics(self):
        self._require_alive()

    async def _place(self):
        self._require_alive()
        return Process("", "", "10.0.0.2", 7)

    async def _count(self, limit_s):
        self._require_alive()
        if self.frozen:
            await self.death.wait()
            self._require_alive()

    def _require_alive(self):
        if self.is_dead:
            raise RayActorError(error_msg="SIGKILL")

    def die(self, *_):
        self.is_dead = True
        self.death.set()

    async def _generate(self, request):
        self.seen.append(request)
        waits = [asyncio.ensure_future(each.wait()) for each in (self.gate, self.death)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        self._require_alive()
        return self.outcomes.pop(0) if self.outcomes else make_result(self.name)

    async def _answer(self):
        await self.gate.wait()

    async def _channel(self):
        return "address"

    async def _receive(self, version, limit_s, is_part):
        await self.gate.wait()
        self._require_alive()
        if self.breaks:
            raise WeightUpdateError("half of them came")
        self.version, self.is_part = version, is_part
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


def replicas(*servers, timeout_s=60.0, sample_timeout_s=60.0, **options):
    return Replicas(servers, workers_per_server=1, timeout_s=timeout_s, sample_timeout_s=sample_timeout_s, **options)


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
    with pytest.raises(WaitTimeout, match=r"the job for hold of image server 0"):
        await replicas(silent, timeout_s=0.01).hold()


async def test_an_image_that_does_not_come_is_named():
    silent = FakeServer("x")
    silent.gate.clear()
    with pytest.raises(WaitTimeout, match=r"request 'r' .* by server 0, .* rollout\.timeout_s=0\.01"):
        await replicas(silent, sample_timeout_s=0.01).sample(request())


@pytest.mark.parametrize("method", ["hold", "generate"])
async def test_a_server_that_has_died_is_named(method):
    async def dead(*_):
        raise RayActorError(error_msg="pid 7 on 10.0.0.2")

    server = FakeServer("x")
    setattr(server, method, Call(dead))
    both = replicas(FakeServer("y"), server)
    with pytest.raises(ActorLost, match=r"image server 1 died: .*pid 7 on 10\.0\.0\.2.*the run ends"):
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
    with pytest.raises(WaitTimeout, match=r"receive_weights of image server 0.*within 0\.02 s"):
        await replicas(silent, timeout_s=0.01).update(list, 1, torch.device("cpu"), 0.01)


async def within(call):
    return await asyncio.wait_for(call, WAIT_S)


@pytest.fixture
def quick_sender(monkeypatch):
    monkeypatch.setattr(replicas_module, "WeightSender", FakeSender)


async def test_a_dead_server_is_started_again_with_the_trained_weights(quick_sender, caplog):
    """The dead server's request waits until the weights are there, and is generated again; the death is named."""
    caplog.set_level(logging.INFO, "partial_rollout")
    first, second = FakeServer("first"), FakeServer("second")
    first.gate.clear()
    one = replicas(first, start=lambda index: second)
    await one.begin(watched=False)
    first.gate.set()
    await within(one.update(list, 5, torch.device("cpu"), 1.0, is_part=True))
    first.gate.clear()
    async with one.still:  # the model trains
        image = asyncio.ensure_future(one.sample(request()))
        await asyncio.sleep(0)
        first.die()
        await asyncio.wait([image], timeout=0.05)
        assert (second.version, second.seen) == (0, [])
    done = await within(image)
    assert (done.result.request_id, second.version, len(second.seen)) == ("second", 5, 1)
    assert (first.is_part, second.is_part) == (True, True)
    told = next(record for record in caplog.records if record.levelno == logging.ERROR)
    assert (
        "image server 0 (pid 7 on node 10.0.0.2) died: SIGKILL; it had 1 requests; it is started again" in told.message
    )
    assert (told.event.role, told.event.name, told.event.pid) == ("image server", "0", 7)


async def test_others_take_the_requests_of_a_dead_server_meanwhile():
    dead, other, late = FakeServer("dead"), FakeServer("other"), FakeServer("late")
    dead.gate.clear()
    both = replicas(dead, other, start=lambda index: late)
    async with both.still:
        image = asyncio.ensure_future(both.sample(request()))
        await asyncio.sleep(0)
        dead.die()
        assert (await within(image)).result.request_id == "other"
        assert await within(both.drain()) == 2  # of the other one only
    await both.end()


async def test_a_server_that_dies_again_before_the_next_update_ends_the_run(quick_sender):
    first, second = FakeServer("first"), FakeServer("second")
    second.gate.clear()
    one = replicas(first, start=lambda index: second)
    first.die()
    image = asyncio.ensure_future(one.sample(request()))
    await within(one._moved.wait_for(lambda: one._servers[0].is_up and one._servers[0].handle is second))
    await asyncio.sleep(0)
    second.die()
    with pytest.raises(ActorLost, match=r"image server 0 .*died: SIGKILL.*twice since the last update"):
        await within(image)
    with pytest.raises(ActorLost, match="twice since"):
        await one.hold()


async def test_a_server_that_lives_through_an_update_may_die_again(quick_sender):
    servers = [FakeServer(str(number)) for number in range(3)]
    one = replicas(servers[0], start=lambda index: servers[1 + sum(each.is_dead for each in servers[1:])])
    servers[0].die()
    assert (await within(one.sample(request()))).result.request_id == "1"
    await within(one.update(list, 1, torch.device("cpu"), 1.0))
    servers[1].die()
    assert (await within(one.sample(request()))).result.request_id == "2"
    assert servers[2].version == 1


async def test_a_server_that_dies_while_it_starts_ends_the_run():
    first, second = FakeServer("first"), FakeServer("second")
    one = replicas(first, start=lambda index: second)
    first.die()
    second.die()
    with pytest.raises(ActorLost, match="image server 0 died: SIGKILL"):
        await within(one.sample(request()))


async def test_a_silent_engine_is_killed_and_started_again():
    frozen, second = FakeServer("frozen"), FakeServer("second")
    frozen.gate.clear()
    killed = []

    def kill(handle, process):
        killed.append(process)
        handle.die()

    one = replicas(frozen, start=lambda index: second, stall_s=0.1, kill=kill)
    frozen.frozen = True
    await one.begin(watched=True)
    assert (await within(one.sample(request()))).result.request_id == "second"
    assert [process.pid for process in killed] == [7]
    await one.end()


async def test_a_server_that_is_late_for_a_control_call_is_killed_and_the_others_go_on():
    silent, other, second = FakeServer("silent"), FakeServer("other"), FakeServer("second")
    silent.gate.clear()
    both = replicas(silent, other, start=lambda index: second, timeout_s=0.1, kill=lambda handle, process: handle.die())
    await within(both.hold())
    assert silent.is_dead
    await within(both._moved.wait_for(lambda: both._servers[0].is_up))
    assert both._servers[0].handle is second


async def test_a_request_that_is_the_end_of_its_servers_ends_the_run():
    """Each server dies with it; others go on and are updated, so no server counts as dead twice."""

    class Deadly(FakeServer):
        async def _generate(self, request):
            self.die()
            self._require_alive()

    one = replicas(*(Deadly(str(number)) for number in range(4)), start=lambda index: Deadly("again"))
    with pytest.raises(ActorLost, match=r"3 servers died with request 'r': image server 2 died"):
        await within(one.sample(request()))
    await one.end()


@pytest.mark.parametrize("again", [False, True])
async def test_a_server_with_half_an_update_is_started_again(quick_sender, again):
    """One that does not take the update after a new start either ends the run with the reason."""
    broken, other, second = FakeServer("broken"), FakeServer("other"), FakeServer("second")
    broken.breaks, second.breaks = True, again
    both = replicas(broken, other, start=lambda index: second, kill=lambda handle, process: handle.die())
    await within(both.update(list, 3, torch.device("cpu"), 1.0))
    assert (broken.is_dead, other.version, other.is_part) == (True, 3, False)
    await within(both._moved.wait_for(lambda: both._failure is not None or both._servers[0].is_up))
    if again:
        with pytest.raises(WeightUpdateError, match="half of them came"):
            await both.hold()
    else:
        assert second.version == 3
