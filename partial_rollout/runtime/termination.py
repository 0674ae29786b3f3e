"""SIGTERM ends a driver as Ctrl-C does: in order, with its servers and Ray."""

from __future__ import annotations

import signal
import threading

INTERRUPTED_CODE = 130
"""The exit code that a shell gives a command that was ended by Ctrl-C."""


def heed_termination() -> None:
    """From now on SIGTERM raises KeyboardInterrupt in the main thread. Call this after Ray has been started.

    Ray's start installs a handler of its own, which prints a stack trace and aborts: nothing would be shut down.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
