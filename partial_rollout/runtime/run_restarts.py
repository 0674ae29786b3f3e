"""Training is started again, in the same command, after the death of a process that it cannot go on without.

    a process dies ──> training ends ──> Ray is shut down ──> what is left of the processes is killed ──> a new start

The new start is what typing the command again would be: with `trainer.resume_mode=auto` it goes on from the last
checkpoint. A run that dies before it has completed a step is not started again, since it would die again. Neither is
one that dies again and again without a further step: it would take the same steps for ever.

A new start that fails before its first step is followed by another one, unless it failed by a mistake of the user,
since the command has started before. Engines fail to start for reasons that pass: a port that somebody took meanwhile,
GPU memory that came back late.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
from omegaconf.errors import OmegaConfBaseException
from ray.exceptions import RayActorError

from partial_rollout.errors import ActorLost, EngineDead, EnginesLost, TaskRunnerLost, UserError
from partial_rollout.observability.events import (
    CheckpointSaved,
    EventReader,
    Fault,
    ProcessFound,
    StageBegan,
    StepEnded,
)
from partial_rollout.observability.stages import FIRST_STEP
from partial_rollout.runtime.processes import ENGINE
from partial_rollout.runtime.remote_call import root_cause

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from partial_rollout.observability.events import Event

logger = logging.getLogger(__name__)

GONE_S = 20.0
"""Processes of a run that has ended end by themselves within this time, or are killed: a GPU must be free again."""
KILLED_S = 20.0
"""The kernel has freed what a killed process held within this time."""
RESUME_MODE = "auto"
"""With any other `trainer.resume_mode` a new start would not go on from where the run was."""
NEVER = "that needs async_training.partial_rollout=True, partial_rollout.events, and partial_rollout.restarts above 0"
"""Why a command never starts training again."""
DEATHS = (ActorLost, EngineDead, EnginesLost, RayActorError)
"""What says that a process has died, or several have, that the run does not go on without."""
MISTAKES = (UserError, OmegaConfBaseException)
"""What the user has to mend; no new start would."""
WRITERS = ("trainer", "task_runner", "server", "driver")
"""Processes that write the events which are read here; the workers' files are large."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended the training."""

    error: BaseException
    """Below Ray's wrappers of every actor that it passed through."""
    node: str
    """Address of the driver's node, as Ray knew it."""

    @classmethod
    def of(cls, error: BaseException, node: str) -> Failure:
        """From what was raised in the driver; call this while Ray runs, which knows the address of its `node`."""
        return cls(root_cause(error), node)

    @property
    def is_death(self) -> bool:
        """Whether it is one of `DEATHS`."""
        return isinstance(self.error, DEATHS)


class RestartBudget:
    """How often a run may be started again without a further step in between.

    >>> budget = RestartBudget(2)
    >>> [budget.take(step=step) for step in (1, 1, 7, 7, 7)]
    [1, 2, 1, 2, 0]
    >>> [budget.take(step=step) for step in (8, 8)]
    [1, 2]
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._step = self._used = 0

    def take(self, step: int) -> int:
        """The number of the new start that follows, from 1; 0: none. `step` is the highest one that was completed.

        Steps that a new start has taken again are no further ones, so a run that dies in the same step each time ends.
        """
        if step > self._step:
            self._step, self._used = step, 0
        if self._used >= self.limit:
            return 0
        self._used += 1
        return self._used


class RunRestarts:
    """Decides, for the driver, what follows the end of the training by an error."""

    def __init__(self, limit: int, events: Path | None, resume_mode: str) -> None:
        """`events` is the folder of the run's event stream, which says how far the run has come."""
        self._budget = RestartBudget(limit)
        self._events, self._resume_mode, self._since_s = events, resume_mode, time.time()
        self._again_s: float | None = None

    def follows(self, failure: Failure) -> bool:
        """Whether training is to be started again; call this when Ray is shut down. Ends what is left of processes."""
        if not (failure.is_death or self._is_failed_start(failure)):
            return False
        number, why_not = 0, NEVER
        if self._events is not None and self._budget.limit:
            told = self._told(self._since_s)
            end_left_over([event for event in told if isinstance(event, ProcessFound)], failure.node, gone_s=GONE_S)
            number, why_not = self._decide(told)
        if number:
            action = f"training is started again from its last checkpoint (new start {number} of {self._budget.limit})"
        else:
            action = f"training is not started again: {why_not}"
        fault = None
        if isinstance(failure.error, TaskRunnerLost):  # what else dies is named by the task runner
            fault = Fault.of(failure.error.death.process, text=str(failure.error), action=action)
        elif isinstance(failure.error, EngineDead | EnginesLost):  # of none of them was told what follows here
            fault = Fault(role=ENGINE.role, name=ENGINE.role, text=str(failure.error), action=action)
        logger.warning("%s\n%s", failure.error, action, extra={"event": fault} if fault else {})
        self._again_s = time.time() if number else None
        return number > 0

    def _is_failed_start(self, failure: Failure) -> bool:
        """Whether it has ended a new start before its first step, and is no mistake of the user."""
        if self._again_s is None or isinstance(failure.error, MISTAKES):
            return False
        return not any(
            isinstance(event, StepEnded) or (isinstance(event, StageBegan) and event.name == FIRST_STEP)
            for event in self._told(self._again_s)
        )

    def _told(self, since_s: float) -> list[Event]:
        events = EventReader(self._events, WRITERS).read() if self._events is not None else []
        return [event for event in events if event.t >= since_s]

    def _decide(self, told: Sequence[Event]) -> tuple[int, str]:
        """The number of the new start, from 1; or 0 and why none follows."""
        if self._resume_mode != RESUME_MODE:
            return 0, f"trainer.resume_mode={self._resume_mode} would not go on from the last checkpoint"
        # A step that was saved is complete, also where a death kept it from being told of.
        step = max((event.step for event in told if isinstance(event, StepEnded | CheckpointSaved)), default=0)
        if not step:
            return 0, "the command has completed no step, so it would die again"
        number = self._budget.take(step)
        return number, f"new starts since step {step}: {self._budget.limit}, which is the limit"


def end_left_over(found: Iterable[ProcessFound], node: str, *, gone_s: float) -> list[int]:
    """Kill those processes on this node that have not ended after `gone_s`; returns their ids.

    Ctrl-C ends the wait, and the processes with it.
    """
    left: dict[int, psutil.Process] = {}
    for event in found:
        with contextlib.suppress(psutil.Error):
            if event.pid and event.node == node:
                process = psutil.Process(event.pid)
                if process.create_time() <= event.t:  # not another process that has got its id
                    left[event.pid] = process
    try:
        psutil.wait_procs(list(left.values()), timeout=gone_s)
    finally:
        alive = [process for process in left.values() if runs(process)]
        for process in alive:
            logger.warning("pid %d of the run that has ended is left over: it is killed", process.pid)
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                process.kill()
    psutil.wait_procs(alive, timeout=KILLED_S)
    return [process.pid for process in alive]


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; a zombie has."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
