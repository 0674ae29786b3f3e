"""The event stream of a run: what happened, when, where and why; written once, read by every view.

    a process of the run ──EventWriter──> RUN/events/ROLE-NODE-PID-START.N.jsonl ──EventReader──> a view

Each process appends to a file of its own, so that no process waits for another one to write down what it saw, and what
it saw outlives it. A line is one JSON object: `event` names the kind, `t` is the time in seconds since 1970, the other
fields are those of the class below. Format rules, by `FORMAT_VERSION`:

- the first line of a file is an `Opened` event with the version of the format;
- fields are only ever added, each with a default: an older reader ignores them, a newer one fills them in;
- a reader skips kinds that it does not know, and counts lines that it cannot read (a torn last line is not counted: the
  rest of it is read when it is there);
- a file that is full is followed by the next one (N counts them), and the file before it is removed: a process keeps
  its latest events. A writer that is told `keep_all`, as the trainer's is, writes one file and forgets nothing.

An event is written down or it is not, but never in the way of the run: after the first failed write (a full disk) the
writer says so in the log once, and writes no more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from partial_rollout.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from partial_rollout.settings.block import PartialRolloutConfig
    from partial_rollout.types import Process

logger = logging.getLogger(__name__)

TOKENS, DENOISE_STEPS = "tokens", "denoise steps"
"""What a request to an engine generates."""
FORMAT_VERSION = 1
MAX_FILE_BYTES = 32 * 1024 * 1024
"""Most bytes of one file. A worker keeps the file it writes and the one before: days, with some events a second."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """What all events have."""

    t: float = 0.0
    """Seconds since 1970, set by the writer unless it is given."""


class Opened(Event, frozen=True, tag="opened"):
    """A process began to write; the first line of each file."""

    format: int
    role: str
    """`trainer`, `worker-3`, `server-0`, ..."""
    node: str
    pid: int
    release: str = ""


class StepEnded(Event, frozen=True, tag="step"):
    """A training step ended; `metrics` are all that verl and this package report of it, by name.

    A metric that is no finite number (NaN, infinity) is None, since JSON has neither.
    """

    step: int
    total: int
    metrics: dict[str, float | None]


class BatchTaken(Event, frozen=True, tag="taken"):
    """The prompt groups of a training batch left the queue; the lists have one entry a group, in the batch's order."""

    step: int
    uids: list[str]
    source_index: list[str | None]
    """Rows of the data set, where it says them."""
    deferrals: list[int]
    interruptions: list[int]
    """Sums over the group's trajectories."""


class GateMoved(Event, frozen=True, tag="gate"):
    """All gates opened or closed; after a closing the engines were drained."""

    step: int
    version: int
    """Weight version that the engines have."""
    is_open: bool
    seconds: float = 0.0
    """What draining, or opening, took."""
    interrupted: int = 0
    """Requests that were interrupted by the closing."""


class WeightsUpdated(Event, frozen=True, tag="update"):
    """New weights arrived in all engines."""

    step: int
    version: int
    seconds: float
    relaunches: int = 0


class CheckpointSaved(Event, frozen=True, tag="saved"):
    """A checkpoint is whole, in the folder `global_step_STEP`."""

    step: int
    seconds: float
    num_bytes: int = 0
    """Bytes of its files, as far as the node of the task runner sees them; 0: not known, as with async_save."""


class QueueMoved(Event, frozen=True, tag="queue"):
    """Prompts by state and slots at this moment, as `status` has them; at most one a second, and only where they moved.

    Always: admitted == pending + ongoing + deferred + done + taken + dropped.
    The prompt manager writes it. The metrics `queue/...` of a step are those of the step's end.
    """

    step: int
    """The step that the trainer has reported last; -1 before the first one."""
    pending: int
    ongoing: int
    deferred: int
    done: int
    taken: int
    slots_in_use: int = 0
    slots_total: int = 0
    parked: int = 0
    """Requests that wait at a closed gate."""
    admitted: int = 0
    dropped: int = 0


class RequestSent(Event, frozen=True, tag="request"):
    """A trajectory's request goes to an engine, where it may wait at the gate; `SegmentEnded` tells its end."""

    uid: str
    session: int
    server: str


class SegmentEnded(Event, frozen=True, tag="segment"):
    """One request to an engine ended: a whole response, or a part of one that was interrupted."""

    uid: str
    session: int
    server: str
    version: int
    seconds: float
    """From the request to its answer, waiting at the gate included."""
    prompt_tokens: int
    """With the tokens of earlier segments."""
    tokens: int
    reused_tokens: int = 0
    """Tokens of the context whose KV the engine still had."""
    reason: str = ""
    """The engine's stop reason; `aborted`: interrupted."""
    text: str = ""
    """The segment's last tokens as text, if `partial_rollout.events_text` asks for them."""
    text_tokens: int = 0
    """How many tokens `text` has."""
    unit: str = TOKENS
    """What is counted as tokens: `tokens`, or the `denoise steps` of an image, whose prompt counts nothing."""


class TrajectoryEnded(Event, frozen=True, tag="trajectory"):
    """A trajectory was scored and stored."""

    uid: str
    session: int
    seconds: float
    """From the start of its agent loop."""
    engine_seconds: float
    """The part of `seconds` inside calls to the engine."""
    tokens: int
    interruptions: int
    tool_seconds: float = 0.0
    """Outside of calls to the engine and before the reward: tools, and the agent loop itself."""
    reward_seconds: float = 0.0
    """From the agent loop's end until the trajectory was scored and stored."""
    held_seconds: float = 0.0
    """Held back with its tokens until a later round."""
    responses: int = 1
    """Responses that its agent loop asked for."""


class PhaseBegan(Event, frozen=True, tag="phase"):
    """A trajectory waits for something else than before; the end of the trajectory ends its last phase."""

    uid: str
    session: int
    phase: str
    """`agent` (its agent loop, before the first request), `engine` (the gate included), `held`, `tool`, `reward`.

    `ended`: it failed or was cancelled, so no `TrajectoryEnded` follows.
    """
    response: int = 0
    """Number of the response that it is at, from 1; 0 before the first."""
    row: str = ""
    """Row of the data set, where it says one."""
    attempt: int = 1
    text: str = ""
    """The end of the prompt, if `events_text` asks for it; only in phase `agent` of the prompt's first trajectory."""


class DeadlinePassed(Event, frozen=True, tag="overdue"):
    """A trajectory has waited too long for a tool, its agent loop or its reward: the attempt has failed."""

    uid: str
    session: int
    phase: str
    """What the trajectory waited for, as in `PhaseBegan`."""
    response: int
    """Number of the response that it was at; 0 before the first."""
    row: str
    attempt: int
    seconds: float
    limit_s: float


class PromptDropped(Event, frozen=True, tag="dropped"):
    """A worker's prompt was dropped and will not be trained; another one takes its place."""

    uid: str
    source_index: str
    """Row of the data set; empty if the data set does not say it."""
    reason: str
    metric: float | None = None
    """The value that all trajectories of the prompt have, if the prompt was dropped because they do not differ."""


class Choice(Event, frozen=True, tag="choice"):
    """The run chose or changed a value by itself."""

    step: int
    key: str
    before: Any
    after: Any
    reason: str
    seen: str = ""
    """What the run saw when it chose."""


class Warned(Event, frozen=True, tag="warning"):
    """A warning or an error that this package logged in a process whose messages are copied (log.py)."""

    text: str
    step: int | None = None
    level: str = "warning"
    """`warning` or `error`."""
    source: str = ""
    """The name of the logger, which is that of the module."""


class Fault(Event, frozen=True, tag="fault"):
    """A process died, went silent or was given up."""

    role: str
    """What the process is for: `agent-loop worker`, `engine core`, `training rank`, ..."""
    text: str
    """What was seen, in whole sentences."""
    node: str = ""
    pid: int = 0
    step: int | None = None
    name: str = ""
    """Which process of its role: `agent_loop_worker_3`, `replica 1`, ..."""
    noticed_after_s: float | None = None
    """From the fault, or from the process' last sign of life, until it was noticed; None: not known."""
    action: str = ""
    """What was done: `started again`, `its prompts went back to the queue`, `the run ends`, ..."""

    @classmethod
    def of(
        cls,
        process: Process,
        *,
        text: str,
        action: str,
        step: int | None = None,
        noticed_after_s: float | None = None,
    ) -> Fault:
        """The fault of a process whose place is known."""
        where = {"role": process.role, "name": process.name, "node": process.node, "pid": process.pid}
        return cls(**where, text=text, action=action, step=step, noticed_after_s=noticed_after_s)


class ProcessFound(Event, frozen=True, tag="process"):
    """A process that the run needs is watched from now on; one that is started again is found again."""

    role: str
    name: str
    """Which process of its role; an engine has the name of its replica."""
    node: str = ""
    pid: int = 0
    """0: not known, the process was too busy to answer."""

    @classmethod
    def of(cls, process: Process) -> ProcessFound:
        """The process as it was found."""
        return cls(role=process.role, name=process.name, node=process.node, pid=process.pid)


class StageBegan(Event, frozen=True, tag="stage"):
    """A part of the start began; the part before it has ended. The first step ends the last one."""

    number: int
    total: int
    name: str


class CommandEnded(Event, frozen=True, tag="ended"):
    """The command ended; without this event it was killed."""

    code: int
    """Exit code: 0 after a whole run."""
    text: str = ""
    """The error's message."""


def events_folder(settings: PartialRolloutConfig) -> Path | None:
    """Where the processes of a run write their events; None: nowhere. The flag replaces `auto` by a path."""
    return None if settings.events in (None, "auto") else Path(settings.events)


AnyEvent = (
    Opened
    | StepEnded
    | BatchTaken
    | GateMoved
    | WeightsUpdated
    | CheckpointSaved
    | SegmentEnded
    | TrajectoryEnded
    | PromptDropped
    | Choice
    | Warned
    | Fault
    | ProcessFound
    | StageBegan
    | CommandEnded
    | PhaseBegan
    | DeadlinePassed
    | QueueMoved
    | RequestSent
)
KINDS: frozenset[str] = frozenset(str(kind.__struct_config__.tag) for kind in AnyEvent.__args__)


class EventWriter:
    """Appends the events of one process to a file of its own.

    >>> import tempfile
    >>> from pathlib import Path
    >>> folder = Path(tempfile.mkdtemp())
    >>> writer = EventWriter(folder, "trainer", clock=lambda: 12.5)
    >>> writer.write(WeightsUpdated(step=3, version=3, seconds=0.2))
    >>> writer.close()
    >>> [event.version for event in EventReader(folder).read() if isinstance(event, WeightsUpdated)]
    [3]
    """

    def __init__(
        self,
        folder: Path | None,
        role: str,
        *,
        keep_all: bool = False,
        max_file_bytes: int = MAX_FILE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`folder` is the run's `events` folder, made if it is missing; None: nothing is written."""
        self._clock, self._max_bytes, self._keep_all = clock, max_file_bytes, keep_all
        self._lock = threading.RLock()  # a failed write logs a warning, which is an event too
        self._encoder = msgspec.json.Encoder()
        self._role, self._num_bytes, self._file = role, 0, -1
        if folder is None:
            return
        node, pid = platform.node(), os.getpid()
        self._path, self._num_files = folder / f"{role}-{node}-{pid}-{int(clock() * 1000)}", 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            self._give_up(error)

    def write(self, event: AnyEvent) -> None:
        """Append one event; it is in the file when this returns, or never. Any thread may call it."""
        with self._lock:
            if self._file < 0:
                return
            try:
                if self._num_bytes > self._max_bytes and not self._keep_all:
                    self._turn_over()
                self._append(event)
            except OSError as error:
                self._give_up(error)
            except (TypeError, ValueError, OverflowError) as error:  # a value that JSON cannot hold
                logger.warning("an event %s of %s is left out: %s", type(event).__name__, self._role, error)

    def close(self) -> None:
        """Later events are dropped."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):  # some file systems tell of a full quota only here
                os.close(file)

    def _append(self, event: AnyEvent) -> None:
        if not event.t:
            event = msgspec.structs.replace(event, t=round(self._clock(), 6))
        line = self._encoder.encode(event) + b"\n"
        self._num_bytes += os.write(self._file, line)

    def _open(self) -> None:
        # Texts are in it only where the user wants them, but who may read a run's folder is the user's to say.
        self._file = os.open(self._numbered(self._num_files), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o640)
        self._num_bytes = 0
        self._append(Opened(format=FORMAT_VERSION, role=self._role, node=platform.node(), pid=os.getpid()))

    def _turn_over(self) -> None:
        self.close()
        self._numbered(self._num_files - 1).unlink(missing_ok=True)
        self._num_files += 1
        self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}.jsonl")

    def _give_up(self, error: OSError) -> None:
        self.close()
        logger.warning("the event stream of %s ends here, the run goes on without it: %s", self._role, error)


class EventReader:
    """Reads the event files of a run, from the beginning or from where the last `read` stopped.

    A view of a run that is under way calls `read` again and again: each call returns what is new.
    """

    def __init__(self, folder: Path, roles: Sequence[str] = ("",)) -> None:
        """`folder` is the run's `events` folder, which may not be there yet; `roles`: only files of these are read.

        >>> from pathlib import Path
        >>> EventReader(Path("/nowhere")).read()
        []
        """
        self._folder, self._roles = folder, roles
        self._offsets: dict[Path, int] = {}
        """Bytes read of each file."""
        self._decoder = msgspec.json.Decoder(AnyEvent)
        self._kind = msgspec.json.Decoder(_Kind)
        self.num_unreadable = 0
        """Lines that are no events."""
        self.num_unknown = 0
        """Events of kinds that a later release has added."""

    def read(self) -> list[AnyEvent]:
        """New events of all files, in the order of their times.

        Raises:
            DataError: a file has a format of a later release.
        """
        events: list[AnyEvent] = []
        for path in sorted(path for role in self._roles for path in self._folder.glob(f"{role}*.jsonl")):
            events += self._read_file(path)
        events.sort(key=lambda event: event.t)
        return events

    def about(self, text: str) -> list[AnyEvent]:
        """All events whose line holds a text, such as a prompt's uid; reads all files, and changes no offset."""
        wanted, events = text.encode(), list[AnyEvent]()
        for path in sorted(path for role in self._roles for path in self._folder.glob(f"{role}*.jsonl")):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                lines = (line for line in file if wanted in line)
                events += [event for line in lines if (event := self._decode(line)) is not None]
        return sorted(events, key=lambda event: event.t)

    def _read_file(self, path: Path) -> Iterator[AnyEvent]:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                new = file.read()
        except FileNotFoundError:  # removed since it was listed: its events are more than one file old
            return
        whole = new.rfind(b"\n") + 1
        self._offsets[path] = self._offsets.get(path, 0) + whole
        for line in new[:whole].splitlines():
            event = self._decode(line)
            if isinstance(event, Opened) and event.format > FORMAT_VERSION:
                raise DataError(
                    f"{path} has format {event.format} of the event stream, this release reads up to {FORMAT_VERSION}; "
                    "use the release that wrote it, or a later one"
                )
            if event is not None:
                yield event

    def _decode(self, line: bytes) -> AnyEvent | None:
        try:
            return self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._count_skipped(line)
            return None

    def _count_skipped(self, line: bytes) -> None:
        try:
            kind = self._kind.decode(line).event
        except (msgspec.DecodeError, UnicodeDecodeError):
            kind = ""
        if kind and kind not in KINDS:
            self.num_unknown += 1
        else:
            self.num_unreadable += 1


class _Kind(msgspec.Struct):
    event: str
