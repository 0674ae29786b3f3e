"""`ReplicaFleet` against fake replicas: blocking calls, with or without an event loop in the calling thread."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest
from ray.exceptions import RayActorError, RayTaskError

from partial_rollout.errors import DrainTimeout, EngineDead, EnginesLost, WaitTimeout
from partial_rollout.settings.block import TimeoutConfig
from partial_rollout.train.fleet import ReplicaFleet

if TYPE_CHECKING:
    from partial_rollout.runtime.processes import Kind


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


class FailedReplica(Replica):
    """Fails in its own way; Ray wraps what an actor raises."""

    def __init__(self, rank: int, error: Exception, *, in_ray: bool = True) -> None:
        super().__init__(0, rank)
        self.error = RayTaskError("f", "traceback", error).as_instanceof_cause() if in_ray else error

    async def abort_all_requests(self) -> dict[str, Any]:
        raise self.error


def test_where_several_replicas_fail_each_one_is_named_and_the_first_one_says_what_kind_of_failure_it_is() -> None:
    failed = [
        Replica(1),
        FailedReplica(1, DrainTimeout("1 request is left")),
        FailedReplica(2, EngineDead("the engine (pid 4711) died")),
        FailedReplica(3, WaitTimeout("no answer"), in_ray=False),
    ]
    told = (
        "^replica 1 at 10.0.0.1:80: 1 request is left; replica 2 at 10.0.0.2:80: the engine .pid 4711. died; "
        "replica 3 at 10.0.0.3:80: no answer$"
    )
    with pytest.raises(DrainTimeout, match=told):
        ReplicaFleet(cast("Any", failed), TimeoutConfig()).drain()


def test_a_dead_server_stays_one_and_the_other_failures_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    failed = [FailedReplica(0, RayActorError(), in_ray=False), FailedReplica(1, EngineDead("pid 4711"))]
    with pytest.raises(RayActorError):
        ReplicaFleet(cast("Any", failed), TimeoutConfig()).drain()
    assert "replica 1 at 10.0.0.1:80: pid 4711" in caplog.text


class WeighedReplica(Replica):
    """Has perhaps a failed update."""

    def __init__(self, rank: int, failure: str | None) -> None:
        super().__init__(0, rank)
        self.failure, self.is_relaunched = failure, False

    async def weights_failure(self) -> str | None:
        return self.failure

    async def relaunch(self) -> None:
        self.is_relaunched = True


def test_only_the_replicas_a_weight_update_failed_in_are_named_and_relaunched():
    replicas = [WeighedReplica(0, None), WeighedReplica(1, "killed"), WeighedReplica(2, "late")]
    weighed = ReplicaFleet(cast("Any", replicas), TimeoutConfig())
    assert weighed.failed_updates() == {1: "killed", 2: "late"}
    weighed.relaunch({2: "late"})
    assert [replica.is_relaunched for replica in replicas] == [False, False, True]


class LostReplica(WeighedReplica):
    """Does not start its engine again."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(1, "the engine (pid 4711) died")
        self.error = error

    async def relaunch(self) -> None:
        if self.error is None:
            await asyncio.Event().wait()
        raise self.error or AssertionError


NOT_STARTED = "replica 1 node 0 did not start again: no memory"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, "no answer from replica 1 at 10.0.0.1:80"),
        (EngineDead(NOT_STARTED), NOT_STARTED),
        (RayTaskError("relaunch", "traceback", EngineDead(NOT_STARTED)).as_instanceof_cause(), f"({NOT_STARTED})"),
        (WaitTimeout("x"), "x"),
    ],
)
def test_an_engine_that_does_not_start_again_is_lost_and_the_error_names_replica_node_and_pid(
    error: Exception | None, told: str
) -> None:
    lost = ReplicaFleet(
        cast("Any", [WeighedReplica(0, None), LostReplica(error)]), TimeoutConfig(resume_s=0.01, call_s=0.01)
    )
    with pytest.raises(EnginesLost) as caught:
        lost.relaunch(lost.failed_updates())
    assert told in str(caught.value)
    assert "replica 1 at 10.0.0.1:80: the engine (pid 4711) died" in str(caught.value)


CLAIM_S = 300.0
NUM_TURNS = 20
NUM_MANY = 64


class Asked:
    """Ranks in the order in which they were asked."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.all = asyncio.Event()

    def add(self, rank: int) -> None:
        self.ranks.append(rank)
        if len(self.ranks) == NUM_MANY:
            self.all.set()


class OneOfMany(Replica):
    """Answers at once; the slow one when all others have been asked, a stuck one never."""

    def __init__(self, rank: int, asked: Asked, until: asyncio.Event | None = None) -> None:
        super().__init__(1, rank)
        self.asked, self.until = asked, until

    async def abort_all_requests(self) -> dict[str, Any]:
        await self._answer()
        return {"aborted_count": 1}

    async def weights_failure(self) -> str | None:
        await self._answer()
        return "out of memory" if self.until is not None else None

    async def relaunch(self) -> None:
        await self._answer()

    async def _answer(self) -> None:
        self.asked.add(self.replica_rank)
        if self.until is not None:
            await self.until.wait()


def many(asked: Asked, until: asyncio.Event) -> Any:
    """Rank 0 is asked first, and is slow: whoever were asked one after the other would wait for it."""
    return [OneOfMany(0, asked, until), *(OneOfMany(rank, asked) for rank in range(1, NUM_MANY))]


def test_a_slow_replica_of_many_keeps_none_of_the_others_from_being_drained() -> None:
    asked = Asked()
    assert ReplicaFleet(many(asked, asked.all), TimeoutConfig(drain_s=5.0, call_s=5.0)).drain() == NUM_MANY
    assert asked.ranks == list(range(NUM_MANY))


def test_of_many_replicas_the_one_that_does_not_drain_is_named_and_no_other() -> None:
    asked, limits = Asked(), TimeoutConfig(drain_s=0.01, call_s=0.01)
    told = f"^trainer waited 0.02 s for {NUM_MANY} rollout replicas to drain; no answer from replica 0 at 10.0.0.0:80$"
    with pytest.raises(WaitTimeout, match=told):
        ReplicaFleet(many(asked, asyncio.Event()), limits).drain()
    assert asked.ranks == list(range(NUM_MANY))


def test_of_many_replicas_the_one_whose_update_failed_is_named_when_all_have_answered_and_relaunched_alone() -> None:
    asked = Asked()
    all_of_them = ReplicaFleet(many(asked, asked.all), TimeoutConfig(call_s=5.0, resume_s=5.0))
    assert all_of_them.failed_updates() == {0: "out of memory"}
    assert asked.ranks == list(range(NUM_MANY))
    all_of_them.relaunch({0: "out of memory"})
    assert asked.ranks[NUM_MANY:] == [0]


class SilentReplica(Replica):
    """Answers from the second question on, as a server does that was replaced, or from a later one on."""

    def __init__(self, num_unanswered: int = 1) -> None:
        super().__init__(0)
        self.num_asked, self.num_unanswered = 0, num_unanswered

    async def statistics(self) -> list[str]:
        self.num_asked += 1
        if self.num_asked <= self.num_unanswered:
            await asyncio.Event().wait()
        return ["counts"]


class SleepyReplica(Replica):
    """Is a `SilentReplica` to `sleep`, whose own limits are shorter than the fleet's."""

    def __init__(self, rank: int, *, is_silent: bool) -> None:
        super().__init__(0, rank)
        self.num_asked, self.is_silent = 0, is_silent

    async def sleep(self) -> None:
        self.num_asked += 1
        if self.num_asked == 1 and self.is_silent:
            raise WaitTimeout(f"replica {self.replica_rank}: sleep was not answered")
        for _ in range(NUM_TURNS):  # in which an error of another one is seen
            await asyncio.sleep(0)


def test_an_engine_whose_silent_server_was_replaced_while_engines_release_their_memory_is_asked_again_alone():
    class Watch:
        def num_replaced(self, kind: Kind) -> int:
            return 0

        def has_replaced(self, kind: Kind, error: WaitTimeout, before: int, claim_s: float) -> bool:
            return "replica 1: sleep" in str(error)

    replicas = [SleepyReplica(rank, is_silent=rank == 1) for rank in range(3)]
    ReplicaFleet(cast("Any", replicas), TimeoutConfig(), cast("Any", Watch())).sleep()
    assert [replica.num_asked for replica in replicas] == [1, 2, 1]


class ReplacingWatch:
    """Says of each silence that a server was replaced since."""

    def __init__(self) -> None:
        self.befores: list[int] = []
        """How many servers had been replaced before each of them."""

    def num_replaced(self, kind: Kind) -> int:
        return len(self.befores)

    def has_replaced(self, kind: Kind, error: WaitTimeout, before: int, claim_s: float) -> bool:
        self.befores.append(before)
        assert len(self.befores) <= NUM_TURNS  # or it would go on for ever
        return True


def test_a_silent_server_is_replaced_too_where_another_one_has_died_in_the_same_call():
    watch = ReplacingWatch()  # the first time the death of another server counts, then the silent one is killed
    silent = SilentReplica(num_unanswered=2)
    fleet = ReplicaFleet(
        cast("Any", [silent, SilentReplica(num_unanswered=0)]), TimeoutConfig(call_s=0.01), cast("Any", watch)
    )
    assert fleet.statistics() == ["counts", "counts"]
    assert watch.befores == [0, 1]


def test_a_server_that_stays_silent_though_it_is_replaced_each_time_ends_the_call():
    watch = ReplacingWatch()
    replicas = [SilentReplica(num_unanswered=2 * NUM_TURNS), SilentReplica(num_unanswered=0)]
    with pytest.raises(WaitTimeout, match="no answer from replica 0"):
        ReplicaFleet(cast("Any", replicas), TimeoutConfig(call_s=0.01), cast("Any", watch)).statistics()
    assert watch.befores == [0, 1]
    assert replicas[0].num_asked == len(replicas) + 1


@pytest.mark.parametrize("is_replaced", [True, False])
def test_all_are_asked_again_when_a_silent_server_was_replaced(is_replaced: bool):
    asked: list[tuple[str, int]] = []

    class Watch:
        def num_replaced(self, kind: Kind) -> int:
            return 7

        def has_replaced(self, kind: Kind, error: WaitTimeout, before: int, claim_s: float) -> bool:
            asked.append((kind.role, before))
            assert claim_s == CLAIM_S
            assert "no answer from replica 0" in str(error)
            return is_replaced

    replica = SilentReplica()
    silent = ReplicaFleet(cast("Any", [replica]), TimeoutConfig(call_s=0.01, claim_s=CLAIM_S), cast("Any", Watch()))
    if is_replaced:
        assert silent.statistics() == ["counts"]
    else:
        with pytest.raises(WaitTimeout, match="to report; no answer from replica 0"):
            silent.statistics()
    assert asked == [("engine server", 7)]
    assert replica.num_asked == 1 + is_replaced
