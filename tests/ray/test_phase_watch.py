"""A rank that hangs in its main thread, and gives signs of life meanwhile, is named and killed."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray.exceptions import RayActorError

from partial_rollout.errors import ActorLost
from partial_rollout.observability.events import EventReader, EventWriter, Fault, Warned
from partial_rollout.observability.log import report_to
from partial_rollout.runtime import phase_watch
from partial_rollout.runtime.phase_watch import PhaseWatch
from partial_rollout.runtime.processes import TASK_RUNNER, TRAINING_RANK, TRANSFER_QUEUE_CONTROLLER
from partial_rollout.runtime.prompt_manager import create_manager
from partial_rollout.runtime.run_watch import Interruption
from partial_rollout.settings.block import PartialRolloutConfig, TimeoutConfig
from tests.run_watches import make_run_watch
from tests.unit.core.queue.queues import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ray.actor import ActorHandle

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(180)]

LIMIT_S = 60.0
CLAIM_S = 20.0
LEAST_S = 3.0


class Rank:
    """A training rank stands in: one call at a time."""

    def pid(self) -> int:
        return os.getpid()

    def update_actor(self) -> None:
        self._hang()

    async def update_weights(self) -> None:
        """One such method makes Ray run all calls in an event loop, as those of verl's ranks."""

    def _hang(self) -> None:
        threading.Event().wait()


class Run:
    """A run whose trainer is the main thread of the test."""

    def __init__(self, folder: Path, name: str) -> None:
        timeouts = TimeoutConfig(claim_s=CLAIM_S)
        self.folder, self.clock = folder, ManualClock()
        self.manager = create_manager(PartialRolloutConfig(timeouts=timeouts), 8, name=name)
        self.phase = PhaseWatch(LEAST_S, "was starting", self.clock)
        self.interruption = Interruption(LIMIT_S)
        self.watch = make_run_watch(self.manager, self.interruption, LIMIT_S, doing=lambda: self.phase.doing)
        actor_class: Any = ray.remote(num_cpus=0)(Rank)
        self.ranks: list[tuple[str, ActorHandle]] = [(f"actor-{number}", actor_class.remote()) for number in range(2)]
        self.pids = [ray.get(rank.pid.remote(), timeout=LIMIT_S) for _, rank in self.ranks]
        self.watch.start([])
        self.watch.watch([(TRAINING_RANK.role, *rank) for rank in self.ranks])

    def pass_(self, seconds: float) -> None:
        """Look after so many seconds, each of which the watch has looked in too."""
        main = threading.get_ident()
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            self.clock.now_s += phase_watch.LOOK_S
            thread = threading.Thread(
                target=self.phase.look, args=(self.watch, self.manager, lambda: self.ranks, main), daemon=True
            )
            thread.start()
            self.join(thread)

    def join(self, thread: threading.Thread) -> None:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), f"the watch's look did not end within {LIMIT_S:g} s"

    def end(self) -> None:
        self.watch.stop()
        self.interruption.ended()
        for actor in (self.manager, *(rank for _, rank in self.ranks)):
            ray.kill(actor)
        for thread in threading.enumerate():
            if thread.name == "run-watch":  # its poll at the manager ends now, and Ray ends next
                thread.join(LIMIT_S)


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    report_to(EventWriter(tmp_path, "trainer"))
    made = Run(tmp_path, request.node.name)
    yield made
    made.end()
    report_to(EventWriter(None, "trainer"))


def told(folder: Path) -> tuple[list[Warned], list[Fault]]:
    events = EventReader(folder).read()
    return [e for e in events if isinstance(e, Warned)], [e for e in events if isinstance(e, Fault)]


def given_up(run: Run, wait: Callable[[], object]) -> str:
    """The error that gets the main thread out of its wait, after the limit of a first phase."""
    with pytest.raises((ActorLost, RayActorError)) as raised:  # noqa: PT012 - the error may come before `wait` begins
        run.pass_(4 * LEAST_S)
        wait()
    run.watch.stop()  # the end of the run begins; else the error is raised again
    return str(run.watch.explain(raised.value))


def test_a_rank_that_hangs_is_warned_of_then_named_with_where_it_stands_and_killed(run: Run) -> None:
    run.phase.begin("trained step 3", "train")
    busy = run.ranks[1][1].update_actor.remote()
    run.pass_(2.0)
    (warned,), faults = told(run.folder)
    assert faults == []
    assert "the trainer has trained step 3 for 2 s (the longest time before: 0 s)" in warned.text
    assert "training ranks with an open call: actor-1. After 12 s (partial_rollout.timeouts.train_s" in warned.text
    error = given_up(run, lambda: ray.get(busy, timeout=LIMIT_S))
    assert error.startswith(f"{TRAINING_RANK.role} actor-1 (pid {run.pids[1]} on node")
    assert "the trainer had trained step 3 for 12 s" in error
    # Below `threading` are the functions of the rank, the innermost first.
    assert error.index("_hang (") < error.index("update_actor (")
    warnings, (fault,) = told(run.folder)
    assert (fault.role, fault.name, fault.pid) == (TRAINING_RANK.role, "actor-1", run.pids[1])
    assert fault.action == "training ends"
    assert any(each.level == "error" and "update_actor (" in each.text for each in warnings)
    with pytest.raises(RayActorError):  # the other rank may wait for the one that hung
        ray.get(run.ranks[0][1].pid.remote(), timeout=LIMIT_S)


def test_a_trainer_that_waits_for_nobody_is_named_itself(run: Run) -> None:
    run.phase.begin("reported step 3", "report")
    error = given_up(run, threading.Event().wait)
    assert error.startswith(f"{TASK_RUNNER.role} (pid {os.getpid()}")
    assert "no training rank had an open call" in error
    assert run.watch.has_lost(TASK_RUNNER)


def test_a_wait_for_transfer_queue_is_blamed_on_its_controller(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_watch, "stack_of", lambda _: "kv_batch_get (/lib/transfer_queue/interface.py:9)")
    run.phase.begin("trained step 3", "train")
    error = given_up(run, threading.Event().wait)
    assert error.startswith(f"{TRANSFER_QUEUE_CONTROLLER.role} died: it was given up: the trainer had trained")


def test_what_ends_while_it_is_asked_about_is_left_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.phase.begin("trained step 3", "train")

    def goes_on(_: int) -> str:
        run.phase.begin("generated the batch of step 4")
        return ""

    monkeypatch.setattr(phase_watch, "stack_of", goes_on)
    run.pass_(8 * LEAST_S)
    assert told(run.folder) == ([], [])
