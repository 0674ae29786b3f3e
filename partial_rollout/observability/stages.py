"""The parts of a run's start, in their order. The driver and the task runner say when each of them begins."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from partial_rollout.errors import DataError
from partial_rollout.observability.events import EventReader, StageBegan

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

CONFIGURATION = "configuration"
RAY = "Ray"
TRAINING = "training workers and model"
ENGINES = "engines"
FIRST_STEP = "first step"
STAGES = (CONFIGURATION, RAY, TRAINING, ENGINES, FIRST_STEP)
_begun = [CONFIGURATION]
"""In this process; another process may have begun a later one."""


def begin(stage: str, at_s: float = 0.0) -> None:
    """Say in log and event stream that a part begins, at `at_s` seconds since 1970; 0: now.

    A part that is begun twice counts once: readers pass over a part that is not after the last one.
    """
    number = STAGES.index(stage) + 1
    _begun[:] = [stage]
    event = StageBegan(t=at_s, number=number, total=len(STAGES), name=stage)
    logger.info("[%d/%d] %s", number, len(STAGES), stage, extra={"event": event})


def latest() -> str:
    """The part that this process has begun last."""
    return _begun[-1]


def usual_seconds(folder: Path, *, before_s: float) -> dict[str, tuple[float, float]]:
    """How long each part took, at least and at most, in earlier starts of a run or of the runs beside it.

    `folder` is the run's event stream; a part counts if the next one began, and both before `before_s`.
    """
    parents = [folder, *folder.parent.parent.glob(f"*/{folder.name}")]
    took: dict[str, list[float]] = {}
    for each in dict.fromkeys(parents):
        events = []
        with suppress(DataError):  # of a later release
            events = EventReader(each, roles=("driver", "task_runner")).read()
        begun = [event for event in events if isinstance(event, StageBegan) and event.t < before_s]
        for stage, following in zip(begun, begun[1:], strict=False):
            if following.number == stage.number + 1:
                took.setdefault(stage.name, []).append(following.t - stage.t)
    return {name: (min(seconds), max(seconds)) for name, seconds in took.items()}
