"""The manager as a real Ray actor: found by name, conserved under concurrency, errors keep their type."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import ray

from partial_rollout.errors import ActorLost, ClusterError, DuplicateUid, WaitTimeout
from partial_rollout.runtime.prompt_manager import create_manager, find_manager
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.types import PromptMeta, TrajectorySummary, WorkerStatus

if TYPE_CHECKING:
    from partial_rollout.types import QueueStatistics

pytestmark = pytest.mark.ray

GROUP = 2
BATCH = 8
NUM_BATCHES = 12
NUM_WORKERS = 3
CALL_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def cluster(ray_cluster: Any) -> str:
    """Address of the session's cluster."""
    return ray_cluster.get_runtime_context().gcs_address


SETTINGS = PartialRolloutConfig()


@pytest.fixture
def name(cluster: str, request: pytest.FixtureRequest) -> str:
    """A manager name per test."""
    return request.node.name


def prompts(step: int, num: int = BATCH) -> list[PromptMeta]:
    return [PromptMeta(f"{step}-{i}", GROUP, global_step=step) for i in range(num)]


def call(ref: ray.ObjectRef) -> Any:
    return ray.get(ref, timeout=CALL_TIMEOUT_S)


def work(name: str, worker_id: str) -> int:
    """Claim until the manager closes; finish most, fail, give back or lose some. Returns the groups finished."""
    manager, rng, finished = find_manager(name), random.Random(worker_id), 0
    while not call(manager.status.remote()).closed:
        for claim in call(manager.claim.remote(worker_id, 3 * GROUP, 5.0)):
            fate = rng.random()
            if fate < 0.7:
                group = [TrajectorySummary(f"{claim.uid}_{i}_0", 1, 1, 0, 0) for i in range(GROUP)]
                call(manager.finish_many.remote([(claim, group)]))
                finished += 1
            elif fate < 0.85:
                call(manager.fail.remote(claim, "ValueError: on purpose"))
            elif fate < 0.95:
                call(manager.give_back.remote(claim))
        call(manager.release_worker.remote(worker_id))
    return finished


def test_conserved_at_every_moment_and_trained_once(name: str) -> None:
    manager = create_manager(SETTINGS, BATCH, name=name)
    trained: list[str] = []
    samples: list[QueueStatistics] = []
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        workers = [pool.submit(work, name, f"w{i}") for i in range(NUM_WORKERS)]
        try:
            for step in range(NUM_BATCHES):
                samples.append(call(manager.statistics.remote()))
                room = SETTINGS.capacity(BATCH) - samples[-1].in_flight
                call(manager.admit.remote(prompts(step, room)))
                samples.append(call(manager.statistics.remote()))
                trained += [group.uid for group in call(manager.take_batch.remote(BATCH, CALL_TIMEOUT_S)).groups]
        finally:
            call(manager.close.remote("enough"))
        finished = sum(worker.result(CALL_TIMEOUT_S) for worker in workers)
    end = call(manager.statistics.remote())
    assert all(sample.conserved for sample in [*samples, end])
    assert len(trained) == len(set(trained)) == end.taken
    assert finished == end.taken + end.done
    assert end.ongoing == 0
    assert end.failed_attempts > 0
    assert end.taken > 0


def test_errors_keep_their_type_across_processes(name: str) -> None:
    manager = create_manager(SETTINGS, BATCH, name=name)
    call(manager.admit.remote(prompts(0)))
    with pytest.raises(DuplicateUid, match="0-0"):
        call(manager.admit.remote(prompts(0)))
    with pytest.raises(WaitTimeout, match="pending 8"):
        call(manager.take_batch.remote(BATCH, 0.0))
    with pytest.raises(ClusterError, match="already running"):
        create_manager(SETTINGS, BATCH, name=name)
    with pytest.raises(ActorLost, match="no prompt manager named 'nobody'"):
        find_manager("nobody")


def run_status(cluster: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "partial_rollout.status", "--address", cluster]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ)
    )


def test_status_command_finds_the_manager_from_another_process(cluster: str) -> None:
    manager = create_manager(SETTINGS, BATCH)
    call(manager.admit.remote(prompts(0)))
    call(manager.claim.remote("w0", GROUP, 0.0))
    call(manager.report_worker.remote("w0", WorkerStatus(GROUP, 4)))
    call(manager.report_step.remote(1, 0, "open"))
    text = run_status(cluster)
    assert (text.returncode, text.stderr) == (0, "")
    assert "7 pending, 1 ongoing, 0 done, 0 taken, 0 dropped = 8 admitted" in text.stdout
    as_json = run_status(cluster, "--json")
    assert json.loads(as_json.stdout)["slots_total"] == 4
    ray.kill(manager)


def test_status_command_without_manager_says_so_in_one_line(cluster: str) -> None:
    answer = run_status(cluster)
    assert (answer.returncode, answer.stdout) == (2, "")
    (line,) = answer.stderr.splitlines()
    assert "no prompt manager named 'rollout_prompt_manager'" in line
