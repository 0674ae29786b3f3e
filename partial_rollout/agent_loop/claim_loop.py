"""A worker's claim loop: it claims prompts while slots are free, runs them, and reports each exactly once.

It knows neither Ray nor verl. All its tasks run on the event loop of the worker actor:

| task           | consumes               | produces                       | waits for       | unblocked by   |
|----------------|------------------------|--------------------------------|-----------------|----------------|
| claim loop     | free slots, claims     | one group task per claim       | slots, a claim  | a freed slot   |
| group (prompt) | prompt row             | finish / fail / drop           | trajectories    | their end      |
| trajectory     | engine tokens          | TransferQueue row, a free slot | generate, score | engine, resume |
| reporter       | finished groups        | finish_many, report_worker     | news            | finish, slots  |

`run` ends only by `stop` or by an error, which the trainer sees because it waits on the call.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from partial_rollout.agent_loop.slots import Holds, SlotBudget
from partial_rollout.core.queue.ledger import AGENT_LOOP_FAILED, NO_SPREAD, TOO_STALE
from partial_rollout.core.queue.spread import shared_metric
from partial_rollout.errors import (
    ClusterError,
    ConfigError,
    DataError,
    DrainTimeout,
    EngineDead,
    InternalError,
    ResumeStalled,
    RunEnded,
    TooStale,
)
from partial_rollout.runtime.supervisor import Supervisor
from partial_rollout.types import Claim, TrajectorySummary, WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from partial_rollout.agent_loop.store import RowStore
    from partial_rollout.agent_loop.worker import PartialRolloutAgentLoopWorker
    from partial_rollout.runtime.prompt_manager import RolloutPromptManager

logger = logging.getLogger(__name__)

CLAIM_POLL_S = 30.0
"""Length of one long poll. The manager answers as soon as there is a claim; this bounds the loss if it does not."""

FATAL_ERRORS = (EngineDead, DrainTimeout, ResumeStalled, ClusterError, InternalError, ConfigError)
"""Errors that another attempt would meet again. A bare EngineError is the failure of one request, and is retried."""
Finished = tuple[Claim, "Sequence[TrajectorySummary]"]
"""A claim whose trajectories are all complete."""


class Reporter:
    """Tells the manager of finished groups and of the worker's status, in as few calls as the load allows.

    finish / changed -> outbox -> run() -> manager

    One call is under way at a time, and what comes meanwhile goes with the next one: under light load every group is a
    call of its own, under heavy load groups are sent together, without a timer.
    """

    def __init__(
        self,
        manager: RolloutPromptManager,
        worker_id: str,
        status: Callable[[], WorkerStatus],
        acknowledged: Callable[[Claim], None],
        discard: Callable[[Sequence[Finished]], Awaitable[None]],
    ) -> None:
        """`acknowledged` is called with each claim whose group the manager has taken in, refused or dropped.

        `discard` is awaited with the groups that the manager has dropped because they have no spread.
        """
        self._acknowledged = acknowledged
        self._discard = discard
        self._manager = manager
        self._worker_id = worker_id
        self._status = status
        self._finished: list[Finished] = []
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
            # Cleared before sending, not after: news that come while the call is under way must not be lost.
            self._news.clear()
            await self._send()

    async def _send(self) -> None:
        # Swapped before the await: what finishes while the call is under way goes with the next one, and nothing twice.
        finished, self._finished = self._finished, []
        if finished:
            result = await self._manager.finish_many(finished)
            if result.stale:
                logger.warning(
                    "worker %s finished prompts whose claims had ended meanwhile: %s", self._worker_id, result.stale
                )
            # Only now: until the manager has the group, a checkpoint needs its tokens from here.
            for claim, _ in finished:
                self._acknowledged(claim)
            if result.no_spread:
                await self._discard([group for group in finished if group[0].uid in result.no_spread])
        await self._manager.report_worker(self._worker_id, self._status())


class ClaimLoop:
    """Claims, runs and reports prompts.

    slots free -> claim (slots charged) -> row -> trajectories (each frees its slot) --+-- all whole: finish, or
                                                                                       |   drop without spread
                                                                                       +-- DataError: drop
                                                                                       +-- run over: give back
                                                                                       +-- TooStale: expire
                                                                                       +-- fatal: `run` raises
                                                                                       +-- else: fail (retried)
    The trajectories of a claim that is held back wait without slots; they go on when the manager hands the claim out
    again.
    """

    def __init__(
        self,
        worker_id: str,
        manager: RolloutPromptManager,
        store: RowStore,
        *,
        worker: PartialRolloutAgentLoopWorker,
        num_slots: int,
    ) -> None:
        """Create it where `run` will be awaited: in the event loop's thread. `worker` generates the trajectories."""
        self.slots = SlotBudget(num_slots)
        self._worker_id = worker_id
        self._manager = manager
        self._store = store
        self._worker = worker
        self._reporter = Reporter(manager, worker_id, self._status, worker.forget, self._discard)
        self.holds = Holds(self.slots, self._reporter.changed)
        self._claiming: asyncio.Task[None] | None = None
        self._supervisor: Supervisor | None = None
        self._stopping = False

    async def run(self, num_per_prompt: int) -> None:
        """Claim and generate until `stop`. The manager is asked for claims when `num_per_prompt` slots are free.

        Raises:
            EngineError, ClusterError, InternalError, ConfigError: an error that every further prompt would meet.
        """
        self._supervisor = supervisor = Supervisor()
        self._stopping = False
        supervisor.spawn(self._reporter.run(), name="reporter")
        claiming = self._claim_for_ever(supervisor, num_per_prompt)
        self._claiming = asyncio.create_task(supervisor.guard(claiming), name="claim-loop")
        try:
            await self._claiming
        except asyncio.CancelledError:
            # A cancellation that `stop` did not ask for must end the run visibly.
            if not self._stopping:
                raise
            logger.info("worker %s stopped", self._worker_id)
        finally:
            await supervisor.cancel()

    async def stop(self) -> list[str]:
        """End `run`, cancel what is in flight and give its prompts back; returns their uids."""
        self._stopping = True
        if self._claiming is not None:
            # The claim loop first: after the groups were cancelled it could claim once more, for a worker that is gone.
            self._claiming.cancel()
            await asyncio.wait({self._claiming})
        if self._supervisor is not None:
            await self._supervisor.cancel()
        # Last: only when no task of this worker can report any more may its prompts be given to others.
        return list((await self._manager.release_worker(self._worker_id)).given_back)

    def hold(self, claims: Sequence[Claim]) -> None:
        """Hold back the trajectories of this worker's claims among `claims`, from their next request on."""
        self.holds.hold(claim.claim_id for claim in claims if claim.worker_id == self._worker_id)

    async def _claim_for_ever(self, supervisor: Supervisor, num_per_prompt: int) -> None:
        while True:
            # A claim charges all slots of a prompt at once: groups that had some of their slots could wait for the
            # rest of them for ever, each for those of the others.
            await self.slots.wait_free(num_per_prompt)
            claims = await self._manager.claim(self._worker_id, self.slots.free, timeout_s=CLAIM_POLL_S)
            for claim in claims:
                # A claim that is not new goes on: its tasks wait in `holds`.
                if self.holds.begin(claim.claim_id):
                    self.slots.reserve(claim.num_trajectories)
                    supervisor.spawn(self._run_group(supervisor, claim), name=f"group-{claim.uid}")
            self._reporter.changed()

    def _status(self) -> WorkerStatus:
        return WorkerStatus(
            inflight_trajectories=self.slots.in_use,
            slot_budget=self.slots.budget,
            # A trajectory that is held back waits inside its generate call.
            requests_in_flight=self._worker.requests_in_flight - self.holds.num_waiting,
            held_trajectories=self.holds.num_waiting,
        )

    async def _run_group(self, supervisor: Supervisor, claim: Claim) -> None:
        """One prompt: all its trajectories, then exactly one report to the manager."""
        # Whatever the row's reading raises is an outcome of the prompt, as an error of a trajectory is.
        (row,) = await asyncio.gather(self._row(claim), return_exceptions=True)
        if isinstance(row, BaseException):
            await self.slots.release(claim.num_trajectories)
            await self._report(claim, [row])
            return
        outcomes = await asyncio.gather(
            *(self._run_trajectory(supervisor, claim, row, session) for session in range(claim.num_trajectories)),
            return_exceptions=True,
        )
        await self._report(claim, outcomes)

    async def _row(self, claim: Claim) -> dict[str, Any]:
        return self._worker.prepare(claim, await self._store.read_prompt(claim.uid))

    async def _run_trajectory(
        self, supervisor: Supervisor, claim: Claim, row: dict[str, Any], session: int
    ) -> list[TrajectorySummary]:
        try:
            return await self._worker.generate(claim, row, session)
        except FATAL_ERRORS as error:
            # At once: the trajectory's siblings may run for long, or be held back over rounds.
            supervisor.fail(error)
            raise
        finally:
            await self.slots.release()
            self._reporter.changed()

    async def _report(self, claim: Claim, outcomes: Sequence[list[TrajectorySummary] | BaseException]) -> None:
        # Before anything that awaits: a hold that arrives during the report would be for a claim that runs nothing.
        self.holds.end(claim.claim_id)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        fatal = next((error for error in errors if isinstance(error, FATAL_ERRORS)), None)
        if fatal is not None:
            raise fatal
        summaries = [summary for outcome in outcomes if isinstance(outcome, list) for summary in outcome]
        if not errors:
            self._reporter.finish(claim, summaries)
            return
        run_ended = any(isinstance(error, RunEnded) for error in errors)
        (self._worker.forget if run_ended else self._worker.give_up)(claim)
        # The rows go before the claim is given back: from then on another worker may write under these keys.
        await self._store.clear([summary.key for summary in summaries])
        # RunEnded wins over the other errors of a group: at the end of a run these say nothing of the prompt, and the
        # attempt must not be charged.
        if run_ended:
            await self._manager.give_back(claim)
        elif any(isinstance(error, TooStale) for error in errors):
            await self._expire(claim)
        else:
            await self._give_up(claim, errors)

    async def _expire(self, claim: Claim) -> None:
        restarted = await self._manager.expire(claim)
        logger.info(
            "tokens of %s are past the staleness bound: the prompt is %s",
            claim.prompt_name,
            "restarted" if restarted else "dropped",
        )
        if not restarted:
            self._worker.note_dropped(claim, TOO_STALE)
            await self._store.clear([claim.uid])

    async def _give_up(self, claim: Claim, errors: Sequence[BaseException]) -> None:
        unusable = next((error for error in errors if isinstance(error, DataError)), None)
        if unusable is not None:
            await self._drop(claim, unusable)
            return
        error = errors[0]
        logger.error("attempt %d of %s failed", claim.attempt, claim.prompt_name, exc_info=error)
        if not await self._manager.fail(claim, f"{type(error).__name__}: {error}"):
            self._worker.note_dropped(claim, AGENT_LOOP_FAILED)
            await self._store.clear([claim.uid])

    async def _drop(self, claim: Claim, error: DataError) -> None:
        logger.warning("%s is dropped: %s", claim.prompt_name, error)
        await self._manager.drop(claim, error.reason)
        self._worker.note_dropped(claim, error.reason)
        await self._store.clear([claim.uid])

    async def _discard(self, groups: Sequence[Finished]) -> None:
        """The manager has dropped `groups`, whose trajectories are stored: all have the same metric."""
        for claim, trajectories in groups:
            self._worker.note_dropped(claim, NO_SPREAD, shared_metric(trajectories))
        keys = [key for claim, trajectories in groups for key in (claim.uid, *(each.key for each in trajectories))]
        await self._store.clear(keys)
