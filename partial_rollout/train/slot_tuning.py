"""Changes the number of trajectory slots with the engines' load; `core.slots` decides, the workers are told here."""

from __future__ import annotations

import logging
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from partial_rollout.core.slots import EngineLoad, SlotController

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from partial_rollout.agent_loop.manager import PartialRolloutAgentLoopManager
    from partial_rollout.core.slots import SlotBounds, SlotDecision
    from partial_rollout.rollout.engine_process import RolloutStatistics
    from partial_rollout.train.fleet import ReplicaFleet

logger = logging.getLogger(__name__)


class SlotTuner:
    """The trainer calls `look` at intervals while it waits for a batch and when it has one, `metrics` once a step."""

    def __init__(
        self,
        num_slots: int,
        bounds: SlotBounds,
        *,
        fleet: ReplicaFleet,
        agent_loops: PartialRolloutAgentLoopManager,
        slots_in_use: Callable[[], int],
        note: Callable[[SlotDecision], None],
    ) -> None:
        """`slots_in_use` returns the number of running trajectories; `note` receives every change of the budget."""
        self._controller = SlotController(num_slots, bounds)
        self._fleet = fleet
        self._agent_loops = agent_loops
        self._slots_in_use = slots_in_use
        self._note = note
        self._highest = EngineLoad()
        self._num_raised = self._num_lowered = self._num_preemptions = 0

    @property
    def num_slots(self) -> int:
        """Slots of all workers together, at present."""
        return self._controller.budget

    @property
    def kv_usage_max(self) -> float:
        """The highest usage of a KV cache since the last call of `metrics`."""
        return self._highest.kv_usage

    @property
    def was_full_with_few(self) -> bool:
        """Whether in this step the KV cache was full, or requests were preempted, with half of the first slots."""
        return self._controller.was_full_with_few

    def begin(self, statistics: Sequence[RolloutStatistics]) -> None:
        """A step's rollout begins: a validation may have come before it."""
        load = _sum(statistics)
        self._controller.begin(load)
        self._num_preemptions = load.num_preemptions

    def look(self) -> None:
        """Ask the engines for their load, and give the workers more or fewer slots if there is a reason.

        Raises:
            WaitTimeout: a server, the prompt manager or a worker did not answer.
        """
        statistics = self._fleet.statistics()
        load = _sum(statistics)
        decision = self._controller.observe(load, self._slots_in_use(), [each.speed for each in statistics])
        self._remember(load)
        if decision.change:
            logger.info("slots %d -> %d: %s", decision.before, decision.after, decision.reason)
            self._agent_loops.resize(decision.after)
            self._note(decision)
            self._num_raised += decision.change > 0
            self._num_lowered += decision.change < 0

    def metrics(self) -> dict[str, float]:
        """The number of slots, its changes and the highest load since the last call."""
        highest, preemptions = self._highest, self._highest.num_preemptions - self._num_preemptions
        values = {
            "num": self.num_slots,
            "raised": self._num_raised,
            "lowered": self._num_lowered,
            "kv_usage_max": highest.kv_usage,
            "waiting_max": highest.waiting,
            "preemptions": max(0, preemptions),
        }
        self._num_raised = self._num_lowered = 0
        self._highest, self._num_preemptions = EngineLoad(), highest.num_preemptions
        return {f"partial_rollout/slots/{name}": float(value) for name, value in values.items()}

    def _remember(self, load: EngineLoad) -> None:
        highest = self._highest
        self._highest = EngineLoad(
            max(highest.running, load.running),
            max(highest.waiting, load.waiting),
            max(highest.kv_usage, load.kv_usage),
            load.num_preemptions,
            load.num_tokens,
        )


def _sum(statistics: Sequence[RolloutStatistics]) -> EngineLoad:
    return reduce(add, (each.load for each in statistics), EngineLoad())
