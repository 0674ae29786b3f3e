"""One call to all rollout replicas at a time (drain, resume, statistics, ...), each with a deadline."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast

from verl.utils.ray_utils import auto_await

from partial_rollout.errors import EngineDead, EnginesLost, PartialRolloutError, WaitTimeout
from partial_rollout.runtime.bounded import Wait
from partial_rollout.runtime.processes import ENGINE_SERVER
from partial_rollout.runtime.remote_call import root_cause

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    import ray

    from partial_rollout.rollout.engine_process import RolloutStatistics
    from partial_rollout.rollout.replica import PartialRolloutReplica
    from partial_rollout.runtime.run_watch import RunWatch
    from partial_rollout.settings.block import TimeoutConfig


logger = logging.getLogger(__name__)
CANCEL_S = 1.0
"""A call to a replica that is cancelled ends at once."""


class ReplicaFleet:
    """All rollout replicas of a run, called from the trainer's thread; a method returns when all have answered."""

    def __init__(
        self, replicas: Sequence[PartialRolloutReplica], timeouts: TimeoutConfig, watch: RunWatch | None = None
    ) -> None:
        """`watch` replaces servers that have died or are silent; without it a silent one ends the call."""
        self._replicas = replicas
        self._timeouts = timeouts
        self._watch = watch

    def drain(self) -> int:
        """Close every gate and interrupt the running requests; returns how many were interrupted.

        Raises:
            DrainTimeout: requests were left in a server; names them.
            WaitTimeout: a server did not answer; names the replica.
        """
        margin_s = self._timeouts.call_s
        results = self._all("drain", lambda r: r.abort_all_requests(), self._timeouts.drain_s + margin_s)
        return sum(result["aborted_count"] for result in results)

    def sleep(self) -> None:
        """Let every engine release its memory, for training on the same devices."""
        asleep: set[int] = set()

        async def sleep(replica: PartialRolloutReplica) -> None:
            # Once: an engine may not release twice what it has released. One that was replaced has nothing yet.
            if replica.replica_rank not in asleep:
                await replica.sleep()
                asleep.add(replica.replica_rank)

        limit_s = self._timeouts.drain_s + self._timeouts.resume_s + self._timeouts.call_s
        self._all("release their memory", sleep, limit_s)

    def resume(self) -> None:
        """Open every gate."""
        self._all("resume", lambda r: r.resume_generation(), self._timeouts.resume_s)

    def require_health(self) -> None:
        """Raise EngineDead if an engine is gone. Between drain and resume no request would tell: engines hold none."""
        self._all("tell their health", lambda r: r.check_health(), self._timeouts.call_s)

    def failed_updates(self) -> dict[int, str]:
        """Why the last weight update failed, by the rank of each replica in which it did."""
        failures = self._all("tell of their weights", lambda r: r.weights_failure(), self._timeouts.call_s)
        return {rank: failure for rank, failure in zip(self.ranks, failures, strict=True) if failure is not None}

    def relaunch(self, failed: Mapping[int, str]) -> None:
        """Start the engines of these replicas again; they need new weights before they generate.

        `failed` has the reasons by the ranks of the replicas.

        Raises:
            EnginesLost: an engine did not start again, or not in time; names the replicas, and why they had to.
        """
        asked = [replica for replica in self._replicas if replica.replica_rank in failed]
        limit_s = self._timeouts.resume_s + self._timeouts.call_s
        try:
            self._ask_all("relaunch their engines", lambda r: r.relaunch(), limit_s, asked)
        except (EngineDead, WaitTimeout) as error:
            reasons = "; ".join(f"{_name(replica)}: {failed[replica.replica_rank]}" for replica in asked)
            raise EnginesLost(
                f"engines were not started again ({root_cause(error)}), which had to be: {reasons}"
            ) from error

    @property
    def ranks(self) -> list[int]:
        """Ranks of all replicas."""
        return [replica.replica_rank for replica in self._replicas]

    def engine_death(self, rank: int) -> ray.ObjectRef[str]:
        """Ready when the engine of this replica has died and waits to be relaunched; says why."""
        (replica,) = (each for each in self._replicas if each.replica_rank == rank)
        return replica.engine_death()

    def reject_parked(self) -> None:
        """Turn away every request that waits at a gate."""
        self._all("reject parked requests", lambda r: r.reject_parked(), self._timeouts.call_s)

    def shutdown(self) -> None:
        """Stop every engine and server."""
        self._ask_all("shut down", lambda r: r.shutdown(), self._timeouts.call_s)

    def statistics(self) -> list[RolloutStatistics]:
        """The statistics of each server."""
        answers = self._all("report", lambda r: r.statistics(), self._timeouts.call_s)
        return [each for replica in answers for each in replica]

    def _all(self, what: str, call: Callable[[PartialRolloutReplica], Awaitable[Any]], timeout_s: float) -> list[Any]:
        """Block for the answers of all replicas, in their order.

        Where a server that did not answer in time was replaced, all are asked again, so `call` may be made more often.
        """
        # Once for each: one that dies while another one is silent is replaced first, and then the silent one.
        for _ in self._replicas:
            before = self._watch.num_replaced(ENGINE_SERVER) if self._watch else 0
            try:
                return self._ask_all(what, call, timeout_s)
            except WaitTimeout as error:
                claim_s = self._timeouts.claim_s
                if self._watch is None or not self._watch.has_replaced(ENGINE_SERVER, error, before, claim_s):
                    raise
                logger.warning("%s; it was replaced, and all are asked again", error)
        return self._ask_all(what, call, timeout_s)

    def _ask_all(
        self,
        what: str,
        call: Callable[[PartialRolloutReplica], Awaitable[Any]],
        timeout_s: float,
        replicas: Sequence[PartialRolloutReplica] | None = None,
    ) -> list[Any]:
        asked = self._replicas if replicas is None else replicas

        async def gathered() -> list[Any]:
            return await _gather(what, [(replica, call(replica)) for replica in asked], timeout_s)

        # `auto_await` makes an event loop, in a thread of its own where one is running already.
        return cast("list[Any]", auto_await(gathered)())


async def _gather(
    what: str, calls: Sequence[tuple[PartialRolloutReplica, Awaitable[Any]]], timeout_s: float
) -> list[Any]:
    answers = [asyncio.ensure_future(call) for _, call in calls]
    waiting = Wait(f"trainer waits for {len(calls)} rollout replicas to {what}", timeout_s)
    # asyncio.wait_for would not tell its own timeout from a replica's error, which may be a TimeoutError too.
    # After an error the others go on: a call that is cut off half way would be made twice where all are asked again.
    together = asyncio.gather(*answers, return_exceptions=True)
    while not (await asyncio.wait([together], timeout=waiting.step_s()))[0]:
        late = ", ".join(_name(replica) for (replica, _), each in zip(calls, answers, strict=True) if not each.done())
        if waiting.is_over:
            together.cancel()
            await asyncio.wait([together], timeout=CANCEL_S)
            raise WaitTimeout(
                f"trainer waited {timeout_s:g} s for {len(calls)} rollout replicas to {what}; no answer from {late}"
            )
        waiting.look(late)
    failed = [
        (replica, error) for (replica, _), each in zip(calls, answers, strict=True) if (error := each.exception())
    ]
    if failed:
        raise _of_all(failed)
    return [answer.result() for answer in answers]


def _of_all(failed: Sequence[tuple[PartialRolloutReplica, BaseException]]) -> BaseException:
    """The failure of the first replica; where others have failed too, an error of the same type that names each."""
    error, first = failed[0][1], root_cause(failed[0][1])
    if len(failed) == 1:
        return error
    told = "; ".join(f"{_name(replica)}: {root_cause(each)}" for replica, each in failed)
    if not isinstance(first, PartialRolloutError):  # an error of another package is not made again
        logger.error("%s", told)
        return error
    named = type(first)(told)
    named.__cause__ = error
    return named


def _name(replica: PartialRolloutReplica) -> str:
    return f"replica {replica.replica_rank} at {replica.server_address}"
