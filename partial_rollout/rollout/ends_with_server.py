"""The processes of an engine end with the one that started them, however it died.

    engine server (Ray actor) ──starts──> engine core ──starts──> workers

vLLM's workers look whether their core is there, but its core does not look whether the server is. Seen on a node that
was cut off from its cluster: Ray ended all its own processes there, also the server, and the core lived on for minutes,
with its memory. Elsewhere a server that Ray has started again kills them sooner (`end_orphans`); there nobody was left.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

VARIABLE = "PARTIAL_ROLLOUT_ENGINE"
"""In the environment of an engine's processes, so that those of another program's engine are left alone."""
GRACE_S = 5.0
"""A worker whose core has died ends by itself within this time, unless it stands still."""


def mark_engine() -> None:
    """Let the processes that this one starts from now on end with it."""
    os.environ[VARIABLE] = "1"


def end_with_parent() -> None:
    """End this process `GRACE_S` after its parent, if that marked it and `multiprocessing` started it."""
    parent = multiprocessing.parent_process()
    if parent is not None and VARIABLE in os.environ:
        threading.Thread(target=_end_after, args=(parent,), name="ends-with-parent", daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()  # a pipe of which the parent alone has the other end; its death closes it
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
