"""verl's load balancer as an actor that Ray starts again: all who have its handle keep it.

Its constructor is given the servers, so a new process knows them. Counts of open requests begin with 0, and which
server a trajectory was at is forgotten: its next request may go to another one, and computes its context again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from partial_rollout.runtime.death_watch import Parking
from partial_rollout.runtime.placement import RESTARTED

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerManager


class RestartedLoadBalancer(GlobalRequestLoadBalancer):
    """verl's, with a call that tells of its death."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parking = Parking()

    async def until_killed(self) -> None:
        """Wait as `Parking` says."""
        await self._parking.until_killed()


def make_restarted(servers: LLMServerManager) -> None:
    """Put one that is started again in the place of verl's, before anybody has its handle; not of another router."""
    if not has_restarted(servers):
        return
    rollout: Any = servers.rollout_config
    ray.kill(servers.global_load_balancer)
    actor_class: Any = ray.remote(**RESTARTED)(RestartedLoadBalancer)
    servers.global_load_balancer = actor_class.remote(
        servers=dict(zip(servers.server_addresses, servers.server_handles, strict=True)),
        full_determinism=rollout.full_determinism,
    )


def has_restarted(servers: LLMServerManager) -> bool:
    """Whether the router is verl's own."""
    rollout: Any = servers.rollout_config
    return rollout.router_config_path is None
