"""A driver that is told to terminate ends like one that is interrupted: in order, its servers and Ray included."""

from __future__ import annotations

import signal
import threading

INTERRUPTED_CODE = 130
"""Exit code, as a shell's of Ctrl-C."""


def heed_termination() -> None:
    """From now on SIGTERM is a KeyboardInterrupt in the main thread; call it where Ray has been started.

    Ray's own handler, which it installs then, prints a stack trace and aborts, and whatever is to be shut down is not.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
