"""The prompt manager's journal: each change of its books, written down before it is made.

    call ──> is it answered? ──> record in the journal ──> change of the books ──> answer, kept for a while

A new process reads the journal and makes the same changes again, so its books are the same, and a call that was not
answered, which Ray makes again, gets the answer of the change that was made: each change is made once. The journal
outlives the process and not its node, so it waits for no disk.

    folder/lock              held by the process that writes
    folder/journal.N         from the books at its beginning; the one before it is kept, for the answers of its calls
    file     = MAGIC frame*  the first frame has the books, each further one a record
    frame    = bytes:u32 crc32(payload):u32 crc32(these two):u32 payload
    payload  = msgpack of `WholeBooks`, or of a `Record`

A process that is killed leaves a torn last frame at most, which nobody was answered from: it is cut off. Anything else
that cannot be read is an error that names the file: never a wrong queue.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import logging
import os
import struct
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, NoReturn, ParamSpec, TypeVar, get_type_hints

import msgspec
import numpy as np

from partial_rollout.errors import InternalError, JournalUnreadable, PartialRolloutError
from partial_rollout.runtime import books
from partial_rollout.runtime.books import OF_THE_QUEUE, Books, WholeBooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from partial_rollout.core.queue.staleness import StalenessBound
    from partial_rollout.core.queue.tail import TailPolicy

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

MAGIC = b"partial_rollout journal 1\n"
FRAME, OWN_CRC = struct.Struct("<II"), struct.Struct("<I")
HEAD_BYTES = FRAME.size + OWN_CRC.size
FILE_BYTES = 4 * 1024 * 1024
"""A longer file is followed by a new one; reading two of them takes well below a second."""
BOOKS_SHARE = 2
"""A file has at least so many times the bytes of the books at its beginning: they are written seldom."""
NUM_ANSWERS = 4096
"""Calls whose answers are kept: far more than are made while one answer is on its way."""
KEPT_ONCE = "take"
"""Only its last answer is kept, since it is large: the trainer has one before it asks for the next one."""
NOT_CHANGES = ("whole", "load_whole")
CHANGES: dict[str, Callable[..., Any]] = {change.__name__: change for change in OF_THE_QUEUE} | {
    name: method
    for name, method in inspect.getmembers(Books, inspect.isfunction)
    if not name.startswith("_") and name not in NOT_CHANGES
}
"""By name, the methods that change the books."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A change."""

    call: str
    """Ray's id of the call, the same when Ray makes the call again; empty: nobody waits for an answer."""
    now_s: float
    """The clock's reading at the change."""
    change: str
    """Name of the method, of `Books` or of the queue."""
    arguments: msgspec.Raw


def _argument_types() -> dict[str, Any]:
    """By change, the tuple of its arguments."""
    found: dict[str, Any] = {}
    for name, method in CHANGES.items():
        # The queue's module imports some of these names for type checkers only; the books' module has them all.
        hints = get_type_hints(method, localns=vars(books))
        found[name] = tuple[tuple(hints[each] for each in inspect.signature(method).parameters if each != "self")]
    return found


def _plain(value: Any) -> Any:
    """Some agent loops and engines compute their numbers with numpy."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be written down")


ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
ARGUMENTS: dict[str, Any] = {name: msgspec.msgpack.Decoder(arguments) for name, arguments in _argument_types().items()}
RECORDS, BOOKS = msgspec.msgpack.Decoder(Record), msgspec.msgpack.Decoder(WholeBooks)


class Place(NamedTuple):
    """Where a journal is."""

    folder: Path
    """A folder of this node; the journal makes it private to its user."""
    goes_on: bool = False
    """Whether this is a later process: the journal must be there."""


class Journal:
    """The books, and the one way to change them.

    made, from the files that are there if there are any -> do, do, ...

    >>> from partial_rollout.core.queue.queue import PromptQueue
    >>> from partial_rollout.core.queue.staleness import UNBOUNDED
    >>> from partial_rollout.core.queue.tail import Partial
    >>> journal = Journal(Partial(capacity=2), 2, lambda: 0.0, UNBOUNDED)
    >>> journal.do("call 1", PromptQueue.begin_round).num_fresh, journal.answered("call 1")
    (2, True)
    """

    def __init__(
        self,
        policy: TailPolicy,
        max_attempts: int,
        clock: Callable[[], float],
        bound: StalenessBound,
        place: Place | None = None,
    ) -> None:
        """Begin a journal, or go on with the one that is there; without a place nothing is written.

        Raises:
            JournalUnreadable: it is not there, or cannot be read.
        """
        self._clock, self._now_s = clock, float("nan")
        self._is_changing = False
        self._answers: OrderedDict[str, Any] = OrderedDict()
        self._last_kept_once = ""
        self.books = Books(policy, max_attempts, self._time, bound)
        self._folder, self._file, self._number = place.folder if place else Path(), -1, 0
        self._num_bytes = self._limit_bytes = 0
        self._lock = -1
        if place is not None:
            try:
                self._open(place)
            except BaseException:
                self.close()
                raise

    def answered(self, call: str) -> bool:
        """Whether the change of this call was made."""
        return call in self._answers

    def do(self, call: str, change: Callable[Concatenate[Any, P], R], *arguments: P.args, **no_keywords: P.kwargs) -> R:
        """Make a change of the books unless this call has made it already; returns or raises the change's answer."""
        name = change.__name__
        if CHANGES.get(name) is not change or no_keywords:
            raise InternalError(f"{change.__qualname__} with keywords {[*no_keywords]} cannot be written down")
        if call not in self._answers:
            now_s = self._clock()
            if self._file >= 0:
                self._append(call, now_s, name, arguments)
            answer = self._make(call, now_s, name, arguments)
            if self._file >= 0 and self._num_bytes > self._limit_bytes:
                self._begin_file()
        else:
            answer = self._answers[call]
        if isinstance(answer, PartialRolloutError):
            raise answer
        return answer

    def close(self) -> None:
        """Write no more; another process may go on."""
        self._close_file()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _time(self) -> float:
        # During a change the clock stands at the reading in its record, so that a later process computes the same ages.
        return self._now_s if self._is_changing else self._clock()

    def _make(self, call: str, now_s: float, change: str, arguments: tuple[Any, ...]) -> Any:
        self._now_s, self._is_changing = now_s, True
        try:
            method = CHANGES[change]
            answer = method(self.books.queue if method in OF_THE_QUEUE else self.books, *arguments)
        # An error is an answer as well: made again, the call must meet the same one and not change the books.
        except PartialRolloutError as error:
            answer = error
        finally:
            self._is_changing = False
        if call:
            self._keep(call, change, answer)
        return answer

    def _keep(self, call: str, change: str, answer: Any) -> None:
        if change == KEPT_ONCE:
            self._answers.pop(self._last_kept_once, None)
            self._last_kept_once = call
        self._answers[call] = answer
        if len(self._answers) > NUM_ANSWERS:
            self._answers.popitem(last=False)

    def _open(self, place: Place) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Until the process before is gone: one that was killed while its disk hung may write once more.
        self._lock = os.open(self._folder / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        numbers = sorted(int(path.name.partition(".")[2]) for path in self._folder.glob("journal.*[0-9]"))
        if place.goes_on and not numbers:
            raise JournalUnreadable(f"the prompt manager's journal is not in {self._folder} (any more)")
        if numbers:
            # The file before the last one too: calls whose changes are in it may be made again, and need their answers.
            self._recover(numbers[-2:])
        else:
            self._begin_file()

    # ---- writing ----

    def _begin_file(self) -> None:
        """Go on in a new file, and remove the one before the last."""
        number = self._number + 1
        path = _path(self._folder, number)
        partial = path.with_name("journal.partial")
        try:
            content = MAGIC + frame(ENCODER.encode(self.books.whole()))
            partial.write_bytes(content)
            os.replace(partial, path)  # a process that is killed leaves no torn beginning
            file = os.open(path, os.O_WRONLY | os.O_APPEND)
        except (OSError, TypeError) as error:
            self._give_up(error)
            return
        self._close_file()
        self._file, self._number, self._num_bytes = file, number, len(content)
        self._limit_bytes = max(FILE_BYTES, (1 + BOOKS_SHARE) * len(content))
        _path(self._folder, number - 2).unlink(missing_ok=True)

    def _append(self, call: str, now_s: float, change: str, arguments: tuple[Any, ...]) -> None:
        try:
            content = frame(ENCODER.encode(Record(call, now_s, change, msgspec.Raw(ENCODER.encode(arguments)))))
            written = os.write(self._file, content)
            while written < len(content):  # the disk is full, and the next write says so
                written += os.write(self._file, content[written:])
            self._num_bytes += written
        except (OSError, TypeError) as error:  # a full disk, or a value of an agent loop that is no plain one
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """A journal that lacks a change is worse than none."""
        self._close_file()
        with contextlib.suppress(OSError):
            for path in self._folder.glob("journal.*"):
                path.unlink(missing_ok=True)
        logger.warning(
            "the prompt manager's journal in %s cannot be written (%s): the run goes on, but the death of the prompt "
            "manager would start training again from the last checkpoint",
            self._folder,
            error,
        )

    # ---- reading ----

    def _recover(self, numbers: list[int]) -> None:
        num_changes = 0
        for number in numbers:
            path = _path(self._folder, number)
            content = path.read_bytes()
            frames, is_last = Frames(path, content), number == numbers[-1]
            books = next(iter(frames), None)
            if books is None:
                frames.fail("it has no beginning")
            if number == numbers[0]:
                self.books.load_whole(frames.decode(BOOKS, books))
            elif ENCODER.encode(self.books.whole()) != books:
                frames.fail("the changes of the file before do not lead to the books at its beginning")
            for payload in frames:
                self._make_again(frames, payload)
                num_changes += 1
            if frames.num_bytes < len(content) and not is_last:
                frames.fail(f"its end is missing after byte {frames.num_bytes}")
            if is_last:
                self._number, self._num_bytes = number, frames.num_bytes
                self._limit_bytes = max(FILE_BYTES, (1 + BOOKS_SHARE) * len(books))
                # A torn end goes before anything is written behind it.
                os.truncate(path, frames.num_bytes)
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        logger.info("the prompt queue was made again from %d changes in %s", num_changes, self._folder)

    def _make_again(self, frames: Frames, payload: bytes) -> None:
        record: Record = frames.decode(RECORDS, payload)
        if record.change not in CHANGES:
            frames.fail(f"no change is called {record.change!r}")
        arguments = frames.decode(ARGUMENTS[record.change], record.arguments)
        try:
            self._make(record.call, record.now_s, record.change, arguments)
        except Exception as error:  # what no change raised when it was made
            raise InternalError(f"{frames.where}: the change {record.change!r} failed with {error!r}") from error


class Frames:
    """Iterates over the payloads of a file up to a torn last frame; `num_bytes` is what was read so far."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content, self.num_bytes = path, content, 0

    @property
    def where(self) -> str:
        """The file and the place in it."""
        return f"the prompt manager's journal {self._path} at byte {self.num_bytes}"

    def __iter__(self) -> Iterator[bytes]:
        """Raise JournalUnreadable for a frame that is whole and not what was written."""
        if self.num_bytes == 0:
            if not self._content.startswith(MAGIC):
                self.fail("it does not begin as a journal of this release")
            self.num_bytes = len(MAGIC)
        while self.num_bytes + HEAD_BYTES <= len(self._content):
            head = self._content[self.num_bytes : self.num_bytes + HEAD_BYTES]
            length, crc = FRAME.unpack_from(head)
            # The head has a sum of its own: a wrong length would pass all that follows off as a torn last frame.
            if OWN_CRC.unpack_from(head, FRAME.size)[0] != zlib.crc32(head[: FRAME.size]):
                self.fail("the head of a record was damaged")
            begin, end = self.num_bytes + HEAD_BYTES, self.num_bytes + HEAD_BYTES + length
            if end > len(self._content):
                return
            payload = self._content[begin:end]
            if zlib.crc32(payload) != crc:
                self.fail("a record was damaged")
            self.num_bytes = end
            yield payload

    def decode(self, decoder: Any, payload: bytes | msgspec.Raw) -> Any:
        """What a payload says; raises JournalUnreadable."""
        try:
            return decoder.decode(payload)
        except msgspec.DecodeError as error:
            self.fail(str(error))

    def fail(self, why: str) -> NoReturn:
        """Raise JournalUnreadable."""
        raise JournalUnreadable(f"{self.where} cannot be read: {why}")


def frame(payload: bytes) -> bytes:
    """A payload as it stands in a file."""
    head = FRAME.pack(len(payload), zlib.crc32(payload))
    return head + OWN_CRC.pack(zlib.crc32(head)) + payload


def _path(folder: Path, number: int) -> Path:
    return folder / f"journal.{number}"
