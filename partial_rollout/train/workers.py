"""The class of the training workers: verl's own, with planned micro-batches, with our weight channel, or with both.

Training processes import this file, so it imports nothing of the trainer.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.utils import Role

from partial_rollout.packing.engine import PackedActorRolloutRefWorker, PackedTrainingWorker
from partial_rollout.weights.adapter import ChannelActorWorker


class PackedChannelActorWorker(ChannelActorWorker):
    """Trains on planned micro-batches and sends weights through our channel."""

    actor_worker_cls = PackedTrainingWorker
    ref_worker_cls = PackedTrainingWorker


WORKERS: dict[tuple[bool, bool], type] = {
    (True, False): PackedActorRolloutRefWorker,
    (False, True): ChannelActorWorker,
    (True, True): PackedChannelActorWorker,
}
"""Worker class by (whether micro-batches are planned, whether weights go through our channel)."""


def use_workers(role_workers: dict[Any, Any], *, packed: bool, channel: bool) -> None:
    """Replace verl's class of the actor and the reference in `role_workers`; a critic keeps verl's.

    Ranks without an engine beside them (the roles Actor and RefPolicy) send weights by a checkpoint engine instead of
    the channel of their own.
    """
    for role in (Role.ActorRollout, Role.ActorRolloutRef, Role.Actor, Role.RefPolicy):
        worker = WORKERS.get((packed, channel and role not in (Role.Actor, Role.RefPolicy)))
        if role in role_workers and worker is not None:
            role_workers[role] = ray.remote(worker)
