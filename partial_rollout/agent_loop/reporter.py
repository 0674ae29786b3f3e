"""What a worker tells the manager, in as few calls as the load allows."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from partial_rollout.types import Claim, TrajectorySummary, WorkerStatus

logger = logging.getLogger(__name__)


class Manager(Protocol):
    """The part of the prompt manager a worker reports to."""

    async def finish_many(self, groups: Sequence[tuple[Claim, Sequence[TrajectorySummary]]]) -> list[str]:
        """Several finished groups; returns uids refused because their claim had ended."""
        ...

    async def report_worker(self, worker_id: str, status: WorkerStatus) -> None:
        """Slots of a worker."""
        ...


class Reporter:
    """Sends finished groups and the worker's status; one call at a time, whatever came meanwhile goes with the next.

    finish / changed -> outbox -> run() -> manager

    Under light load every group is its own call; under heavy load they coalesce by themselves, with no timer.
    """

    def __init__(
        self,
        manager: Manager,
        worker_id: str,
        status: Callable[[], WorkerStatus],
        acknowledged: Callable[[Claim], None],
    ) -> None:
        """`acknowledged` is called with each claim whose group the manager has taken in or refused."""
        self._acknowledged = acknowledged
        self._manager = manager
        self._worker_id = worker_id
        self._status = status
        self._finished: list[tuple[Claim, Sequence[TrajectorySummary]]] = []
        self._news = asyncio.Event()

    def finish(self, claim: Claim, trajectories: Sequence[TrajectorySummary]) -> None:
        """Queue a finished group."""
        self._finished.append((claim, trajectories))
        self._news.set()

    def changed(self) -> None:
        """The worker's status is not what was last reported."""
        self._news.set()

    async def run(self) -> None:
        """Send for ever; raises what a call to the manager raises."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self._send()

    async def _send(self) -> None:
        finished, self._finished = self._finished, []
        if finished:
            stale = await self._manager.finish_many(finished)
            if stale:
                logger.warning("worker %s finished prompts that are no longer its own: %s", self._worker_id, stale)
            for claim, _ in finished:
                self._acknowledged(claim)
        await self._manager.report_worker(self._worker_id, self._status())
