"""This package's log messages: in the log, and in the run's event stream.

    logger.error("replica 1 is started again", extra={"event": Fault(...)})     the text, and the event, at any level
    logger.warning("prompt %s is dropped: %s", uid, error)                      the text, and a `Warned` event

A process whose messages shall reach the stream calls `report_to` once, with its writer.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, cast

from partial_rollout.observability.events import Event, Warned

if TYPE_CHECKING:
    from partial_rollout.observability.events import AnyEvent, EventWriter

NAME = "partial_rollout"
FORMAT = "%(levelname)s:%(asctime)s:%(message)s"
"""verl's format."""


class EventHandler(logging.Handler):
    """Writes the event that a log message carries, or `Warned` for a warning or an error that carries none."""

    def __init__(self, writer: EventWriter) -> None:
        """`writer` is that of this process."""
        super().__init__()
        self._writer = writer

    def createLock(self) -> None:  # noqa: N802 - the method of logging.Handler
        """Use no lock: the writer has one, and logs while it holds it."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write at most one event."""
        event = getattr(record, "event", None)
        if isinstance(event, Event):
            self._writer.write(cast("AnyEvent", event))
        elif record.levelno >= logging.WARNING:
            level = "error" if record.levelno >= logging.ERROR else "warning"
            self._writer.write(Warned(text=_text(record), level=level, source=record.name))


def _text(record: logging.LogRecord) -> str:
    """The message, and of an exception what its last line says."""
    error = record.exc_info[1] if record.exc_info else None
    return record.getMessage() + (f": {type(error).__name__}: {error}" if error else "")


def configure_logging() -> None:
    """Write this package's messages of level INFO and above to stderr; a second call changes nothing.

    Importing verl's trainer in a Ray worker leaves a root logger that drops everything below ERROR.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    own = logging.getLogger(NAME)
    own.handlers, own.propagate = [handler], False
    own.setLevel(logging.INFO)


def report_to(writer: EventWriter) -> None:
    """Copy this package's messages of this process into `writer`, and into no earlier one; the log stays as it is."""
    own = logging.getLogger(NAME)
    others = [handler for handler in own.handlers if not isinstance(handler, EventHandler)]
    own.handlers = [*others, EventHandler(writer)]
    # Not only where it is needed now: packages that are imported later raise the root logger's level.
    own.setLevel(logging.INFO)
