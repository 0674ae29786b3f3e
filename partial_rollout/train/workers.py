"""The class of the training workers: verl's own, with planned micro-batches, with our weight channel, or with both."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.utils import Role

from partial_rollout.packing.engine import PackedActorRolloutRefWorker, PackedTrainingWorker
from partial_rollout.weights.adapter import ChannelActorWorker


class PackedChannelActorWorker(ChannelActorWorker):
    """Both."""

    actor_worker_cls = PackedTrainingWorker
    ref_worker_cls = PackedTrainingWorker


WORKERS: dict[tuple[bool, bool], type] = {
    (True, False): PackedActorRolloutRefWorker,
    (False, True): ChannelActorWorker,
    (True, True): PackedChannelActorWorker,
}
"""By (packed, channel)."""


def use_workers(role_workers: dict[Any, Any], *, packed: bool, channel: bool) -> None:
    """Put ours in place of verl's for the actor and the reference; a critic keeps verl's."""
    worker = WORKERS.get((packed, channel))
    if worker is None:
        return
    for role in (Role.ActorRollout, Role.ActorRolloutRef):
        if role in role_workers:
            role_workers[role] = ray.remote(worker)
