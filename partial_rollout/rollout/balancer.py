"""verl's load balancer as an actor that Ray starts again: all who have its handle keep it.

Its constructor is given the servers, so a new process knows them. Counts of open requests begin with 0, and which
server a trajectory was at is forgotten: its next request may go to another one, and computes its context again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from verl.workers.rollout.router import DEFAULT_ROUTING_CACHE_SIZE, GlobalRequestLoadBalancer

from partial_rollout.runtime.death_watch import Parking
from partial_rollout.runtime.placement import RESTARTED

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerManager


REMEMBERED_PER_SLOT = 8
"""Trajectories whose engine the balancer remembers, for each slot. Between two requests of a trajectory, which may be a
whole step apart, every slot is given to further trajectories several times; those of short responses most often."""


class RestartedLoadBalancer(GlobalRequestLoadBalancer):
    """verl's, with a call that tells of its death."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parking = Parking()

    async def until_killed(self) -> None:
        """Wait as `Parking` says."""
        await self._parking.until_killed()


def make_restarted(servers: LLMServerManager, num_slots: int) -> None:
    """Put one that is started again in the place of verl's, before anybody has its handle; not of another router.

    It remembers the engine of more trajectories than verl's, which remembers 10,000: with more in flight interrupted
    responses go on in an engine that does not have their KV, and nothing says so.
    """
    if not has_restarted(servers):
        return
    rollout: Any = servers.rollout_config
    ray.kill(servers.global_load_balancer)
    actor_class: Any = ray.remote(**RESTARTED)(RestartedLoadBalancer)
    servers.global_load_balancer = actor_class.remote(
        servers=dict(zip(servers.server_addresses, servers.server_handles, strict=True)),
        max_cache_size=max(DEFAULT_ROUTING_CACHE_SIZE, REMEMBERED_PER_SLOT * num_slots),
        full_determinism=rollout.full_determinism,
    )


def has_restarted(servers: LLMServerManager) -> bool:
    """Whether the router is verl's own."""
    rollout: Any = servers.rollout_config
    return rollout.router_config_path is None
