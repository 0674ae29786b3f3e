"""What is known of a run: its event stream, or verl's metrics file for a run of verl's own modes. Views read this.

RUN/events/*.jsonl ──EventReader──┐
                                  ├──> RunRecord ──> progress lines, summary, comparison, report
RUN/metrics*.jsonl ───────────────┘
"""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from partial_rollout.errors import DataError
from partial_rollout.observability.events import (
    TOKENS,
    AnyEvent,
    Choice,
    CommandEnded,
    EventReader,
    Fault,
    GateMoved,
    QueueMoved,
    SegmentEnded,
    StageBegan,
    StepEnded,
    TrajectoryEnded,
    Warned,
    WeightsUpdated,
)
from partial_rollout.observability.step_line import STEP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

MAX_MESSAGES = 1000
"""Warnings, and faults, that are remembered: the latest ones."""
LOG = "run.log"
"""In a run's folder: what the command prints. It is there before the first event."""
INTERRUPTED = "aborted"
"""An engine's stop reason of a segment that was interrupted."""


@dataclass
class EngineUse:
    """How much each engine generated, and in which one interrupted responses went on."""

    tokens: dict[str, int] = field(default_factory=dict)
    """By the address of the engine's server."""
    num_resumed: int = 0
    """Interrupted responses that went on, in any engine."""
    num_back: int = 0
    """Resumed responses whose engine was the one that was interrupted, which may still have their KV."""
    _interrupted_in: dict[tuple[str, int], str] = field(default_factory=dict)
    """By trajectory: the engine that was interrupted last."""

    def add(self, event: SegmentEnded) -> None:
        """Count what an engine generated."""
        self.tokens[event.server] = self.tokens.get(event.server, 0) + event.tokens
        trajectory = (event.uid, event.session)
        if (before := self._interrupted_in.pop(trajectory, None)) is not None:
            self.num_resumed += 1
            self.num_back += event.server == before
        if event.reason == INTERRUPTED and event.tokens:
            self._interrupted_in[trajectory] = event.server

    def end(self, event: TrajectoryEnded) -> None:
        """Forget a trajectory: another attempt begins anew."""
        self._interrupted_in.pop((event.uid, event.session), None)


@dataclass
class RunRecord:
    """Everything that a run has told so far; `add` takes in further events in the order of their times."""

    name: str = ""
    steps: dict[int, StepEnded] = field(default_factory=dict)
    """By number; a step that a restarted run took again counts once, as it was taken last."""
    stages: list[StageBegan] = field(default_factory=list)
    """Stages of the last start."""
    gate: GateMoved | None = None
    version: int = -1
    queue: QueueMoved | None = None
    """Latest event of the last start; None: there is none yet, or the run is of verl's own modes."""
    choices: list[Choice] = field(default_factory=list)
    warnings: deque[Warned] = field(default_factory=lambda: deque(maxlen=MAX_MESSAGES))
    faults: deque[Fault] = field(default_factory=lambda: deque(maxlen=MAX_MESSAGES))
    ended: CommandEnded | None = None
    """How the last start ended; None: it goes on, or was killed."""
    unit: str = TOKENS
    """What the engines generate: tokens, or the denoise steps of images."""
    tokens_kept: int = 0
    """Tokens that an interruption did not cost."""
    engines: EngineUse = field(default_factory=EngineUse)
    """Use of the engines since the last start, which gives them other addresses."""
    num_trajectories: int = 0
    waits_s: dict[str, float] = field(default_factory=dict)
    """Seconds of all trajectories together by what they waited for: `engine`, `tool`, `reward`, `held`."""
    between_s: dict[int, float] = field(default_factory=dict)
    """By step: seconds between the end of the step before and its own end that its timer does not count."""
    _last_end_s: float | None = None
    """When a step ended last; None: this start has ended none."""
    keep: Callable[[str], bool] | None = None
    """Which metrics of a step are kept; None: all of them."""

    def add(self, event: AnyEvent) -> None:
        """Take in one event."""
        match event:
            case StepEnded():
                self._end_step(event)
            case StageBegan():
                self._begin(event)
            case GateMoved():
                self.gate, self.version = event, event.version
            case WeightsUpdated():
                self.version = event.version
            case QueueMoved():
                self.queue = event
            case Choice():
                self.choices.append(event)
            case Warned():
                self.warnings.append(event)
            case Fault():
                self.faults.append(event)
            case CommandEnded():
                self.ended = event
            case SegmentEnded():
                self.unit = event.unit
                self.tokens_kept += event.tokens if event.reason == INTERRUPTED else 0
                self.engines.add(event)
            case TrajectoryEnded():
                self._count(event)
            case _:
                pass

    def _end_step(self, event: StepEnded) -> None:
        self.steps[event.step] = self._kept(event)
        if self._last_end_s is not None and (seconds := event.metrics.get(STEP_SECONDS)):
            self.between_s[event.step] = max(0.0, event.t - self._last_end_s - seconds)
        self._last_end_s = event.t or None  # a file of verl's logger has no times

    def _kept(self, event: StepEnded) -> StepEnded:
        if self.keep is None:
            return event
        # Each decoded step has names of its own, which take more memory than its numbers.
        kept = {sys.intern(name): value for name, value in event.metrics.items() if self.keep(name)}
        return msgspec.structs.replace(event, metrics=kept)

    def _begin(self, event: StageBegan) -> None:
        if event.number == 1:
            self.stages, self.ended, self.queue, self._last_end_s = [event], None, None, None
            self.engines = EngineUse()
        elif not self.stages or event.number > self.stages[-1].number:
            self.stages.append(event)

    def _count(self, event: TrajectoryEnded) -> None:
        self.num_trajectories += 1
        self.engines.end(event)
        parts = {"engine": event.engine_seconds, "tool": event.tool_seconds, "reward": event.reward_seconds}
        for name, seconds in (parts | {"held": event.held_seconds}).items():
            self.waits_s[name] = self.waits_s.get(name, 0.0) + seconds

    @property
    def series(self) -> list[dict[str, float]]:
        """The metrics of each step, in order, without those that are no numbers."""
        return [numbers(self.steps[number]) for number in sorted(self.steps)]

    @property
    def last(self) -> dict[str, float]:
        """The metrics of the last step; empty before it."""
        return numbers(self.steps[max(self.steps)]) if self.steps else {}

    @property
    def total(self) -> int:
        """Steps that the run is to take; 0: not known."""
        return self.steps[max(self.steps)].total if self.steps else 0

    def values(self, name: str) -> list[float]:
        """A metric of all steps that have it."""
        found = (self.steps[number].metrics.get(name) for number in sorted(self.steps))
        return [value for value in found if value is not None]

    def sum(self, name: str) -> float:
        """Sum of a metric over all steps."""
        return sum(self.values(name))

    def mean(self, name: str) -> float | None:
        """Mean of a metric over all steps that have it; None: no step has it."""
        values = self.values(name)
        return sum(values) / len(values) if values else None


def numbers(step: StepEnded) -> dict[str, float]:
    """The metrics of a step that are numbers."""
    return {name: value for name, value in step.metrics.items() if value is not None}


def events_folder_of(run: Path) -> Path:
    """Where the event stream of a run lies: the folder itself, or a folder `events` in it or in its checkpoints."""
    for folder in (run / "events", run / "checkpoints" / "events", run):
        if any(folder.glob("*.*.jsonl")):
            return folder
    return run / "events"


def check_is_no_file(run: Path) -> None:
    """Raise DataError for a file, such as a run's metrics, where the run's folder is needed."""
    if run.is_file():
        raise DataError(f"{run} is a file: give the folder of the run")


def metrics_steps(path: Path) -> list[StepEnded]:
    """The steps in a file of verl's `file` logger; a torn last line is left out.

    Raises:
        DataError: a line is none of that logger.
    """
    steps = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no file of verl's file logger, which is text: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            data: dict[str, float | None] = {
                name: value for name, value in row["data"].items() if isinstance(value, int | float)
            }
            steps.append(StepEnded(step=int(row["step"]), total=0, metrics=data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if not line.endswith("}"):
                continue
            raise DataError(f"{path}, line {number} is no line of verl's file logger: {error}") from error
    return [step for step in steps if "timing_s/step" in step.metrics]


def dump_lines(path: Path) -> list[str]:
    """The rows of a dump of verl's rollouts; a last one that is cut, as while the dump is written, is left out."""
    # Not `splitlines`: a text may have U+2028 or another end of a line, which JSON does not escape.
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if rest.endswith("}"):
        lines.append(rest)
    return [line for line in lines if line]


def load(run: Path) -> RunRecord:
    """Read a finished or running run: its folder, or a file of verl's `file` logger.

    Raises:
        DataError: there is nothing to read at `run`.
    """
    if run.is_file():
        return _record(_name(run.parent if run.stem.startswith("metrics") else run), metrics_steps(run))
    record = _record(_name(run), EventReader(events_folder_of(run)).read())
    if record.steps:
        return record
    for path in sorted(run.glob("metrics*.jsonl"), key=lambda path: path.stat().st_mtime):
        for step in metrics_steps(path):
            record.add(step)
    if not record.steps and not record.stages:
        raise DataError(
            f"{run} has neither events nor metrics: give a run's folder, in which are `events/*.jsonl` or "
            "`metrics*.jsonl`, or such a metrics file (trainer.logger=[console,file] writes one)"
        )
    return record


def first_steps(record: RunRecord, number: int) -> RunRecord:
    """The record with no step after `number`."""
    kept = {step: event for step, event in record.steps.items() if step <= number}
    return replace(record, steps=kept)


def _record(name: str, events: Iterable[AnyEvent]) -> RunRecord:
    record = RunRecord(name)
    for event in events:
        record.add(event)
    return record


def _name(path: Path) -> str:
    return path.resolve().name
