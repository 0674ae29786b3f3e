"""`ReplicaFleet` against fake replicas: blocking calls, with or without an event loop in the calling thread."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from partial_rollout.errors import DrainTimeout, WaitTimeout
from partial_rollout.settings.block import TimeoutConfig
from partial_rollout.train.fleet import ReplicaFleet


class Replica:
    """Interrupts as many requests as it is told to; answers `resume_generation` never."""

    def __init__(self, num_running: int, rank: int = 0) -> None:
        self.num_running, self.replica_rank, self.server_address = num_running, rank, f"10.0.0.{rank}:80"

    async def abort_all_requests(self) -> dict[str, Any]:
        return {"aborted_count": self.num_running}

    async def resume_generation(self) -> None:
        await asyncio.Event().wait()


def fleet(**timeouts: float) -> ReplicaFleet:
    return ReplicaFleet(cast("Any", [Replica(2), Replica(3)]), TimeoutConfig(**timeouts))


def test_a_drain_counts_what_all_replicas_interrupted():
    assert fleet().drain() == 5


async def test_the_call_blocks_inside_a_running_loop_too():
    assert fleet().drain() == 5


def test_a_replica_that_does_not_answer_is_told_with_the_call():
    with pytest.raises(WaitTimeout, match="for 2 rollout replicas to resume; no answer from replica 1 at 10.0.0.1:80$"):
        ReplicaFleet(cast("Any", [OpenReplica(2), Replica(3, rank=1)]), TimeoutConfig(resume_s=0.01)).resume()


class OpenReplica(Replica):
    async def resume_generation(self) -> None:
        """At once."""


class StuckReplica(Replica):
    async def abort_all_requests(self) -> dict[str, Any]:
        raise DrainTimeout("drain: 1 request is still in the engine: [stuck-one]")


def test_a_drain_that_fails_names_its_requests():
    """DrainTimeout is a TimeoutError, as is asyncio's own."""
    stuck = ReplicaFleet(cast("Any", [Replica(1), StuckReplica(1)]), TimeoutConfig())
    with pytest.raises(DrainTimeout, match="stuck-one"):
        stuck.drain()


class WeighedReplica(Replica):
    """Has a rank, and perhaps a failed update."""

    def __init__(self, rank: int, failure: str | None) -> None:
        super().__init__(0)
        self.replica_rank, self.failure, self.is_relaunched = rank, failure, False

    async def weights_failure(self) -> str | None:
        return self.failure

    async def relaunch(self) -> None:
        self.is_relaunched = True


def test_only_the_replicas_a_weight_update_failed_in_are_named_and_relaunched():
    replicas = [WeighedReplica(0, None), WeighedReplica(1, "killed"), WeighedReplica(2, "late")]
    weighed = ReplicaFleet(cast("Any", replicas), TimeoutConfig())
    assert weighed.failed_updates() == {1: "killed", 2: "late"}
    weighed.relaunch([2])
    assert [replica.is_relaunched for replica in replicas] == [False, False, True]
