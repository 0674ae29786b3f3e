"""The actors of a run, each with its role and name: whose death is watched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from partial_rollout.integrations.verl_compat import transfer_queue_storage
from partial_rollout.runtime import processes
from partial_rollout.train.resources import TRANSFER_QUEUE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray.actor import ActorHandle

Actor = tuple[str, str, "ActorHandle"]
"""Role, name and handle."""


def transfer_queue_actors() -> list[Actor]:
    """TransferQueue's actors, which are there before the trainer is; empty without a TransferQueue."""
    name, namespace = TRANSFER_QUEUE
    try:
        controller = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return []
    storage = [(processes.TRANSFER_QUEUE_STORAGE.role, *each) for each in transfer_queue_storage().items()]
    return [(processes.TRANSFER_QUEUE_CONTROLLER.role, name, controller), *storage]


def training_ranks(trainer: Any) -> list[tuple[str, ActorHandle]]:
    """The ranks of actor and critic, by name."""
    groups = {"actor": trainer.actor_rollout_wg, "critic": getattr(trainer, "critic_wg", None)}
    return [
        (f"{name}-{rank}", worker)
        for name, group in groups.items()
        if group is not None
        for rank, worker in enumerate(group.workers)
    ]


def engine_servers(trainer: Any) -> list[Actor]:
    """The servers of all replicas."""
    servers = [
        (f"replica-{replica.replica_rank}" + (f"-node-{node}" if node else ""), server)
        for replica in trainer.llm_server_manager.get_replicas()
        for node, server in enumerate(replica.servers)
    ]
    return _with_role(processes.ENGINE_SERVER, servers)


def engine_places(trainer: Any) -> list[Actor]:
    """The actors that hold the devices of engines, where training ranks do not."""
    places = [
        (f"replica-{replica.replica_rank}-place-{number}", place)
        for replica in trainer.llm_server_manager.get_replicas()
        for number, place in enumerate(replica.places)
    ]
    return _with_role(processes.ENGINE_PLACE, places)


def other_actors(trainer: Any, agent_loops: Any) -> list[Actor]:
    """All other actors of a trainer that is ready to train, but for the prompt manager."""
    return [
        *engine_servers(trainer),
        *engine_places(trainer),
        *_with_role(processes.LOAD_BALANCER, [("load-balancer", trainer.llm_server_manager.global_load_balancer)]),
        *_with_role(processes.TRAINING_RANK, training_ranks(trainer)),
        *_with_role(processes.REWARD_WORKER, _numbered("reward", trainer.reward_loop_manager.reward_loop_workers)),
        *_with_role(
            processes.AGENT_LOOP_WORKER, _numbered("agent_loop_worker", agent_loops.agent_loop_workers, separator="_")
        ),
    ]


def _numbered(name: str, actors: Sequence[ActorHandle], separator: str = "-") -> list[tuple[str, ActorHandle]]:
    return [(f"{name}{separator}{rank}", actor) for rank, actor in enumerate(actors)]


def _with_role(kind: processes.Kind, actors: Sequence[tuple[str, ActorHandle]]) -> list[Actor]:
    return [(kind.role, name, actor) for name, actor in actors]
