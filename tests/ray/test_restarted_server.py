"""What an engine server rests on: Ray starts a dead actor again, tells of its death, and makes its calls again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
import ray

pytest.importorskip("vllm")

from partial_rollout.rollout.control import CONTROL_GROUP
from partial_rollout.rollout.replica import KeptArguments, PartialRolloutReplica
from partial_rollout.runtime.death_watch import packed
from partial_rollout.runtime.placement import RESTARTED
from partial_rollout.runtime.prompt_manager import create_manager
from partial_rollout.settings.block import PartialRolloutConfig, TimeoutConfig
from tests.fake_engine import FakeServer
from tests.ray.test_parked_server import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

LIMIT_S = 60.0
LARGE = 1 << 20
"""Bytes; Ray puts so large an argument into its object store."""


class Server:
    """Holds what it was given."""

    def __init__(self, config: bytes) -> None:
        self._config = config

    async def was_given(self) -> tuple[int, int, bool]:
        """Size, process id, and whether it is a later process."""
        return len(self._config), os.getpid(), ray.get_runtime_context().was_current_actor_reconstructed

    async def until_killed(self) -> None:
        """Wait without end, as this method of an engine server does."""
        await asyncio.Event().wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_is_frozen_is_started_again_with_its_arguments(
    request: pytest.FixtureRequest, number: signal.Signals
) -> None:
    settings = PartialRolloutConfig(timeouts=TimeoutConfig(claim_s=5.0))
    manager = create_manager(settings, 8, name=request.node.name)
    as_actor: Any = ray.remote(num_cpus=0, **RESTARTED)
    kept: list[ray.ObjectRef[Any]] = []  # without it the second process finds no `config`
    server: Any = KeptArguments(as_actor(Server), kept).remote(config=bytes(LARGE))
    size, pid, was_restarted = ray.get(server.was_given.remote(), timeout=LIMIT_S)
    assert (size, was_restarted) == (LARGE, False)
    ray.get(manager.watch.remote(packed([("engine server", "replica-0", server)])), timeout=LIMIT_S)
    os.kill(pid, number)
    death = ray.get(manager.next_death.remote(LIMIT_S), timeout=2 * LIMIT_S)
    assert (death.process.name, death.process.pid) == ("replica-0", pid)
    size, later, was_restarted = ray.get(server.was_given.remote(), timeout=LIMIT_S)
    assert (size, was_restarted) == (LARGE, True)
    assert later != pid
    ray.kill(server)
    ray.kill(manager)


class DyingServer(FakeServer):
    """A server whose first process dies when it is to start its engine again; Ray makes that call in the second."""

    def __init__(self) -> None:
        """Begin as an engine server does."""
        super().__init__()
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._begin_without_engine()

    async def _stop_engine(self, grace_s: float) -> None:
        if not self._has_lost_engine:
            os._exit(1)


def replica_of(server: Any) -> PartialRolloutReplica:
    replica = object.__new__(PartialRolloutReplica)
    replica.servers, replica.replica_rank, replica.settings = [server], 0, PartialRolloutConfig()
    return replica


@pytest.fixture
def dying_server() -> Iterator[Any]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[FakeServer.__module__])
    as_actor: Any = ray.remote(num_cpus=0, concurrency_groups={CONTROL_GROUP: 8}, **RESTARTED)
    server = as_actor(DyingServer).remote()
    ray.get(server.launch_server.remote(), timeout=LIMIT_S)
    yield server
    ray.kill(server)


def test_an_engine_wakes_its_requests_though_its_server_died_when_it_was_to_start_the_engine_again(
    dying_server: Any,
) -> None:
    """Control calls have a loop of their own: an engine that begins there leaves requests asleep, whatever they get."""
    server = dying_server
    pid = ray.get(server.__ray_call__.remote(lambda _: os.getpid()), timeout=LIMIT_S)
    asyncio.run(asyncio.wait_for(replica_of(server).relaunch(), 2 * LIMIT_S))
    assert ray.get(server.__ray_call__.remote(lambda _: os.getpid()), timeout=LIMIT_S) != pid
    ray.get(server.receive_weights.remote(update_number=1, version=3), timeout=LIMIT_S)
    ray.get(server.resume_generation.remote(), timeout=LIMIT_S)
    request = server.generate.remote([1, 2, 3], {"max_tokens": 5}, "a")
    wait_until(ray.get, server, "in_flight", 1)
    ray.get(server.abort_all_requests.remote(), timeout=LIMIT_S)
    assert ray.get(request, timeout=LIMIT_S).stop_reason == "aborted"
    assert len(ray.get(server.engine_threads.remote(), timeout=LIMIT_S)) == 1
