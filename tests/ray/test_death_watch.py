"""The death of a real actor is heard of at once, by a trainer that waits without a bound as well."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import ray
from ray.exceptions import RayActorError, RayError

from partial_rollout.errors import ActorLost, WaitTimeout
from partial_rollout.observability.events import EventReader, EventWriter, Fault
from partial_rollout.observability.log import report_to
from partial_rollout.runtime import run_watch
from partial_rollout.runtime.processes import PROMPT_MANAGER, TRAINING_RANK, TRANSFER_QUEUE_CONTROLLER
from partial_rollout.runtime.prompt_manager import create_manager
from partial_rollout.runtime.run_watch import Interruption, RunWatch
from partial_rollout.settings.block import PartialRolloutConfig, TimeoutConfig
from tests.run_watches import make_run_watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ray.actor import ActorHandle

    from partial_rollout.types import Death

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

LIMIT_S = 60.0
KILLED_TO_KNOWN_S = 5.0
CLAIM_S = 5.0


class Rank:
    """A training rank stands in: one call at a time."""

    def pid(self) -> int:
        return os.getpid()

    def train(self) -> None:
        threading.Event().wait()


@pytest.fixture
def claim_s() -> float:
    """How long an actor may be silent; the test of a frozen one has less."""
    return LIMIT_S


@pytest.fixture
def manager(request: pytest.FixtureRequest, claim_s: float) -> Iterator[ActorHandle]:
    timeouts = TimeoutConfig(claim_s=claim_s)
    handle = create_manager(PartialRolloutConfig(timeouts=timeouts), 8, name=request.node.name)
    yield handle
    ray.kill(handle)


@pytest.fixture
def rank() -> Iterator[tuple[ActorHandle, int]]:
    actor_class: Any = ray.remote(num_cpus=0)(Rank)
    actor = actor_class.remote()
    yield actor, ray.get(actor.pid.remote(), timeout=LIMIT_S)
    ray.kill(actor)


@pytest.fixture
def listening(manager: ActorHandle, rank: tuple[ActorHandle, int], tmp_path: Path) -> Iterator[Callable[..., RunWatch]]:
    """A way to make a RunWatch; it stops before the manager and the rank are ended, whose deaths it would tell."""
    interruption = Interruption(LIMIT_S)
    report_to(EventWriter(tmp_path, "trainer"))
    watches: list[RunWatch] = []

    def listen(reactions: dict[str, Callable[[Death], str]] | None = None) -> RunWatch:
        watch = make_run_watch(manager, interruption, LIMIT_S)
        watch.react(reactions or {})
        watch.start([])
        watches.append(watch)
        return watch

    yield listen
    for watch in watches:
        watch.stop()
    interruption.ended()
    report_to(EventWriter(None, "trainer"))


def faults(folder: Path) -> list[Fault]:
    return [event for event in EventReader(folder).read() if isinstance(event, Fault)]


def kill_and_wait(pid: int) -> None:
    """Wait without a bound, as verl waits for TransferQueue; the death may be told before the wait begins."""
    os.kill(pid, signal.SIGKILL)
    threading.Event().wait()


def test_a_rank_that_dies_while_it_trains_is_named_to_a_trainer_that_waits_for_it(
    listening: Callable[..., RunWatch], rank: tuple[ActorHandle, int], tmp_path: Path
) -> None:
    actor, pid = rank
    watch = listening()
    watch.watch([(TRAINING_RANK.role, "actor-0", actor)])
    busy = actor.train.remote()
    killed_s = time.monotonic()
    with pytest.raises(ActorLost, match=rf"training rank actor-0 \(pid {pid} on node (?s:.*)\nThe trainer trained"):
        kill_and_wait(pid)
    known_s = time.monotonic()
    watch.stop()  # the end of the run begins; else the error is raised again
    assert known_s - killed_s < KILLED_TO_KNOWN_S
    (fault,) = faults(tmp_path)
    assert (fault.role, fault.name, fault.pid, fault.step) == (TRAINING_RANK.role, "actor-0", pid, 3)
    assert fault.action == "training ends"
    with pytest.raises(RayActorError) as told:
        ray.get(busy, timeout=LIMIT_S)
    assert isinstance(watch.explain(told.value), ActorLost)


@pytest.mark.parametrize("claim_s", [CLAIM_S])
def test_a_rank_that_trains_gives_signs_of_life_and_one_that_is_frozen_is_killed(
    listening: Callable[..., RunWatch], rank: tuple[ActorHandle, int], tmp_path: Path
) -> None:
    actor, pid = rank
    watch = listening()
    watch.watch([(TRAINING_RANK.role, "actor-0", actor)])
    busy = actor.train.remote()
    assert ray.wait([busy], timeout=2 * CLAIM_S)[0] == []
    os.kill(pid, signal.SIGSTOP)
    told = rf"training rank actor-0 \(pid {pid} on(?s:.*)had given no sign of life for \d+ s, longer than .*claim_s=5 "
    with pytest.raises(ActorLost, match=told):
        threading.Event().wait()
    watch.stop()
    assert [fault.action for fault in faults(tmp_path)] == ["training ends"]
    with pytest.raises(RayActorError):
        ray.get(busy, timeout=LIMIT_S)


def test_a_frozen_manager_is_named_and_killed_when_a_wait_for_somebody_else_has_run_out(
    listening: Callable[..., RunWatch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = threading.Event()
    monkeypatch.setattr(run_watch, "ASK_S", 1.0)
    monkeypatch.setattr(run_watch, "note_found", lambda process: met.set())
    watch, late = listening(), WaitTimeout("trainer waits for weight version 3 to reach the engines: no answer")
    assert met.wait(LIMIT_S)
    pid = watch.manager_pid
    with watch.interrupts():
        os.kill(pid, signal.SIGSTOP)
    named = watch.explain(late)  # as a trainer does whose training has ended
    assert isinstance(named, ActorLost)
    assert re.match(rf"{PROMPT_MANAGER.role} \(pid {pid} (?s:.*)not answered for 1 s (?s:.*){late}", str(named))
    psutil.Process(pid).wait(LIMIT_S)
    watch.stop()
    for thread in threading.enumerate():
        if thread.name == "run-watch":  # it has asked the manager, which Ray starts again
            thread.join(LIMIT_S)
    assert [(fault.role, fault.action) for fault in faults(tmp_path)] == [(PROMPT_MANAGER.role, "training ends")]


def test_a_trainer_that_waits_for_a_rank_which_waits_for_the_dead_process_is_told(
    listening: Callable[..., RunWatch], rank: tuple[ActorHandle, int]
) -> None:
    """The ranks of verl's trainer wait so for TransferQueue: no signal's error comes out of this `ray.get`."""
    waiting, _ = rank
    actor_class: Any = ray.remote(num_cpus=0)(Rank)
    controller = actor_class.remote()
    pid = ray.get(controller.pid.remote(), timeout=LIMIT_S)
    watch = listening()
    watch.release({TRANSFER_QUEUE_CONTROLLER.role: lambda: ray.kill(waiting)})
    watch.watch([(TRANSFER_QUEUE_CONTROLLER.role, "controller", controller)])
    busy = waiting.train.remote()
    killed_s = time.monotonic()
    # The signal may come after Ray has told of the rank's end, until the end of the run has begun.
    with pytest.raises(ActorLost) as told, watch.stops_at_an_error():  # noqa: PT012
        try:
            os.kill(pid, signal.SIGKILL)
            ray.get(busy, timeout=LIMIT_S)
        except (RayError, SystemError) as error:
            raise watch.explain(error) from error
    assert time.monotonic() - killed_s < 2 * KILLED_TO_KNOWN_S
    assert str(told.value).startswith(f"{TRANSFER_QUEUE_CONTROLLER.role} controller (pid {pid}")


def test_a_call_of_the_trainer_to_a_watched_actor_does_not_wait_behind_the_watch(
    listening: Callable[..., RunWatch], rank: tuple[ActorHandle, int]
) -> None:
    actor, pid = rank
    listening().watch([(TRAINING_RANK.role, "actor-0", actor)])
    assert ray.get(actor.pid.remote(), timeout=LIMIT_S) == pid


def test_a_run_that_can_goes_on_and_says_what_it_did(
    listening: Callable[..., RunWatch], rank: tuple[ActorHandle, int], tmp_path: Path
) -> None:
    actor, pid = rank
    met = threading.Event()

    def go_on(death: Death) -> str:
        met.set()
        return f"{death.process.name} was started again"

    watch = listening({TRAINING_RANK.role: go_on})
    watch.watch([(TRAINING_RANK.role, "actor-0", actor)])
    os.kill(pid, signal.SIGKILL)
    assert met.wait(KILLED_TO_KNOWN_S)
    deadline = time.monotonic() + LIMIT_S
    while not faults(tmp_path) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert [fault.action for fault in faults(tmp_path)] == ["actor-0 was started again"]


def test_a_dead_prompt_manager_is_named(listening: Callable[..., RunWatch], manager: ActorHandle) -> None:
    watch = listening()
    watch.watch([])
    pid: Any = ray.get(manager.__ray_call__.remote(lambda _: os.getpid()), timeout=LIMIT_S)
    with pytest.raises(ActorLost, match=rf"{PROMPT_MANAGER.role} \(pid {pid} on node"):
        kill_and_wait(pid)
