"""What an engine server rests on: Ray starts an actor again that has died, and its death is told nevertheless."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
import ray

pytest.importorskip("vllm")

from partial_rollout.rollout.replica import KeptArguments
from partial_rollout.runtime.death_watch import packed
from partial_rollout.runtime.placement import RESTARTED
from partial_rollout.runtime.prompt_manager import create_manager
from partial_rollout.settings.block import PartialRolloutConfig, TimeoutConfig

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
