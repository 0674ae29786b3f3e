"""Schedulers with which an engine core dies, or stands still, each time in a moment in which nobody could strike it.

A job asks for one of these classes by vLLM's argument `scheduler_cls`. An engine that follows finds the marks of those
before it in the job's folder.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from partial_rollout.observability.events import BatchTaken, EventReader, GateMoved
from tests.faults.dies_in import NUM_DEATHS, STEP


def _folder() -> Path:
    return Path(os.environ["VERL_FILE_LOGGER_PATH"]).parent


def _times(mark: str) -> int:
    """How often this was called for `mark`, in all engine cores of the job."""
    with (_folder() / mark).open("a") as file:
        file.write(".")
        file.flush()
        return file.tell()


class Stillborn(AsyncScheduler):
    """Stops the second engine core of a job before it has started."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what AsyncScheduler takes."""
        if _times("births") == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        super().__init__(*args, **kwargs)


class _Looking(AsyncScheduler):
    """Knows how far the trainer is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reader = EventReader(_folder() / "events", ("trainer",))
        self._taken, self._shut_in = 0, 0
        """The last step whose batch was taken, and the step in which the gates are shut; 0: they are open."""

    def _look(self) -> None:
        for event in self._reader.read():
            if isinstance(event, BatchTaken):
                self._taken = event.step
            elif isinstance(event, GateMoved):
                self._shut_in = 0 if event.is_open else event.step


class DiesAgainAndAgain(_Looking):
    """Kills so many engine cores when they are to generate the batch of the step."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Called for each decode step."""
        self._look()
        if self.has_requests() and self._taken == STEP - 1 and _times("deaths") <= NUM_DEATHS:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().schedule(*args, **kwargs)


class DiesInEachUpdate(_Looking):
    """Kills two engine cores when they have received the weights of the step."""

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Called after each update of weights, with shut gates; for a pause with `reset_running_requests`."""
        self._look()
        if not reset_running_requests and self._shut_in == STEP and _times("deaths") <= 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset_prefix_cache(reset_running_requests, reset_connector)
