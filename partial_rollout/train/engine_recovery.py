"""Engines that die while they generate are relaunched, and whoever waits for their tokens goes on waiting."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayActorError

from partial_rollout.errors import EnginesLost
from partial_rollout.train.restarts import MAX_RESTARTS_A_STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from partial_rollout.train.fleet import ReplicaFleet

logger = logging.getLogger(__name__)


class EngineRecovery:
    """Listens for the deaths of engines, for a thread that waits for tokens.

    an engine dies: its requests hand over what they have, and wait
        ──> all gates close ──> the dead engines are relaunched ──> all engines get the weights of before ──> gates open

    All engines are interrupted for it, as at the end of a step, because training ranks send weights to all of them.
    An engine that dies between a drain and the next weight update is relaunched by that update.
    """

    def __init__(
        self, fleet: ReplicaFleet, bring_back: Callable[[dict[int, str]], None], step: Callable[[], int]
    ) -> None:
        """`bring_back` relaunches engines, and returns when all engines generate again.

        It is given the ranks of their replicas, each with the reason.
        """
        self._fleet, self._bring_back, self._step = fleet, bring_back, step
        self._deaths = {rank: fleet.engine_death(rank) for rank in fleet.ranks}
        self._counts: Counter[int] = Counter()

    @property
    def deaths(self) -> list[ray.ObjectRef[str]]:
        """To be waited for beside anything else."""
        return list(self._deaths.values())

    def look(self, ready: Sequence[Any]) -> None:
        """Bring engines back if one of `ready` is a death.

        Raises:
            EnginesLost: so many engines died in this step that another relaunch would not help; names the last ones.
            Exception: what `bring_back` raised.
        """
        if not any(death in ready for death in self.deaths):
            return
        reasons, failed = self._dead(), self._fleet.failed_updates()
        # Without a failure a weight update has brought the engine back since it died.
        if failed:
            self._count(reasons)
            began_s = time.monotonic()
            self._bring_back(failed)
            logger.info("%d engines were started again within %.1f s", len(failed), time.monotonic() - began_s)
        for rank in self._dead():
            self._deaths[rank] = self._fleet.engine_death(rank)

    def _count(self, reasons: dict[int, str]) -> None:
        step = self._step()
        self._counts[step] += 1
        if self._counts[step] > MAX_RESTARTS_A_STEP:
            raise EnginesLost(f"engines died {self._counts[step]} times in step {step}; {'; '.join(reasons.values())}")
        for reason in reasons.values():
            logger.warning("%s. It is started again, and all engines get all weights", reason)

    def _dead(self) -> dict[int, str]:
        """Why engines have died, by the ranks of their replicas."""
        ready, _ = ray.wait(self.deaths, num_returns=len(self._deaths), timeout=0.0)
        reasons: dict[int, str] = {}
        for rank, death in list(self._deaths.items()):
            try:
                if death in ready:
                    reasons[rank] = cast("str", ray.get(death))
            except RayActorError:  # the server itself has died: whoever watches the actors ends the run
                del self._deaths[rank]
        return reasons
