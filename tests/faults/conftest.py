"""A training job whose processes are killed or frozen on the way, and what the job says of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from partial_rollout.observability import stages
from partial_rollout.observability.events import (
    AnyEvent,
    BatchTaken,
    EventReader,
    Fault,
    ProcessFound,
    StageBegan,
    StepEnded,
)
from partial_rollout.runtime import processes, ray_watch
from tests.e2e.conftest import FLAG, JOB_TIMEOUT_S, ROOT, Job, _ended, _has_mark, _start, is_conserved, task, traced

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["task"]
GENERATING, TRAINING = "generating", "training"
STARTING_AGAIN = "starting again"
"""A new start of the same command has a Ray of its own, and no training workers yet."""
STARTING = "starting"
"""The step of a blow in this phase is the number of the start, from 1; it is due when its process is there."""
DRIVER = "driver"
"""Stands for the command itself; a client of the nursery passes its signals on."""
EVERYTHING = "everything"
"""Stands for the command with all of its processes, as when the machine goes down."""
RAYLET = processes.RAYLET.role
CORE, WORKER = "EngineCore", "Worker"
"""Parts of the names of an engine's first process, and of those that it starts."""
LOOK_S = 0.1
RESULTS = ROOT / "outputs/faults/measured.jsonl"


@dataclass(frozen=True)
class Blow:
    """A signal to the latest process of this role, or to the driver, in a phase of a step."""

    role: str
    step: int
    phase: str = GENERATING
    number: signal.Signals = signal.SIGKILL
    name: str = ""
    """A part of its name."""
    delay_s: float = 0.0
    """After the moment that step and phase say."""

    def is_due(self, events: Sequence[AnyEvent]) -> bool:
        """Whether the job has come so far."""
        if self.phase == STARTING_AGAIN:
            return sum(isinstance(e, StageBegan) and e.name == stages.TRAINING for e in events) > 1
        if self.phase == STARTING:
            starts = [n for n, e in enumerate(events) if isinstance(e, StageBegan) and e.name == stages.RAY]
            since = events[starts[self.step - 1] :] if len(starts) == self.step else []
            return any(isinstance(e, ProcessFound) and e.role == self.role and e.pid for e in since)
        if self.phase == GENERATING:
            # Not when the gates open: the step before ends a little later, with its metrics.
            return any(isinstance(e, StepEnded) and e.step == self.step - 1 for e in events)
        return any(isinstance(e, BatchTaken) and e.step == self.step for e in events)


def blow_at(kind: processes.Kind, step: int, phase: str = GENERATING) -> Blow:
    """What kills a process of this kind. An engine's processes have one role in the events, and a name each."""
    names = {processes.ENGINE: CORE, processes.ENGINE_WORKER: WORKER}
    return Blow(processes.ENGINE.role if kind in names else kind.role, step, phase, name=names.get(kind, ""))


@dataclass(frozen=True)
class Struck:
    """A job that has ended, with the times (seconds since 1970) at which its processes were struck."""

    job: Job
    at_s: tuple[float, ...]
    ended_s: float

    @property
    def faults(self) -> list[Fault]:
        """In the order of their times."""
        return [event for event in self.job.stream if isinstance(event, Fault)]

    def seconds_to_notice(self, blow: int = 0) -> float:
        """From the blow to the first fault after it."""
        return next(fault.t for fault in self.faults if fault.t >= self.at_s[blow]) - self.at_s[blow]

    @property
    def step_done_s(self) -> list[float]:
        """From each blow to the end of the next step."""
        ended_s = [event.t for event in self.job.stream if isinstance(event, StepEnded)]
        return [round(next((t for t in ended_s if t > at_s), 0.0) - at_s, 1) for at_s in self.at_s]

    @property
    def seconds_to_end(self) -> float:
        """From the last blow to the end of the driver."""
        return self.ended_s - self.at_s[-1]


def strike(task: Path, folder: Path, *overrides: str, blows: Sequence[Blow], limit_s: float = JOB_TIMEOUT_S) -> Struck:
    """Run a job to its end and strike its processes, one after the other, when it has come so far."""
    mark, at_s, due, reader = uuid.uuid4().hex, [], list(blows), EventReader(folder / "events")
    reader.read()  # of earlier jobs
    events: list[AnyEvent] = []
    log = folder / f"output-{mark}.txt"
    with log.open("w") as output, _start(task, folder, overrides, mark, output=output) as job:
        deadline_s = time.monotonic() + limit_s
        try:
            while not _has_ended(job):
                events += reader.read()
                if due and due[0].is_due(events):
                    blow = due.pop(0)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        job.wait(blow.delay_s)
                    at_s.append(time.time())
                    _strike(blow, job, mark, events)
                if time.monotonic() > deadline_s:
                    job.kill()
        finally:
            job.kill()  # else an error of this test would wait for the job's end
        ended_s = time.time()
    text = log.read_text()
    assert not due, text[-4000:]
    return Struck(_ended(job, text, folder, mark), tuple(at_s), ended_s)


def check_all_trained_once(job: Job, num_steps: int) -> None:
    """Every step has ended, no prompt was lost, dropped or trained twice, and the job has left no process behind."""
    assert [step["training/global_step"] for step in job.steps] == list(range(1, num_steps + 1))
    assert all(is_conserved(step) for step in job.steps)
    assert job.steps[-1]["partial_rollout/queue/num_dropped"] == 0
    uids = Counter(uid for event in job.events for uid in event["uids"])
    assert set(uids.values()) == {1}
    assert job.survivors == []


def _strike(blow: Blow, job: subprocess.Popen[str], mark: str, events: Sequence[AnyEvent]) -> None:
    if blow.role == EVERYTHING:
        job.kill()
        for process in psutil.process_iter():
            if _has_mark(process, mark):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    elif blow.role in (kind.role for kind in ray_watch.TITLES.values()):
        (title,) = (title for title, kind in ray_watch.TITLES.items() if kind.role == blow.role)
        (own,) = (each for each in psutil.process_iter(["name"]) if each.name() == title and _has_mark(each, mark))
        own.send_signal(blow.number)
    else:
        os.kill(job.pid if blow.role == DRIVER else _pid(blow, events), blow.number)


def _has_ended(job: subprocess.Popen[str]) -> bool:
    """Whether it ends within the interval at which the event stream is read."""
    try:
        job.wait(LOOK_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _pid(blow: Blow, events: Sequence[AnyEvent]) -> int:
    """Pid of the process that was found last: in a fork of the nursery Ray's processes have no titles."""
    found = [event for event in events if isinstance(event, ProcessFound) and event.role == blow.role]
    pids = [event.pid for event in found if blow.name in event.name]
    if not pids:
        raise LookupError(f"the job has found no {blow.role} {blow.name}, only {found}")
    return pids[-1]


def options(task: Path, folder: Path) -> list[str]:
    """A third of the groups is long, so that the engine holds requests at any time."""
    return [FLAG, *traced(task, folder, num_rows=96, every=3), "trainer.save_freq=2", "trainer.test_freq=-1"]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What a test measures; one line of `outputs/faults/measured.jsonl` a test."""
    measured: dict[str, Any] = {"test": request.node.name}
    yield measured
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(measured) + "\n")
    print(json.dumps(measured))
