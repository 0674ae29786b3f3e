"""Changes the number of batches in flight where slots run idle; `core.depth` decides, the prompt queue is told here."""

from __future__ import annotations

import logging
import time
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from partial_rollout.core.depth import DepthController, StepLoad
from partial_rollout.core.slots import EngineLoad
from partial_rollout.settings.block import groups_in_flight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from partial_rollout.core.depth import DepthDecision
    from partial_rollout.rollout.engine_process import RolloutStatistics

logger = logging.getLogger(__name__)


class DepthTuner:
    """Called by the trainer: `begin` when a step's rollout begins, `begin_wait`, `look` when its batch is complete.

    Gates are still open when it looks.
    """

    def __init__(
        self,
        bounds: tuple[float, float],
        *,
        batch: int,
        set_capacity: Callable[[int], None],
        note: Callable[[DepthDecision], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bounds` are batches in flight, to start with and at most.

        `set_capacity` tells the prompt queue a number of prompts; `note` receives every change.
        """
        self._controller = DepthController(*bounds)
        self._batch = batch
        self._set_capacity, self._note = set_capacity, note
        self._num_preemptions = 0
        self._clock = clock
        self._wait_began_s = self._looked_s = clock()
        self.waited = 0.0
        """Share of the time between the two latest looks in which the trainer waited for its batch."""

    @property
    def depth(self) -> float:
        """Batches in flight, at present."""
        return self._controller.depth

    def begin(self, statistics: Sequence[RolloutStatistics]) -> None:
        """Count preemptions from here on: those of a validation say nothing of the prompts in flight."""
        self._num_preemptions = _sum(statistics).num_preemptions

    def begin_wait(self) -> None:
        """The trainer waits for its batch from now on."""
        self._wait_began_s = self._clock()

    def pass_over(self) -> None:
        """Begin the time of the next step here: this batch was replayed, which says nothing."""
        self._looked_s = self._clock()

    def look(
        self,
        statistics: Sequence[RolloutStatistics],
        *,
        taken: float,
        pending: int,
        is_kv_full: bool | None = None,
    ) -> None:
        """Tell the queue another capacity if there is a reason.

        `statistics` are the servers' while their gates are still open, `taken` the share of the slots at the start that
        trajectories took, and `pending` the prompts that wait. `is_kv_full` is as in `StepLoad`; None where the number
        of slots is fixed, so that `statistics` say it.

        Raises:
            WaitTimeout: the prompt manager did not answer.
        """
        load = _sum(statistics)
        # The count of an engine that was started again begins at 0.
        preempted = max(0, load.num_preemptions - self._num_preemptions)
        self._num_preemptions = load.num_preemptions
        if is_kv_full is None:
            is_kv_full = load.is_full(preempted)
        now_s = self._clock()
        passed_s = now_s - self._looked_s
        self.waited = (now_s - self._wait_began_s) / passed_s if passed_s else 1.0
        self._looked_s = now_s
        decision = self._controller.observe(StepLoad(taken, pending, is_kv_full, self.waited))
        if decision.after != decision.before:
            logger.info("batches in flight %g -> %g: %s", decision.before, decision.after, decision.reason)
            self._set_capacity(groups_in_flight(decision.after, self._batch))
            self._note(decision)


def _sum(statistics: Sequence[RolloutStatistics]) -> EngineLoad:
    return reduce(add, (each.load for each in statistics), EngineLoad())
