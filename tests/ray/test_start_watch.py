"""A real actor that is frozen while training starts, for which the main thread waits without a bound."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray.exceptions import RayActorError

from partial_rollout.errors import ActorLost
from partial_rollout.observability import stages
from partial_rollout.runtime.run_watch import Interruption
from partial_rollout.runtime.start_watch import StartWatch, actors_of_run

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

LIMIT_S = 60.0
CLAIM_S = 5.0


class WorkerDict:
    """A training rank stands in, by the name of verl's class."""

    def pid(self) -> int:
        return os.getpid()

    def init_model(self) -> None:
        threading.Event().wait()


@pytest.fixture
def rank() -> Iterator[tuple[Any, int]]:
    as_actor: Any = ray.remote(num_cpus=0)(WorkerDict)
    actor = as_actor.options(name="starting_rank").remote()
    yield actor, ray.get(actor.pid.remote(), timeout=LIMIT_S)
    ray.kill(actor)


def test_a_rank_that_is_frozen_ends_the_start_by_its_name_and_one_that_is_busy_does_not(rank: tuple[Any, int]) -> None:
    actor, pid = rank
    (found,) = [each.process for each in actors_of_run() if each.process.name == "starting_rank"]
    assert (found.role, found.pid) == ("training rank", pid)
    stages.begin(stages.TRAINING)
    interruption = Interruption(LIMIT_S)
    watch = StartWatch(interruption, start_s=10 * LIMIT_S, claim_s=CLAIM_S)
    watch.begin()
    busy = actor.init_model.remote()
    try:
        assert ray.wait([busy], timeout=2 * CLAIM_S)[0] == []
        # The signal may come after Ray has told of the rank's end, until the end of the run has begun.
        with pytest.raises(ActorLost) as told:  # noqa: PT012
            try:
                os.kill(pid, signal.SIGSTOP)
                ray.get(busy, timeout=LIMIT_S)
            except (RayActorError, SystemError) as error:
                raise watch.explain(error) from error
            finally:
                interruption.begin_end()
    finally:
        watch.end()
        interruption.ended()
    named = str(told.value)
    assert named.startswith(f"training rank starting_rank (pid {pid} on node {found.node}) was given up: it was")
    assert named.endswith(f"Training was starting: {stages.TRAINING}")


def test_a_rank_that_dies_in_the_start_is_named(rank: tuple[Any, int]) -> None:
    actor, pid = rank
    interruption = Interruption(LIMIT_S)
    watch = StartWatch(interruption, start_s=LIMIT_S, claim_s=LIMIT_S)
    watch.begin()
    try:
        busy = actor.init_model.remote()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RayActorError) as told:
            ray.get(busy, timeout=LIMIT_S)
        named = watch.explain(told.value)
    finally:
        watch.end()
        interruption.ended()
    assert str(named).startswith(f"training rank starting_rank (pid {pid} on node ")
