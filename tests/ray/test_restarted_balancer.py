"""verl's load balancer as an actor that is started again: it knows its servers, and its handle stays what it was."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray.exceptions import RayActorError

pytest.importorskip("verl")

from verl.workers.rollout.router import DEFAULT_ROUTING_CACHE_SIZE, get_router_handle

from partial_rollout.rollout.balancer import make_restarted
from partial_rollout.runtime.death_watch import packed
from partial_rollout.runtime.prompt_manager import create_manager
from partial_rollout.settings.block import PartialRolloutConfig, TimeoutConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

LIMIT_S = 60.0
NUM_REQUESTS = 20


class Server:
    """Is asked for nothing but its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        """The name that the server was given."""
        return self._name


def call(ref: ray.ObjectRef) -> Any:
    return ray.get(ref, timeout=LIMIT_S)


@pytest.fixture
def servers(ray_cluster: Any) -> Iterator[Any]:
    """A stand-in for verl's LLMServerManager, with two servers."""
    names = ["node:1", "node:2"]
    actor_class: Any = ray.remote(num_cpus=0)(Server)
    handles = [actor_class.remote(name) for name in names]
    rollout = SimpleNamespace(router_config_path=None, full_determinism=False)
    yield SimpleNamespace(
        rollout_config=rollout,
        server_addresses=names,
        server_handles=handles,
        global_load_balancer=get_router_handle(dict(zip(names, handles, strict=True))),
    )
    for handle in handles:
        ray.kill(handle)


def pid(actor: Any) -> int:
    return call(actor.__ray_call__.remote(lambda _: os.getpid()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_it_is_started_again_with_its_servers_and_requests_wait(
    servers: Any, request: pytest.FixtureRequest, number: signal.Signals
) -> None:
    before = servers.global_load_balancer
    make_restarted(servers, NUM_REQUESTS)
    balancer = servers.global_load_balancer
    with pytest.raises(RayActorError):  # verl's own
        call(before.get_all_servers.remote())
    settings = PartialRolloutConfig(timeouts=TimeoutConfig(claim_s=5.0))
    manager = create_manager(settings, 8, name=f"balancer-{number}")
    call(manager.watch.remote(packed([("load balancer", "load-balancer", balancer)])))
    struck = pid(balancer)
    os.kill(struck, number)
    asked = [balancer.acquire_server.remote(request_id=str(each)) for each in range(NUM_REQUESTS)]
    death = call(manager.next_death.remote(LIMIT_S))
    assert (death.process.name, death.process.pid) == ("load-balancer", struck)
    for ref in asked:
        server_id, handle = call(ref)
        assert call(handle.name.remote()) == server_id
    call(balancer.release_server.remote(server_id="node:1"))
    assert call(balancer.get_total_inflight.remote()) == NUM_REQUESTS - 1
    assert pid(balancer) != struck
    ray.kill(balancer)
    ray.kill(manager)


def test_a_router_of_the_user_stays_as_it_is(servers: Any) -> None:
    servers.rollout_config.router_config_path = "router.yaml"
    before = servers.global_load_balancer
    make_restarted(servers, NUM_REQUESTS)
    assert servers.global_load_balancer is before
    assert call(before.get_all_servers.remote()) == servers.server_addresses
    ray.kill(before)


def test_interrupted_responses_go_back_to_their_engine_however_many_there_are(servers: Any) -> None:
    num_slots = DEFAULT_ROUTING_CACHE_SIZE + 2_000
    make_restarted(servers, num_slots)
    balancer = servers.global_load_balancer

    def acquire_all(balancer: Any) -> list[str]:
        chosen = [balancer.acquire_server(request_id=str(each))[0] for each in range(num_slots)]
        for name in chosen:
            balancer.release_server(server_id=name)
        return chosen

    before, after = (call(balancer.__ray_call__.remote(acquire_all)) for _ in range(2))
    assert after == before
    ray.kill(balancer)
