"""The driver's watch on those processes of Ray that it has started itself: GCS and raylet of a local Ray.

    GCS or raylet dies ──> thread of the RayWatch ──SIGKILL──> task runner ──its end──> driver: the error names Ray's

When the GCS is dead, Ray's processes try to reach it for a minute. Then Ray's C++ code ends each of them, the driver
too, and no Python code of the driver runs any more. So the driver looks every second whether both live. When one is
dead, it kills the task runner, whose end it waits for, and the raylet, which would wait for the GCS; then it has the
rest of that minute to shut Ray down. A new start of the training starts a new Ray. A cluster that was there before the
command is not watched: its processes are no children of the driver.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

import psutil

from partial_rollout.observability.events import Fault
from partial_rollout.runtime.death_watch import STDOUT, kill_pid, last_lines, log_of
from partial_rollout.runtime.processes import GCS, RAYLET
from partial_rollout.runtime.run_restarts import runs
from partial_rollout.types import Death, Process

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

TITLES = {"gcs_server": GCS, "raylet": RAYLET}
"""Titles by which the operating system knows the processes."""
LOOK_S = 1.0
"""A look at two processes costs less than a thousandth of that."""


def own_ray() -> dict[str, psutil.Process]:
    """GCS and raylet that this process has started, by title."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            if (title := child.name()) in TITLES and runs(child):
                found[title] = child
    return found


class RayWatch:
    """begin -> watched, by a thread -> one has died: `death` says which, task runner and raylet are killed -> stop."""

    def __init__(self, runner: Process, watched: Mapping[str, psutil.Process] | None = None) -> None:
        """`runner` is the task runner's process, on this node; `watched` by title, else `own_ray`."""
        self._runner = runner
        found = own_ray() if watched is None else watched
        self._watched = [(_place(title, process, runner.node), process) for title, process in found.items()]
        self._death: Death | None = None
        self._stopped, self._looking = threading.Event(), threading.Lock()

    def begin(self) -> None:
        """The task runner has been asked to train."""
        if self._watched:
            threading.Thread(target=self._run, daemon=True, name="ray-watch").start()

    def stop(self) -> None:
        """Training has ended, and Ray may be shut down."""
        with self._looking:
            self._stopped.set()

    def death(self) -> Death | None:
        """Which of Ray's processes has died, up to now; it is looked for once more."""
        self.look()
        return self._death

    def look(self) -> None:
        """Look whether all live; the first one that does not is told of, and task runner and raylet are killed."""
        with self._looking:
            if self._death is None and not self._stopped.is_set():
                dead = next((place for place, process in self._watched if not runs(process)), None)
                if dead is not None:
                    self._tell(dead)

    def _run(self) -> None:
        while self._death is None and not self._stopped.wait(LOOK_S):
            self.look()

    def _tell(self, place: Process) -> None:
        lines = last_lines(place.log) if place.log else ""
        cause = "it was killed, or it crashed (the kernel's log has what was killed for want of memory)"
        self._death = Death(place, cause, "belonged to the Ray that this command had started", lines)
        action = (
            "training ends, with this Ray; it is started again from its last checkpoint unless the log says why not"
        )
        fault = Fault.of(place, text=str(self._death), action=action)
        # Without the last lines of its log: `RunRestarts` logs the error, which has them.
        logger.error("%s died; %s", place, action, extra={"event": fault})
        # Without the GCS a raylet does not end in time when it is told to; with the raylet its workers end.
        for pid in (self._runner.pid, *(watched.pid for watched, _ in self._watched if watched.role == RAYLET.role)):
            kill_pid(pid)


def _place(title: str, process: psutil.Process, node: str) -> Process:
    return Process(TITLES[title].role, title, node, process.pid, log_of(process.pid, STDOUT))
