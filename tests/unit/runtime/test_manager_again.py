"""The prompt manager's process ends or freezes: the RunWatch goes on with the next one, and misses no death."""

from __future__ import annotations

import pickle
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from partial_rollout.runtime import run_watch
from partial_rollout.runtime.run_watch import Interruption, RunWatch, manager_limit_s
from partial_rollout.types import Death, Process
from tests.run_watches import make_run_watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LIMIT_S = 30.0
MANAGER = "prompt manager"


class Call:
    """A method of the actor that stands in; its answer is computed when it is asked for."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.remote = lambda *arguments, **options: lambda: answer(*arguments, **options)


class Manager:
    """The actor stands in: processes follow one another; `pids` of those who are watched are what it finds."""

    def __init__(self, deaths: Sequence[Death | None | Exception], pids: dict[str, int]) -> None:
        self.pid, self.pids, self.watched = 1, pids, list[list[str]]()
        self._deaths = iter(deaths)
        self.next_death, self.watch = Call(self._next_death), Call(self._watch)
        self.meet = Call(self._meet)
        self.whole = list[bool]()
        """Whether each list was said to be of all that is watched."""
        self.told = list[tuple[int, Any]]()
        """Which process was told what to import, and whom to watch."""
        self.on_end: Callable[[], None] = lambda: None

    def _meet(self, module: str) -> Process:
        self.told.append((self.pid, module))
        return Process("", "", "node", self.pid, "")

    def _next_death(self, _: float, known: Process) -> Death | None:
        if known.pid != self.pid:
            return Death(known, "its process has ended, and Ray has started another one")
        death = next(self._deaths, None)
        if death is None:
            self.on_end()
        if isinstance(death, Exception):
            raise death
        return death

    def _watch(self, packed: bytes, *, is_whole: bool) -> list[Process]:
        self.whole.append(is_whole)
        actors: list[tuple[str, str, Any]] = pickle.loads(packed)
        self.watched.append([name for _, name, _ in actors])
        self.told.append((self.pid, self.watched[-1]))
        return [Process(role, name, "node", self.pids[name]) for role, name, _ in actors]


@pytest.fixture
def interruption(monkeypatch: pytest.MonkeyPatch) -> Interruption:
    """With Ray's two waits standing in."""
    monkeypatch.setattr(run_watch, "ray", SimpleNamespace(get=lambda call, timeout: call(), wait=_is_answered))
    made = Interruption(LIMIT_S)
    monkeypatch.setattr(made, "end_by", lambda error: None)
    return made


def _is_answered(calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
    return calls, []


def make(
    manager: Any, interruption: Interruption, handles_need: str = "json"
) -> tuple[RunWatch, list[Death], threading.Event]:
    """A RunWatch that goes on without anything, and what it has heard of."""
    watch, told, ended = (
        make_run_watch(manager, interruption, LIMIT_S, doing=str, step=lambda: 1, handles_need=handles_need),
        list[Death](),
        threading.Event(),
    )

    def again(death: Death) -> str:
        told.append(death)
        watch.watch_again()
        return "it was started again"

    def gone(death: Death) -> str:
        told.append(death)
        return "it was started again"

    watch.react({MANAGER: again, "engine server": gone})

    def end() -> None:
        watch.stop()
        ended.set()

    manager.on_end = end
    return watch, told, ended


def run(watch: RunWatch, actors: list[tuple[str, str, Any]]) -> None:
    """All that its thread does, and the threads of its reactions, which may begin others."""
    watch._run(actors)
    while reacting := [thread for thread in threading.enumerate() if thread.name.startswith("go on without")]:
        reacting[0].join(LIMIT_S)
        assert not reacting[0].is_alive()


ACTORS: list[tuple[str, str, Any]] = [("engine server", "replica-0", None), ("training rank", "actor-0", None)]


class TwoProcesses(Manager):
    """A manager whose first process ends at the first poll."""

    def _next_death(self, timeout_s: float, known: Process) -> Death | None:
        self.pid = 2
        return super()._next_death(timeout_s, known)


def test_the_next_process_is_told_whom_to_watch(interruption: Interruption) -> None:
    manager = TwoProcesses([], {"replica-0": 11, "actor-0": 12})
    watch, told, _ = make(manager, interruption)
    run(watch, ACTORS)
    assert [death.process.pid for death in told] == [1]  # once, and by its own process id
    assert watch.manager_pid == 2
    assert manager.watched == [["replica-0", "actor-0"]] * 2
    assert manager.whole == [True, True]
    assert not watch.has_lost()
    assert watch._fatal is None


def test_each_process_is_told_what_handles_need_before_they_come(interruption: Interruption) -> None:
    manager = TwoProcesses([], {"replica-0": 11, "actor-0": 12})
    watch, _, _ = make(manager, interruption, handles_need="a.module")
    run(watch, ACTORS)
    names = ["replica-0", "actor-0"]
    assert manager.told == [(1, "a.module"), (1, names), (2, "a.module"), (2, names)]


def test_a_server_that_ray_has_started_again_meanwhile_is_told_as_dead(interruption: Interruption) -> None:
    manager = TwoProcesses([], {"replica-0": 11, "actor-0": 12})
    watch, told, _ = make(manager, interruption)
    watch.watch(ACTORS)
    manager.pids = {"replica-0": 21, "actor-0": 12}
    run(watch, [])
    assert [(death.process.name, death.process.pid) for death in told] == [(MANAGER, 1), ("replica-0", 11)]


def test_who_has_died_before_is_not_watched_again(interruption: Interruption) -> None:
    dead = Death(Process("engine server", "replica-0", "node", 11), "killed")
    manager = Manager([dead], {"replica-0": 11, "actor-0": 12})
    watch, _, _ = make(manager, interruption)
    run(watch, ACTORS)
    watch.watch_again()
    assert manager.watched[-1] == ["actor-0"]


def test_a_manager_that_does_not_answer_is_killed(interruption: Interruption, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, killed = Manager([], {}), list[int]()

    def end_actor(_: Any, process: Process) -> None:
        killed.append(process.pid)
        manager.pid += 1

    monkeypatch.setattr(run_watch, "end_actor", end_actor)
    monkeypatch.setattr(run_watch.ray, "wait", lambda calls, timeout: ([], calls) if not killed else (calls, []))
    watch, told, _ = make(manager, interruption)
    run(watch, [])
    assert killed == [1]
    assert [(death.process.pid, death.cause) for death in told] == [
        (1, "it was killed, because it has not answered in time")
    ]


@pytest.mark.parametrize("error", [RayActorError(error_msg="its journal is damaged"), GetTimeoutError()])
def test_a_manager_that_is_not_started_again_ends_the_run(interruption: Interruption, error: Exception) -> None:
    watch, told, _ = make(Manager([error], {}), interruption)
    run(watch, [])
    assert told == []
    assert str(watch._fatal).startswith("prompt manager (pid 1 on node node) died")


def test_a_manager_that_dies_before_training_begins_ends_the_start(interruption: Interruption) -> None:
    manager = TwoProcesses([], {})
    watch = make_run_watch(manager, interruption, LIMIT_S, doing=str, step=lambda: 1)  # pyright: ignore[reportArgumentType]
    watch._run([])
    assert "Ray has started another one" in str(watch._fatal)


def test_callers_wait_for_longer_than_a_frozen_manager_takes_to_be_killed_and_started_again() -> None:
    call_s = 10.0
    assert manager_limit_s(call_s) - call_s >= run_watch.POLL_S + call_s + run_watch.MANAGER_START_S
