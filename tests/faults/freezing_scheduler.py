"""A scheduler with which an engine core stops itself, each time in the moment in which it is asked for something else.

What is asked of a core behind a closed gate ends within milliseconds, so nobody can strike it there from outside. A job
asks for this class by vLLM's argument `scheduler_cls`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState

from partial_rollout.observability.events import BatchTaken, EventReader
from tests.faults.freezes_in import FREEZES, frozen

OPEN = PauseState.UNPAUSED


class FreezingScheduler(AsyncScheduler):
    """Stops its process once for each entry of `FREEZES`; an engine that follows finds the mark of the one before."""

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Called for each of these, by what the engine core is asked to do: a core that sleeps was paused before."""
        asked = {
            (True, False): "pause",
            (False, False): "release its memory",
            (False, True): "take its memory back",
            (True, True): "go on",
        }[self.pause_state is OPEN, pause_state is OPEN]
        folder = Path(os.environ["VERL_FILE_LOGGER_PATH"]).parent
        taken = [event.step for event in EventReader(folder / "events").read() if isinstance(event, BatchTaken)]
        mark = frozen(folder, asked)
        if taken and FREEZES[asked] == taken[-1] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        super().set_pause_state(pause_state)
