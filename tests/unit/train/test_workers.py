"""Actor and reference get the class that does what the run was asked for; a critic keeps verl's."""

from __future__ import annotations

from typing import Any

import pytest
from verl.trainer.ppo.utils import Role

from partial_rollout.packing.engine import PackedTrainingWorker
from partial_rollout.train.workers import use_workers
from partial_rollout.weights.adapter import ChannelActorWorker

VERLS = "verl's"


def chosen(*, packed: bool, channel: bool) -> dict[Any, Any]:
    roles: dict[Any, Any] = dict.fromkeys((Role.ActorRollout, Role.ActorRolloutRef, Role.Critic), VERLS)
    use_workers(roles, packed=packed, channel=channel)
    return roles


@pytest.mark.parametrize(("packed", "channel"), [(True, False), (False, True), (True, True)])
def test_actor_and_reference_get_what_was_asked_for(packed: bool, channel: bool):
    roles = chosen(packed=packed, channel=channel)
    assert roles.pop(Role.Critic) == VERLS
    for worker in roles.values():
        made_of = worker.__ray_metadata__.modified_class.__ray_actor_class__
        engines = [made_of.actor_worker_cls is PackedTrainingWorker, made_of.ref_worker_cls is PackedTrainingWorker]
        assert engines == [packed, packed]
        assert issubclass(made_of, ChannelActorWorker) is channel


@pytest.mark.parametrize("channel", [True, False])
def test_ranks_without_an_engine_beside_them_are_planned_for_and_send_by_a_checkpoint_engine(channel: bool):
    roles: dict[Any, Any] = dict.fromkeys((Role.Actor, Role.RefPolicy), VERLS)
    use_workers(roles, packed=True, channel=channel)
    for worker in roles.values():
        made_of = worker.__ray_metadata__.modified_class.__ray_actor_class__
        assert made_of.actor_worker_cls is PackedTrainingWorker
        assert not issubclass(made_of, ChannelActorWorker)


def test_asked_for_nothing_verls_classes_stay():
    assert set(chosen(packed=False, channel=False).values()) == {VERLS}


def test_a_role_that_the_run_does_not_have_is_not_added():
    roles: dict[Any, Any] = {Role.ActorRollout: VERLS}
    use_workers(roles, packed=True, channel=True)
    assert roles.keys() == {Role.ActorRollout}
