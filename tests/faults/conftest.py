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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

from partial_rollout.observability import stages
from partial_rollout.observability.events import (
    AnyEvent,
    BatchTaken,
    CheckpointSaved,
    EventReader,
    Fault,
    GateMoved,
    PhaseBegan,
    ProcessFound,
    PromptDropped,
    QueueMoved,
    StageBegan,
    StepEnded,
)
from partial_rollout.runtime import processes, ray_watch
from partial_rollout.types import QueueSnapshot
from tests.e2e.conftest import (
    FLAG,
    JOB_TIMEOUT_S,
    ROOT,
    SHORT,
    Job,
    _command,
    _ended,
    _has_mark,
    is_conserved,
    run_job,
    saved_step,
    start_command,
    task,
    times_trained,
    traced,
)
from tests.faults.measured import NEVER_S, charges, cost_of, unconserved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    Texts = dict[tuple[str, bool], set[str]]
    """Responses by prompt: its text, and whether the response is a long one. Two rows may have the same text."""

__all__ = ["task"]
GENERATING, TRAINING = "generating", "training"
SHUT = "training with shut gates"
"""Training begins with the drain; from its end on nobody closes the gate of a new server before it is to open."""
SAVING = "saving"
"""From the first file of the step's checkpoint on until it is whole."""
SENDING = "sending weights"
"""From the checkpoint of the step on, which each step of such a job saves, until the gates open."""
BRIEF = (SAVING, SENDING)
"""Phases of a fraction of a second, after the step's training: a blow that comes after one fails its test."""
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
BRIEF_LOOK_S = 0.005
"""Seconds from look to look while a brief phase is waited for."""
NUM_ROWS = 96
CALM_STEPS = 15
"""After as many steps of eight prompts an undisturbed job has trained each of its rows."""
MISSED = 0
"""Stands for the pid of a process that was dead already."""
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
    may_miss: bool = False
    """Whether its process may be dead by then, and not yet replaced."""

    def is_due(self, events: Sequence[AnyEvent], folder: Path) -> bool:
        """Whether the job, whose folder it is, has come so far."""
        if self.phase == SAVING:
            begun = ("partial_rollout/queue.json", "actor")
            return any((folder / f"checkpoints/global_step_{self.step}" / name).exists() for name in begun)
        if self.phase == SENDING:
            return any(isinstance(e, CheckpointSaved) and e.step == self.step for e in events)
        if self.phase == STARTING_AGAIN:
            return sum(isinstance(e, StageBegan) and e.name == stages.TRAINING for e in events) > 1
        if self.phase == STARTING:
            starts = [n for n, e in enumerate(events) if isinstance(e, StageBegan) and e.name == stages.RAY]
            since = events[starts[self.step - 1] :] if len(starts) == self.step else []
            return any(isinstance(e, ProcessFound) and e.role == self.role and e.pid for e in since)
        if self.phase == GENERATING:
            # Not when the gates open: the step before ends a little later, with its metrics.
            return any(isinstance(e, StepEnded) and e.step == self.step - 1 for e in events)
        taken_s = [e.t for e in events if isinstance(e, BatchTaken) and e.step == self.step]
        if self.phase == SHUT:
            shut = (e for e in events if isinstance(e, GateMoved) and not e.is_open and e.step == self.step)
            return bool(taken_s) and any(e.t >= taken_s[-1] for e in shut)
        return bool(taken_s)

    def is_late(self, events: Sequence[AnyEvent], at_s: float) -> bool:
        """Whether its phase, a brief one, had ended at `at_s`."""
        if self.phase == SAVING:
            return any(isinstance(e, CheckpointSaved) and e.step == self.step and e.t < at_s for e in events)
        opened = (e for e in events if isinstance(e, GateMoved) and e.is_open and e.step == self.step)
        return self.phase == SENDING and any(e.t < at_s for e in opened)


def twice_each(first: int) -> list[Blow]:
    """Every kind of process whose death a command survives dies, then each once more: one a step, from `first` on."""
    return [blow_at(kind, step) for step, kind in enumerate(2 * processes.SURVIVED, start=first)]


def check_all_told(struck: Struck) -> None:
    """Each blow has a fault, but those to the witness, which is started again by who misses it."""
    roles = (blow.role for blow in struck.blows if blow.role != processes.WITNESS.role)
    assert Counter(fault.role for fault in struck.faults) >= Counter(roles)


def blow_at(kind: processes.Kind, step: int, phase: str = GENERATING) -> Blow:
    """What kills a process of this kind. An engine's processes have one role in the events, and a name each."""
    names = {processes.ENGINE: CORE, processes.ENGINE_WORKER: WORKER}
    return Blow(processes.ENGINE.role if kind in names else kind.role, step, phase, name=names.get(kind, ""))


@dataclass(frozen=True)
class Struck:
    """A job that has ended, with the times (seconds since 1970) at which its processes were struck."""

    job: Job
    blows: tuple[Blow, ...]
    at_s: tuple[float, ...]
    pids: tuple[int, ...]
    """Pids of the processes that were struck; the driver's, where these were all."""
    ended_s: float
    folder: Path

    @property
    def faults(self) -> list[Fault]:
        """In the order of their times."""
        return [event for event in self.job.stream if isinstance(event, Fault)]

    def seconds_to_notice(self, blow: int = 0) -> float:
        """From the blow to the first fault after it."""
        return next(fault.t for fault in self.faults if fault.t >= self.at_s[blow]) - self.at_s[blow]

    def measured(self, next_s: float) -> list[dict[str, Any]]:
        """What each blow cost, from all events in the folder: also of a command that was typed again since.

        `next_s` is the time of the first blow to that command.
        """
        events = EventReader(self.folder / "events").read()
        rows = []
        ends_s = [*self.at_s[1:], next_s][: len(self.at_s)]
        for blow, pid, at_s, until_s in zip(self.blows, self.pids, self.at_s, ends_s, strict=True):
            if pid == MISSED:
                continue
            row = {"role": blow.role, "while": blow.phase, "step": blow.step, "signal": blow.number.name}
            trained = blow.step if blow.phase in BRIEF else None
            cost = asdict(cost_of(events, at_s, until_s, trained=trained))
            rows.append(row | ({"name": blow.name} if blow.name else {}) | cost)
        return rows

    @property
    def step_done_s(self) -> list[float]:
        """From each blow to the end of the next step."""
        ended_s = [event.t for event in self.job.stream if isinstance(event, StepEnded)]
        return [round(next((t for t in ended_s if t > at_s), 0.0) - at_s, 1) for at_s in self.at_s]

    @property
    def seconds_to_end(self) -> float:
        """From the last blow to the end of the driver."""
        return self.ended_s - self.at_s[-1]


STRUCK: list[Struck] = []
"""Jobs of the test that runs, for its report."""


def strike(task: Path, folder: Path, *overrides: str, blows: Sequence[Blow], limit_s: float = JOB_TIMEOUT_S) -> Struck:
    """Run a job to its end and strike its processes, one after the other, when it has come so far."""
    return strike_command(_command(task, folder, overrides), folder, blows=blows, limit_s=limit_s)


def strike_command(
    command: Sequence[str],
    folder: Path,
    *,
    blows: Sequence[Blow],
    limit_s: float = JOB_TIMEOUT_S,
    at_once: Callable[[], object] = bool,
    **environment: str,
) -> Struck:
    """`strike` for any command that writes its events to `folder`/events and its checkpoints beside them.

    `at_once` is called when the command has ended, whatever else of it still runs.
    """
    mark, at_s, pids, due, reader = uuid.uuid4().hex, [], [], list(blows), EventReader(folder / "events")
    late: list[Blow] = []
    reader.read()  # of earlier jobs
    events: list[AnyEvent] = []
    log = folder / f"output-{mark}.txt"
    with log.open("w") as output, start_command(command, folder, mark, output, **environment) as job:
        deadline_s = time.monotonic() + limit_s
        try:
            while not _has_ended(job, BRIEF_LOOK_S if due and due[0].phase in BRIEF else LOOK_S):
                events += reader.read()
                if due and due[0].is_due(events, folder):
                    blow = due.pop(0)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        job.wait(blow.delay_s)
                    events += reader.read()
                    at_s.append(time.time())
                    pids.append(_strike(blow, job, mark, events))
                    events += reader.read()
                    late += [blow] if blow.is_late(events, at_s[-1]) else []
                if time.monotonic() > deadline_s:
                    _kill_all(job, mark)
        finally:
            if job.poll() is None:  # else an error of this test would wait for the job's end
                _kill_all(job, mark)
        ended_s = time.time()
        at_once()
    text = log.read_text()
    assert not due, text[-4000:]
    assert not late, f"these came after their phase: {late}"
    ended = _ended(job, text, folder, mark)
    assert unconserved(ended.stream) == []
    assert ended.code or misplaced(ended.stream, saved_queue(folder)) == {}
    struck = Struck(ended, tuple(blows), tuple(at_s), tuple(pids), ended_s, folder)
    STRUCK.append(struck)
    return struck


def check_all_trained_once(job: Job, num_steps: int) -> None:
    """Every step has ended, no prompt was lost, dropped or trained twice, and the job has left no process behind."""
    assert [step["training/global_step"] for step in job.steps] == list(range(1, num_steps + 1))
    assert all(is_conserved(step) for step in job.steps)
    assert job.steps[-1]["partial_rollout/queue/num_dropped"] == 0
    assert any(isinstance(event, QueueMoved) and event.admitted for event in job.stream)  # moments that `strike` checks
    uids = Counter(uid for event in job.events for uid in event["uids"])
    assert set(uids.values()) == {1}
    assert job.survivors == []


def check_nothing_lost(job: Job, folder: Path, calm: Texts) -> None:
    """No prompt was lost, dropped or trained twice, texts are those of an undisturbed job, and no process is left."""
    ended = [event for event in job.stream if isinstance(event, StepEnded)]
    assert all(is_conserved(event.metrics) for event in ended)
    assert ended[-1].metrics["partial_rollout/queue/num_dropped"] == 0
    assert set(times_trained(job.stream).values()) == {1}
    assert job.survivors == []
    check_same_texts(folder, calm)


def misplaced(events: Sequence[AnyEvent], queue: QueueSnapshot) -> dict[str, int]:
    """Prompts that a run had in not exactly one place when it saved its last checkpoint, with their number of places.

    Places: the batches, what was dropped, and the states of the checkpoint's queue. What a new start of training trains
    or drops again counts once.
    """
    saved_s = max(event.t for event in events if isinstance(event, CheckpointSaved))
    before = [event for event in events if event.t <= saved_s]
    places = times_trained(before)
    places.update({event.uid for event in before if isinstance(event, PromptDropped)})
    places.update(each.uid for each in (*queue.unfinished, *queue.done))
    begun = {event.uid for event in before if isinstance(event, PhaseBegan)}
    return {uid: places[uid] for uid in begun | places.keys() if places[uid] != 1}


def saved_queue(folder: Path) -> QueueSnapshot:
    """The prompt queue of the last checkpoint."""
    path = folder / f"checkpoints/global_step_{saved_step(folder)}/partial_rollout/queue.json"
    return msgspec.json.decode(path.read_bytes(), type=QueueSnapshot)


def texts_of(folder: Path) -> Texts:
    """What the job in this folder has trained, as verl has dumped it. The task's tokenizer has a token a letter."""
    texts: Texts = {}
    for path in (folder / "rollouts").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # its writer was killed
                row = json.loads(line)
                texts.setdefault((row["input"], len(row["output"]) > SHORT), set()).add(row["output"])
    return texts


def check_same_texts(folder: Path, calm: Texts) -> None:
    """Each trained response is the one that an undisturbed run has for its prompt, letter by letter; no prompt paid."""
    texts = texts_of(folder)
    assert texts
    assert texts == {prompt: calm.get(prompt, set()) for prompt in texts}
    events = EventReader(folder / "events").read()
    assert charges(events) == []
    assert not any(e.metrics["partial_rollout/queue/failed_attempts"] for e in events if isinstance(e, StepEnded))


def _strike(blow: Blow, job: subprocess.Popen[str], mark: str, events: Sequence[AnyEvent]) -> int:
    """Returns the pid of the process."""
    if blow.role == EVERYTHING:
        _kill_all(job, mark)
        return job.pid
    try:
        pid = _pid(blow, job, mark, events)
        os.kill(pid, blow.number)
    except ProcessLookupError:
        if not blow.may_miss:
            raise
        return MISSED
    return pid


def _kill_all(job: subprocess.Popen[str], mark: str) -> None:
    """Kill the command and what it has started."""
    job.kill()
    for process in psutil.process_iter():
        if _has_mark(process, mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _has_ended(job: subprocess.Popen[str], look_s: float) -> bool:
    """Whether it ends within the interval at which the event stream is read."""
    try:
        job.wait(look_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _pid(blow: Blow, job: subprocess.Popen[str], mark: str, events: Sequence[AnyEvent]) -> int:
    """Pid of the process that was found last: in a fork of the nursery Ray's processes have no titles.

    Raises:
        LookupError: the job has never found such a process.
        ProcessLookupError: it has ended, and its pid may be another process's by now; or its pid is not known.
    """
    if blow.role == DRIVER:
        return job.pid
    if blow.role in (kind.role for kind in ray_watch.TITLES.values()):
        (title,) = (title for title, kind in ray_watch.TITLES.items() if kind.role == blow.role)
        pids = [each.pid for each in psutil.process_iter(["name"]) if each.info["name"] == title]
    else:
        found = [event for event in events if isinstance(event, ProcessFound) and event.role == blow.role]
        pids = [event.pid for event in found if blow.name in event.name][-1:]
        if not pids:
            raise LookupError(f"the job has found no {blow.role} {blow.name}, only {found}")
    own = [pid for pid in pids if _is_own(pid, mark)]
    if len(own) != 1:
        raise ProcessLookupError(f"of {blow.role} {blow.name}, pids {pids}, the job has {own}, not one")
    return own[0]


def _is_own(pid: int, mark: str) -> bool:
    try:
        return pid > 0 and _has_mark(psutil.Process(pid), mark)
    except psutil.NoSuchProcess:
        return False


def options(task: Path, folder: Path) -> list[str]:
    """A third of the groups is long, so that the engine holds requests at any time.

    With a learning rate of 0 and greedy decoding each prompt has one response, whatever becomes of the run.
    """
    return [
        FLAG, *traced(task, folder, num_rows=NUM_ROWS, every=3), "trainer.save_freq=2", "trainer.test_freq=-1",
        "actor_rollout_ref.actor.optim.lr=0", "actor_rollout_ref.rollout.top_k=1",
        f"trainer.rollout_data_dir={folder / 'rollouts'}",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def calm(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """The responses of a job that nobody disturbs, one for each prompt of `options`."""
    folder = tmp_path_factory.mktemp("calm")
    steps = [f"trainer.total_training_steps={CALM_STEPS}", "partial_rollout.prefetch_factor=1"]
    job = run_job(task, folder, *options(task, folder), *steps)
    assert job.code == 0, job.output[-4000:]
    assert {row for event in job.events for row in event["source_index"]} == {str(row) for row in range(NUM_ROWS)}
    texts = texts_of(folder)
    assert {len(answers) for answers in texts.values()} == {1}  # greedy
    return texts


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What a test measures; one line of `outputs/faults/measured.jsonl` a test, with what each of its blows cost."""
    STRUCK.clear()
    num_failed = request.session.testsfailed
    measured: dict[str, Any] = {"test": request.node.name}
    yield measured
    measured["passed"] = request.session.testsfailed == num_failed
    nexts = [min(struck.at_s, default=NEVER_S) for struck in STRUCK[1:]] + [NEVER_S]
    rows = [row for struck, next_s in zip(STRUCK, nexts, strict=False) for row in struck.measured(next_s)]
    measured["blows"] = measured.get("blows", []) + rows
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(measured) + "\n")
    print(json.dumps(measured))
