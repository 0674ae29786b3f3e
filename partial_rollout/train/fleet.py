"""The step brackets over all replicas: drain, resume, reject, statistics, shutdown; every one bounded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from verl.utils.ray_utils import auto_await

from partial_rollout.errors import PartialRolloutError, WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Sequence

    from partial_rollout.rollout.replica import PartialRolloutReplica
    from partial_rollout.rollout.statistics import RolloutStatistics
    from partial_rollout.settings.block import TimeoutConfig


class ReplicaFleet:
    """All rollout replicas of a run, driven from the trainer's thread; a call returns when all have answered."""

    def __init__(self, replicas: Sequence[PartialRolloutReplica], timeouts: TimeoutConfig) -> None:
        self._replicas = replicas
        self._timeouts = timeouts

    def drain(self) -> int:
        """Close every gate and interrupt what is running; returns the number of interrupted requests.

        Raises:
            DrainTimeout: a server could not drain; names its requests.
            WaitTimeout: a server did not answer at all.
        """
        margin_s = self._timeouts.call_s
        calls = [replica.abort_all_requests() for replica in self._replicas]
        results = self._all("drain", calls, self._timeouts.drain_s + margin_s)
        return sum(result["aborted_count"] for result in results)

    def resume(self) -> None:
        """Open every gate."""
        self._all("resume", [r.resume_generation() for r in self._replicas], self._timeouts.resume_s)

    def require_health(self) -> None:
        """Raise EngineDead if an engine is gone: between drain and resume it holds no request that would tell."""
        self._all("tell their health", [r.check_health() for r in self._replicas], self._timeouts.call_s)

    def failed_updates(self) -> dict[int, str]:
        """Replicas whose last weight update failed, by rank, and why."""
        failures = self._all(
            "tell of their weights", [r.weights_failure() for r in self._replicas], self._timeouts.call_s
        )
        ranks = [replica.replica_rank for replica in self._replicas]
        return {rank: failure for rank, failure in zip(ranks, failures, strict=True) if failure is not None}

    def relaunch(self, ranks: Collection[int]) -> None:
        """Start the engines of these replicas again; they must be sent weights before they generate.

        Raises:
            EngineDead: an engine cannot be relaunched; says why, and why it should be.
            WaitTimeout: an engine was not up in time.
        """
        calls = [replica.relaunch() for replica in self._replicas if replica.replica_rank in ranks]
        self._all("relaunch their engines", calls, self._timeouts.resume_s + self._timeouts.call_s)

    def reject_parked(self) -> None:
        """Send every parked request back as rejected."""
        self._all("reject parked requests", [r.reject_parked() for r in self._replicas], self._timeouts.call_s)

    def shutdown(self) -> None:
        """Stop every engine and server."""
        self._all("shut down", [r.shutdown() for r in self._replicas], self._timeouts.call_s)

    def statistics(self) -> list[RolloutStatistics]:
        """One entry for each server."""
        answers = self._all("report", [r.statistics() for r in self._replicas], self._timeouts.call_s)
        return [each for replica in answers for each in replica]

    def statistics_metrics(self, num_slots: int) -> dict[str, float]:
        """Engine metrics since the gates opened; utilisation is mean running requests over `num_slots`."""
        running = sum(each.mean_running for each in self.statistics())
        return {
            "partial_rollout/mean_running": running,
            "partial_rollout/slot_utilisation": running / num_slots,
        }

    def _all(self, what: str, calls: Sequence[Awaitable[Any]], timeout_s: float) -> list[Any]:
        """Block for all results; `auto_await` makes a loop, in a thread of its own where one is running already."""
        return cast("list[Any]", auto_await(lambda: self._gather(what, calls, timeout_s))())

    async def _gather(self, what: str, calls: Sequence[Awaitable[Any]], timeout_s: float) -> list[Any]:
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), timeout_s)
        except asyncio.TimeoutError as error:  # noqa: UP041 - not the built-in one on Python 3.10
            if isinstance(error, PartialRolloutError):
                raise  # a replica's own error, which names its requests, is a TimeoutError too
            raise WaitTimeout(
                f"trainer waited {timeout_s:.0f} s for {len(self._replicas)} rollout replicas to {what}"
            ) from None
