"""Which tokens the workers hand over to a checkpoint while they claim, and which restored ones they keep after it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError

pytest.importorskip("verl")

from partial_rollout.agent_loop import manager as agent_loop_manager
from partial_rollout.agent_loop.manager import HOLD_TIMEOUT_S, TOKENS_TIMEOUT_S, PartialRolloutAgentLoopManager
from partial_rollout.agent_loop.trajectory import Saved, Trajectories
from partial_rollout.agent_loop.worker import PartialRolloutAgentLoopWorker
from partial_rollout.core.interrupt import FRESH, Context
from partial_rollout.core.resume import GenerationState, ResumableGeneration, Segment
from partial_rollout.errors import WaitTimeout
from partial_rollout.types import Claim, VersionSpan
from tests.unit.agent_loop.support import make_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

CALL = GenerationState([1, 2], [5], [-0.5], [VersionSpan(3, 1)], None, 1, 0)
SAVED: Saved = {"a_0": [CALL], "b_0": [CALL], "c_0": [CALL]}
NUM_WORKERS = 3
NUM_ANSWERS = 2 * NUM_WORKERS
"""Answers in a checkpoint: each worker names what it has not started, then each sends tokens."""


class Worker(PartialRolloutAgentLoopWorker):
    """The real worker's trajectories."""

    dies_in = ""
    """The call that finds the worker dead."""
    silent_in: tuple[str, ...] = ()
    """Calls that it does not answer."""

    def __init__(self, *, replays_routing: bool = False) -> None:
        self._trajectories = Trajectories()
        self.rollout_config: Any = SimpleNamespace(enable_rollout_routing_replay=replays_routing)

    @property
    def unstarted(self) -> frozenset[str]:
        return self._trajectories.unclaimed()

    def start(self, uid: str, *, claim_id: int = 1, goes_on: bool = True, attempt: int = 1) -> ResumableGeneration:
        """One more token for the trajectory."""
        generation = ResumableGeneration([1, 2], 8)
        trajectory = self._trajectories.start(Claim(uid, claim_id, "w", 1, 1, attempt, goes_on), 0)
        self._trajectories.record(trajectory, generation)
        generation.add(Segment([6], [-0.5], "aborted", version=4, openings=0, context=Context(4, FRESH)))
        return generation

    def end(self, claim_id: int = 1) -> None:
        self._trajectories.forget(claim_id)

    @property
    def handle(self) -> Any:
        """A handle whose calls are answered when they are waited for."""
        names = ("unclaimed", "tokens_in_flight", "restore_tokens", "keep_unclaimed", "go_back", "replay")
        calls = {name: self._die if name == self.dies_in else getattr(self, name) for name in names}
        calls |= dict.fromkeys(self.silent_in, self._be_silent)
        return SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in calls.items()})

    async def replay(self, places: Any) -> None:
        """This worker has no log."""

    async def _be_silent(self, *_args: Any, **_options: Any) -> None:
        raise WaitTimeout("no answer")

    async def _die(self, *_args: Any, **_options: Any) -> None:
        raise RayActorError(error_msg="killed")


@dataclass
class World:
    workers: list[Worker]
    before_answer: dict[int, Callable[[], None]] = field(default_factory=dict)
    """What happens before the n-th answer of a worker, counted from the last checkpoint on."""
    answers: list[Any] = field(default_factory=list)
    waits: list[tuple[float, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def wait_for_all(self, calls: list[Coroutine[Any, Any, Any]], *, timeout_s: float, who_waits: str) -> list[Any]:
        self.waits.append((timeout_s, who_waits))
        first = len(self.answers)
        for index, call in enumerate(calls):
            self.before_answer.pop(first + index, lambda: None)()
            try:
                self.answers.append(asyncio.run(call))
            except (RayActorError, WaitTimeout) as error:
                self.answers.append(error)
        return self.answers[first:]

    _manager: PartialRolloutAgentLoopManager | None = None

    @property
    def manager(self) -> PartialRolloutAgentLoopManager:
        """The run's only one; its workers answer as they do now."""
        self._manager = self._manager or make_workers(num_workers=len(self.workers))
        self._manager.agent_loop_workers = [worker.handle for worker in self.workers]
        return self._manager

    def checkpoint(self) -> Saved:
        self.answers.clear()
        self.waits.clear()
        saved, self.missing = self.manager.tokens_in_flight()
        return saved


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A run that goes on from `SAVED`."""
    world = World([Worker() for _ in range(NUM_WORKERS)])
    monkeypatch.setattr(agent_loop_manager, "wait_for_all", world.wait_for_all)
    monkeypatch.setattr(agent_loop_manager, "settle_all", world.wait_for_all)
    monkeypatch.setattr(agent_loop_manager, "ray", SimpleNamespace(put=dict, get=lambda saved, timeout: saved))
    world.manager.restore_tokens(SAVED)
    return world


def test_what_nobody_has_started_is_in_the_checkpoint_and_stays_everywhere(world: World) -> None:
    for _ in range(2):
        assert world.checkpoint() == SAVED
        assert [worker.unstarted for worker in world.workers] == [SAVED.keys()] * NUM_WORKERS


@pytest.mark.parametrize("starter", range(NUM_WORKERS))
def test_what_one_worker_has_started_is_forgotten_by_the_others_at_the_next_checkpoint(
    world: World, starter: int
) -> None:
    running = world.workers[starter].start("a")
    assert world.checkpoint() == SAVED | {"a_0": [running.state()]}
    assert [worker.unstarted for worker in world.workers] == [{"b_0", "c_0"}] * NUM_WORKERS
    world.workers[starter].end()
    assert world.checkpoint() == {"b_0": [CALL], "c_0": [CALL]}


def test_when_all_groups_have_ended_no_worker_holds_or_sends_a_token(world: World) -> None:
    for index, (uid, worker) in enumerate(zip("abc", world.workers, strict=True)):
        worker.start(uid, claim_id=index)
        worker.end(index)
    assert world.checkpoint() == {}
    assert [worker.unstarted for worker in world.workers] == [frozenset()] * NUM_WORKERS
    assert world.answers[NUM_WORKERS:] == [{}] * NUM_WORKERS


@pytest.mark.parametrize("starter", range(NUM_WORKERS))
@pytest.mark.parametrize("moment", range(NUM_ANSWERS))
def test_a_trajectory_that_starts_during_a_checkpoint_is_in_it_once(world: World, moment: int, starter: int) -> None:
    """Whichever worker starts it, before whichever answer: as it runs, or as it was saved, and the others as saved."""
    running: list[ResumableGeneration] = []
    world.before_answer[moment] = lambda: running.append(world.workers[starter].start("a"))
    is_running = moment <= NUM_WORKERS + starter
    saved = world.checkpoint()
    (generation,) = running
    assert saved == SAVED | {"a_0": [generation.state() if is_running else CALL]}
    assert generation.token_ids == [5, 6]
    assert world.checkpoint() == SAVED | {"a_0": [generation.state()]}
    assert [worker.unstarted for worker in world.workers] == [{"b_0", "c_0"}] * NUM_WORKERS


@pytest.mark.parametrize("other", [0, 1])
def test_a_further_attempt_begins_afresh_and_is_forgotten_as_any_other(world: World, other: int) -> None:
    world.workers[0].start("a")
    world.workers[0].end()
    afresh = world.workers[other].start("a", claim_id=2, goes_on=False, attempt=2)
    assert afresh.token_ids == [6]
    assert world.checkpoint() == SAVED | {"a_0": [afresh.state()]}
    assert [worker.unstarted for worker in world.workers] == [{"b_0", "c_0"}] * NUM_WORKERS


def test_workers_send_their_own_tokens_only(world: World) -> None:
    running = world.workers[1].start("a")
    assert world.checkpoint() == {"a_0": [running.state()], "b_0": [CALL], "c_0": [CALL]}
    assert world.answers[NUM_WORKERS:] == [{}, {"a_0": [running.state()]}, {}]


def test_workers_that_replay_routing_take_over_no_tokens(world: World) -> None:
    world.workers = [Worker(replays_routing=True) for _ in range(NUM_WORKERS)]
    world.manager.restore_tokens(SAVED)
    assert world.checkpoint() == {}


def test_every_wait_of_a_checkpoint_has_a_deadline_and_a_name(world: World) -> None:
    world.checkpoint()
    who = "trainer waits for agent-loop workers to"
    assert world.waits == [
        (TOKENS_TIMEOUT_S, f"{who} name unstarted trajectories"),
        (TOKENS_TIMEOUT_S, f"{who} hand over their tokens"),
    ]


@pytest.mark.parametrize("dead", range(NUM_WORKERS))
@pytest.mark.parametrize("call", ["unclaimed", "tokens_in_flight"])
def test_a_dead_worker_costs_a_checkpoint_its_own_tokens_only(world: World, dead: int, call: str) -> None:
    running = [worker.start(uid) for uid, worker in zip("abc", world.workers, strict=True)]
    world.workers[dead].dies_in = call
    saved = world.checkpoint()
    alive = {f"{uid}_0": [running[i].state()] for i, uid in enumerate("abc") if i != dead}
    assert {key: calls for key, calls in saved.items() if key in alive} == alive
    assert world.missing == [f"agent_loop_worker_{dead}: killed"]


@pytest.mark.parametrize("dead", [{0}, {1}, {0, 1, 2}])
@pytest.mark.parametrize("call", ["unclaimed", "tokens_in_flight"])
def test_what_nobody_has_started_is_in_the_checkpoint_whoever_dies_in_it(
    world: World, dead: set[int], call: str
) -> None:
    for rank in dead:
        world.workers[rank].dies_in = call
    assert world.checkpoint() == SAVED
    assert world.missing == [f"agent_loop_worker_{rank}: killed" for rank in sorted(dead)]


def test_without_any_worker_the_checkpoint_has_nothing_that_was_started_and_says_so(world: World) -> None:
    world.workers[0].start("a")
    world.checkpoint()
    for worker in world.workers:
        worker.dies_in = "unclaimed"
    assert world.checkpoint() == {"b_0": [CALL], "c_0": [CALL]}
    assert len(world.missing) == NUM_WORKERS


@pytest.mark.parametrize("by", ["checkpoint", "forget_claimed"])
def test_a_worker_that_was_silent_when_the_last_token_was_claimed_is_asked_until_it_has_forgotten_its_own(
    world: World, by: str
) -> None:
    for uid in "abc":
        world.workers[0].start(uid)
    # In a checkpoint the worker is silent from the first question on; between two steps from the second.
    world.workers[1].dies_in = "unclaimed" if by == "checkpoint" else "keep_unclaimed"
    world.checkpoint() if by == "checkpoint" else world.manager.forget_claimed()
    assert [len(worker.unstarted) for worker in world.workers] == [0, 3, 0]
    world.workers[1].dies_in = ""
    world.manager.forget_claimed()
    assert [len(worker.unstarted) for worker in world.workers] == [0, 0, 0]
    world.waits.clear()
    world.manager.forget_claimed()
    assert world.waits == []


def test_without_any_checkpoint_what_one_worker_has_started_is_forgotten_by_the_others_after_the_step(
    world: World,
) -> None:
    manager = world.manager
    manager.restore_tokens(SAVED)
    world.workers[0].start("a")
    manager.forget_claimed()
    assert [worker.unstarted for worker in world.workers] == [{"b_0", "c_0"}] * NUM_WORKERS
    for uid, worker in zip("bc", world.workers, strict=False):
        worker.start(uid)
    manager.forget_claimed()
    assert [worker.unstarted for worker in world.workers] == [frozenset()] * NUM_WORKERS
    world.waits.clear()
    manager.forget_claimed()  # nobody has any left
    assert world.waits == []


BEFORE = GenerationState([1, 2], [4], [-0.5], [VersionSpan(2, 1)], None, 1, 0)


def test_where_the_log_holds_no_more_trajectories_go_on_from_the_tokens_before_or_afresh(world: World) -> None:
    world.workers[2].dies_in = "go_back"  # whoever takes its place is told
    world.manager.go_back({"a_0", "c_0"}, {"a_0": [BEFORE]})
    assert [worker.unstarted for worker in world.workers[:2]] == [{"a_0", "b_0"}] * 2
    assert world.checkpoint() == {"a_0": [BEFORE], "b_0": [CALL]}
    assert [world.workers[0].start(uid).token_ids for uid in "abc"] == [[4, 6], [5, 6], [6]]
    world.manager.go_back({"a_0", "b_0"}, {})
    assert world.workers[1].unstarted == frozenset()


def test_a_trajectory_that_has_started_is_not_given_tokens_again(world: World) -> None:
    running = world.workers[0].start("a")
    world.manager.go_back({"a_0"}, {"a_0": [BEFORE]})
    assert world.workers[0].unstarted == {"b_0", "c_0"}
    assert world.checkpoint()["a_0"] == [running.state()]
    assert world.workers[1].unstarted == {"b_0", "c_0"}


def test_a_silent_worker_costs_a_warning_where_a_replay_ends_and_nobody_waits_for_its_death(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.workers[1].silent_in = ("go_back", "replay")
    world.waits.clear()
    world.manager.replay({})
    world.manager.go_back(SAVED.keys(), {})
    assert [seconds for seconds, _ in world.waits] == [HOLD_TIMEOUT_S] * 2
    assert caplog.text.count("whoever was silent does so when it goes on") == 2
    assert [len(worker.unstarted) for worker in world.workers] == [0, 3, 0]


@pytest.mark.parametrize("error", [GetTimeoutError("late"), ObjectLostError("id", "owner", "where")])
def test_restored_tokens_that_cannot_be_read_cost_a_checkpoint_these_only(
    world: World, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(*_: Any, **__: Any) -> None:
        raise error

    running = world.workers[0].start("a")
    monkeypatch.setattr(agent_loop_manager.ray, "get", get)
    assert world.checkpoint() == {"a_0": [running.state()]}
    (said,) = world.missing
    assert said.startswith("2 restored responses that nobody has claimed: ")


def test_tokens_that_cannot_be_read_where_a_replay_ends_are_not_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(*_: Any, **__: Any) -> None:
        raise GetTimeoutError("late")

    with monkeypatch.context() as late:
        late.setattr(agent_loop_manager.ray, "get", get)
        world.manager.go_back({"a_0"}, {})
    assert [worker.unstarted for worker in world.workers] == [{"b_0", "c_0"}] * 3
    assert world.checkpoint() == {"b_0": [CALL], "c_0": [CALL]}


def test_a_worker_that_does_not_answer_makes_nobody_forget(world: World) -> None:
    manager = world.manager
    manager.restore_tokens(SAVED)
    world.workers[0].start("a")
    world.workers[1].dies_in = "unclaimed"
    manager.agent_loop_workers = [worker.handle for worker in world.workers]
    manager.forget_claimed()
    assert world.workers[2].unstarted == SAVED.keys()


def test_a_worker_that_was_started_again_does_not_make_the_others_forget(world: World) -> None:
    manager = world.manager
    manager.restore_tokens(SAVED)
    world.workers[1] = Worker()
    manager.agent_loop_workers[1], manager.worker_ids[1] = world.workers[1].handle, "agent_loop_worker_1_again_1"
    manager.forget_claimed()
    assert [len(worker.unstarted) for worker in world.workers] == [3, 0, 3]
    assert manager.tokens_in_flight() == (SAVED, [])
