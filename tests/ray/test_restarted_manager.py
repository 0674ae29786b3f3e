"""The prompt manager as a real actor whose process is killed or frozen: its callers and its queue go on."""

from __future__ import annotations

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from partial_rollout.runtime.death_watch import describe, packed
from partial_rollout.runtime.prompt_manager import create_manager, find_manager
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.types import PromptMeta, TrajectorySummary

if TYPE_CHECKING:
    from partial_rollout.types import Process, QueueStatistics

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

GROUP = 2
BATCH = 8
NUM_BATCHES = 10
NUM_WORKERS = 3
NUM_DEATHS = 3
LIMIT_S = 120.0


SETTINGS = PartialRolloutConfig()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A manager name per test."""
    return request.node.name


def call(ref: ray.ObjectRef) -> Any:
    return ray.get(ref, timeout=LIMIT_S)


def where(manager: Any) -> Process:
    return call(manager.__ray_call__.remote(describe))


def work(name: str, worker_id: str) -> int:
    """Claim until the manager closes; finish most, fail or give back some. Returns the groups finished."""
    manager, rng, finished = find_manager(name), random.Random(worker_id), 0
    while not call(manager.status.remote()).closed:
        for claim in call(manager.claim.remote(worker_id, 3 * GROUP, 5.0)):
            fate = rng.random()
            if fate < 0.8:
                group = [TrajectorySummary(f"{claim.uid}_{i}_0", 1, 1, 0, 0) for i in range(GROUP)]
                result = call(manager.finish_many.remote([(claim, group)]))
                assert not result.stale
                finished += 1
            elif fate < 0.9:
                call(manager.fail.remote(claim, "ValueError: on purpose"))
            else:
                call(manager.give_back.remote(claim))
    return finished


def test_nothing_is_lost_or_made_twice_when_its_process_is_killed_again_and_again(
    name: str,
) -> None:
    manager = create_manager(SETTINGS, BATCH, name=name)
    trained: list[str] = []
    samples: list[QueueStatistics] = []
    pids = [where(manager).pid]
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        workers = [pool.submit(work, name, f"w{i}") for i in range(NUM_WORKERS)]
        try:
            for step in range(NUM_BATCHES):
                room = SETTINGS.capacity(BATCH) - call(manager.statistics.remote()).in_flight
                fresh = [PromptMeta(f"{step}-{i}", GROUP, global_step=step) for i in range(room)]
                call(manager.admit.remote(fresh))
                samples.append(call(manager.statistics.remote()))
                batch = manager.take_batch.remote(BATCH, LIMIT_S)
                if len(pids) <= NUM_DEATHS:
                    os.kill(pids[-1], signal.SIGKILL)  # while all of its callers wait for it
                    pids.append(where(manager).pid)
                trained += [group.uid for group in call(batch).groups]
        finally:
            call(manager.close.remote("enough"))
        finished = sum(worker.result(LIMIT_S) for worker in workers)
    end = call(manager.statistics.remote())
    assert len(set(pids)) == 1 + NUM_DEATHS
    assert all(sample.conserved for sample in [*samples, end])
    assert len(trained) == len(set(trained)) == end.taken == NUM_BATCHES * BATCH
    assert finished == end.taken + end.done
    assert end.ongoing == 0
    ray.kill(manager)


def test_a_new_process_tells_of_the_death_of_the_one_before_and_is_not_started_again_at_the_end(
    name: str,
) -> None:
    manager = create_manager(SETTINGS, BATCH, name=name)
    before = where(manager)
    poll = manager.next_death.remote(LIMIT_S, before)
    os.kill(before.pid, signal.SIGKILL)
    death = call(poll)
    assert death.process == before
    assert "Ray has started another one" in death.cause
    after = where(manager)
    assert call(manager.next_death.remote(0.0, after)) is None
    process = psutil.Process(after.pid)
    ray.kill(manager)
    process.wait(LIMIT_S)  # `ray.kill` does not wait, and a call that came before would be answered
    with pytest.raises(RayActorError):
        call(manager.status.remote())


def test_a_manager_without_its_journal_is_dead_for_good_and_says_why(name: str) -> None:
    manager = create_manager(SETTINGS, BATCH, name=name)
    before = where(manager)
    folder = call(manager.__ray_call__.remote(forget_journal))
    os.kill(before.pid, signal.SIGKILL)
    with pytest.raises(RayActorError, match=f"the prompt manager's journal is not in {folder}"):
        call(manager.status.remote())


def forget_journal(manager: Any) -> str:
    """Run inside the manager: a disk that is full."""
    manager._journal._give_up(OSError(28, "No space left on device"))
    return str(manager._journal._folder)


class Frozen:
    """An actor whose process a test stops."""

    def pid(self) -> int:
        """Pid of the process."""
        return os.getpid()


def test_the_beats_of_an_actor_go_on_to_the_next_process(name: str) -> None:
    manager: Any = create_manager(SETTINGS, BATCH, name=name)
    actor: Any = ray.remote(num_cpus=0)(Frozen).remote()
    call(manager.watch.remote(packed([("reward worker", "reward-0", actor)])))
    os.kill(where(manager).pid, signal.SIGKILL)
    call(manager.watch.remote(packed([("reward worker", "reward-0", actor)])))
    names = call(actor.__ray_call__.remote(lambda _: [thread.name for thread in threading.enumerate()]))
    assert names.count("pulse of reward-0") == 1
    os.kill(call(actor.pid.remote()), signal.SIGKILL)
    assert call(manager.next_death.remote(LIMIT_S)).process.name == "reward-0"
    ray.kill(manager)
