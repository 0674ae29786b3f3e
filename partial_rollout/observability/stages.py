"""The parts of a run's start, in their order. The driver and the task runner say when each of them begins."""

from __future__ import annotations

import logging

from partial_rollout.observability.events import StageBegan

logger = logging.getLogger(__name__)

CONFIGURATION = "configuration"
RAY = "Ray"
TRAINING = "training workers and model"
ENGINES = "engines"
FIRST_STEP = "first step"
STAGES = (CONFIGURATION, RAY, TRAINING, ENGINES, FIRST_STEP)


def begin(stage: str, at_s: float = 0.0) -> None:
    """Say in log and event stream that a part begins, at `at_s` seconds since 1970; 0: now.

    A part that is begun twice counts once: readers pass over a part that is not after the last one.
    """
    number = STAGES.index(stage) + 1
    event = StageBegan(t=at_s, number=number, total=len(STAGES), name=stage)
    logger.info("[%d/%d] %s", number, len(STAGES), stage, extra={"event": event})
