"""A training rank's end of the updates of engines on devices of their own, around servers without engines."""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from partial_rollout.errors import EngineDead, InternalError, WeightUpdateError
from partial_rollout.weights import checkpoint_engine
from partial_rollout.weights.checkpoint_engine import ChannelCheckpointEngine, Target, share_targets
from tests.unit.weights.support import LONG_S, SHORT_S, Answer, Method, make_weights, receive_all

HERE, AWAY = "node 1", "node 2"
OPTIONS = {"timeout_s": LONG_S, "buffer_bytes": None, "encrypt": False}


class Receiving(Method):
    """`receive_weights` of a server whose workers are threads."""

    def __init__(self, address) -> None:
        super().__init__()
        self.address, self.received = address, []

    def remote(self, **kwargs):
        self.calls.append(kwargs)
        self.received = [
            asyncio.get_running_loop().run_in_executor(None, self._receive, endpoint, kwargs["update_number"])
            for endpoint in kwargs["endpoints"]
        ]
        done: Future = Future()
        asyncio.gather(*self.received, return_exceptions=True).add_done_callback(lambda _: done.set_result(None))
        return Answer(done)

    def _receive(self, endpoint, update_number):
        return receive_all(self.address, endpoint=endpoint, update_number=update_number)


def make_server(channels, node_id):
    server = SimpleNamespace(
        weight_channel=Method(), receive_weights=Receiving(channels.address), give_up_update=Method()
    )
    server.weight_channel.answer.set_result(dataclasses.replace(channels.address, node_id=node_id))
    server.give_up_update.answer.set_result(None)
    return server


@pytest.fixture
def servers(channels, monkeypatch):
    """The first one on this node, the second one on another."""
    monkeypatch.setattr(checkpoint_engine, "this_node", lambda: (HERE, "127.0.0.1"))
    return [make_server(channels, node_id) for node_id in (HERE, AWAY)]


def make_engine(servers, **options):
    engine = ChannelCheckpointEngine(bucket_size=0, is_master=True, **(OPTIONS | options))
    engine.aim([Target(rank, server, num_workers=2) for rank, server in enumerate(servers)])
    return engine


@pytest.mark.parametrize("encrypt", [False, True])
async def test_every_worker_gets_the_weights_by_memory_on_this_node_and_over_tcp_on_another(servers, encrypt):
    engine, weights = make_engine(servers, encrypt=encrypt), make_weights(3)
    for version in (7, 8):
        await engine.send_weights(iter(weights), global_steps=version)
        for server in servers:
            for each in server.receive_weights.received:
                got = await each
                assert all(torch.equal(tensor, wanted) for (_, tensor), (_, wanted) in zip(got, weights, strict=True))
    for server, scheme in zip(servers, ("ipc://", "tcp://127.0.0.1:"), strict=True):
        calls = server.receive_weights.calls
        assert [(call["update_number"], call["version"], len(call["endpoints"])) for call in calls] == [
            (1, 7, 2),
            (2, 8, 2),
        ]
        assert all(endpoint.startswith(scheme) for endpoint in calls[0]["endpoints"])
        assert all(("#" in endpoint) is (encrypt and scheme != "ipc://") for endpoint in calls[0]["endpoints"])


@pytest.mark.parametrize("broken", ["weight_channel", "receive_weights"])
async def test_an_engine_that_fails_is_named_and_told_and_the_other_one_has_everything(servers, broken):
    method = Method()
    method.answer.set_exception(EngineDead("gone"))
    setattr(servers[0], broken, method)
    with pytest.raises(WeightUpdateError, match="^replica 0: gone$"):
        await make_engine(servers).send_weights(iter(make_weights(3)), global_steps=7)
    assert [len(await each) for each in servers[1].receive_weights.received] == [3, 3]
    assert servers[0].give_up_update.calls == [{"update_number": 1, "reason": "gone"}]
    assert servers[1].give_up_update.calls == []


async def test_workers_that_never_come_are_named_within_the_limit_and_everything_is_gathered(servers):
    for server in servers:
        server.receive_weights = Method()
    gathered = []
    weights = ((gathered.append(name), (name, tensor))[1] for name, tensor in make_weights(3))
    with pytest.raises(WeightUpdateError, match="replica 0: .*worker 0 was silent for 0.4 s.*; replica 1: .*silent"):
        await make_engine(servers, timeout_s=4 * SHORT_S).send_weights(weights)
    assert len(gathered) == 3
    assert all("was silent" in server.give_up_update.calls[0]["reason"] for server in servers)


async def test_a_rank_without_an_engine_gathers(servers):
    gathered = []
    weights = ((gathered.append(name), (name, tensor))[1] for name, tensor in make_weights(3))
    await make_engine([]).send_weights(weights)
    assert len(gathered) == 3


async def test_a_failure_of_the_gathering_is_raised_as_it_is(servers):
    def weights():
        yield from make_weights(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await make_engine(servers).send_weights(weights())
    for server in servers:
        outcomes = await asyncio.gather(*server.receive_weights.received, return_exceptions=True)
        assert all("ZeroDivisionError" in str(each) for each in outcomes)


def test_engines_are_shared_among_ranks_and_a_rank_may_have_none():
    targets = [Target(rank, None, 1) for rank in range(3)]
    assert share_targets(targets, 2) == [[targets[0], targets[2]], [targets[1]]]
    assert share_targets(targets[:1], 2) == [[targets[0]], []]


async def test_the_half_of_verls_interface_that_nothing_calls_says_so():
    with pytest.raises(InternalError, match="receive_weights was called"):
        await make_engine([]).receive_weights()
