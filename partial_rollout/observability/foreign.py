"""Warnings and errors in a run's log file, whoever logged them: Ray, vLLM, verl, Python, or this package.

Other packages write no event, so the log is the only place where their messages are. Everything else that views show
comes from the event stream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
ACTOR = re.compile(r"^\((?P<name>[\w.:\-]+)?,? ?(?:pid=\d+)?(?:, ip=[^)]+)?\) ")
"""What Ray, and vLLM again, put before a process' lines: `(WorkerDict pid=14288) `."""
LEVEL = r"(?P<level>WARNING|ERROR|CRITICAL)"
FORMS = tuple(
    re.compile(form)
    for form in (
        rf"^{LEVEL} \d\d-\d\d [\d:]+ \[[^\]]*\] (?P<text>.*)",  # vLLM
        rf"^{LEVEL}:\d{{4}}-[\d-]+ [\d:,]+:(?P<text>.*)",  # verl, and this package
        rf"^{LEVEL}:[\w.]+:(?P<text>.*)",  # Python's logging without a format
        rf"^\[?\d{{4}}-[\d-]+[ T][\d:,.]+\]?\s+{LEVEL}\s+\S+ -- (?P<text>.*)",  # Ray
        rf"^\[?\d{{4}}-[\d-]+[ T][\d:,.]+\]?(?:\[[\w.]+\])?[\s\[-]+{LEVEL}[\]\s-]+(?:[\w.]+ - )?(?P<text>.*)",
        r"^\[\d{4}-[\d-]+ [\d:,.]+ (?P<level>[WEF]) [\d ]+\] (?:\([\w.]+\) )?(?P<text>.*)",  # Ray's core
        r"^\[(?P<level>[WEF])\d+ [\d:.]+ [^\]]*\] (?:Warning: )?(?P<text>.*)",  # torch's core
        r"^\S+\.py:\d+: (?P<level>\w*Warning): (?P<text>.*)",
        r"^(?P<level>[Ww]arning|[Ee]rror): (?P<text>.*)",
    )
)
PROGRESS = re.compile(r"^[^|]*\d+%\|[^|]*\| \S+ \[[^\]]*\]")
"""A progress bar, which a message may follow on the same line."""
REPEATED = re.compile(r" \[repeated \d+x across cluster\].*$")
"""What Ray adds to a line that stands for others of the same text."""
TRACEBACK = "Traceback (most recent call last):"
RAISED = re.compile(r"^(?P<text>(?:[A-Za-z_][\w.]*)?(?:Error|Exception|Interrupt|Timeout|Dead|Lost|Exit)\b.*)")
SEEN_TO = re.compile(r"has constructor arguments in the object store and max_restarts > 0")
"""Errors of Ray's that tell of a danger which is none here: the replica holds on to its server's arguments."""
VARIABLE = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Message:
    """A warning or an error."""

    text: str
    is_error: bool = False
    source: str = ""
    """Which process wrote it, as Ray names it; empty: the driver."""

    @property
    def key(self) -> str:
        """What messages that differ in numbers only have in common."""
        return VARIABLE.sub("#", self.text).strip()


class LogMessages:
    """Finds the messages in a log, line by line; of a traceback the line that says what was raised is one."""

    def __init__(self) -> None:
        self._in_traceback: set[str] = set()
        """Processes whose traceback has begun."""

    def feed(self, line: str) -> Message | None:
        """The message of a line, if it has one.

        >>> LogMessages().feed("(Server pid=7) WARNING 11-23 05:02:07 [vllm.py:12] No room")
        Message(text='No room', is_error=False, source='Server')
        """
        text, source = COLOUR.sub("", line).rstrip(), ""
        while found := ACTOR.match(text):
            source, text = source or found["name"] or "", text[found.end() :]
        text = REPEATED.sub("", PROGRESS.sub("", text))
        if TRACEBACK in text:
            self._in_traceback.add(source)
            return None
        if source in self._in_traceback and (raised := RAISED.match(text)):
            self._in_traceback.discard(source)
            return Message(raised["text"], is_error=True, source=source)
        for form in FORMS:
            if found := form.match(text):
                if SEEN_TO.search(text):
                    return None
                is_error = found["level"] in ("ERROR", "CRITICAL", "E", "F", "error", "Error")
                return Message(found["text"].strip(), is_error=is_error, source=source)
        return None


class LogTail:
    """Reads what is appended to a log file; it may not be there yet."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """`from_end` leaves out what is in the file now."""
        self._path, self._rest = path, b""
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> Iterator[str]:
        """New whole lines; a progress bar's carriage return ends a line too."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        self._offset += len(new)
        *lines, self._rest = re.split(rb"[\r\n]", self._rest + new)
        for line in lines:
            if line:
                yield line.decode(errors="replace")


def messages(lines: Iterable[str]) -> list[Message]:
    """All messages of a log."""
    found = LogMessages()
    return [message for line in lines if (message := found.feed(line)) is not None]
