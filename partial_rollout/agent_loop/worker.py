"""Agent-loop worker that pulls prompts from the manager by trajectory slots.

Concurrency, all on the worker actor's event loop:

| task           | consumes               | produces                       | waits for       | unblocked by   |
|----------------|------------------------|--------------------------------|-----------------|----------------|
| claim loop     | free slots, claims     | one group task per claim       | slots, a claim  | a freed slot   |
| group (prompt) | prompt row             | finish / fail / drop           | trajectories    | their end      |
| trajectory     | engine tokens          | TransferQueue row, a free slot | generate, score | engine, resume |
| reporter       | finished groups        | finish_many, report_worker     | news            | finish, slots  |
| validation     | val rows (verl's path) | TransferQueue rows in "val"    | trajectories    | their end      |

`run` ends only by `stop` or by an error, which the trainer sees because it waits on the call.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import transfer_queue as tq

from partial_rollout.agent_loop.reporter import RemoteManager, Reporter
from partial_rollout.agent_loop.rows import prompt_row, rollout_sampling_params
from partial_rollout.agent_loop.slots import SlotBudget
from partial_rollout.agent_loop.trace import RecordingClient, TrajectoryTrace, start_trace
from partial_rollout.errors import ClusterError, DataError, EngineError, InternalError, RunEnded
from partial_rollout.integrations.verl_compat import AgentLoopWorkerTQBase
from partial_rollout.runtime.prompt_manager import find_manager
from partial_rollout.runtime.supervisor import Supervisor
from partial_rollout.types import Claim, TrajectorySummary, WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDict

    from partial_rollout.config import PartialRolloutConfig

logger = logging.getLogger(__name__)

CLAIM_POLL_S = 30.0
"""Length of one long poll; a bound on how long a lost wake-up could matter, not a pace."""

_FATAL_ERRORS = (EngineError, ClusterError, InternalError)


class PartialRolloutAgentLoopWorker(AgentLoopWorkerTQBase):
    """verl's agent-loop worker plus a supervised claim loop; agent loops run inside unchanged."""

    def __init__(self, worker_id: str, settings: PartialRolloutConfig, num_slots: int, *args: Any) -> None:
        super().__init__(*args)
        self.llm_client = RecordingClient(self.llm_client)
        self._worker_id = worker_id
        self._settings = settings
        self._slots = SlotBudget(num_slots)
        self._manager = find_manager(settings.manager.name, settings.manager.namespace)
        self._reporter = Reporter(RemoteManager(self._manager), worker_id, self._status)
        self._claiming: asyncio.Task[None] | None = None
        self._supervisor: Supervisor | None = None

    async def ping(self) -> str:
        """Answer once the constructor has succeeded."""
        return self._worker_id

    async def run(self) -> None:
        """Claim and generate until `stop`.

        Raises:
            EngineError, ClusterError, InternalError: whatever a group could not answer for by itself.
        """
        self._supervisor = supervisor = Supervisor()
        supervisor.spawn(self._reporter.run(), name="reporter")
        self._claiming = asyncio.create_task(supervisor.guard(self._claim_loop(supervisor)), name="claim-loop")
        try:
            await self._claiming
        except asyncio.CancelledError:
            logger.info("worker %s stopped", self._worker_id)
        finally:
            await supervisor.cancel()

    async def stop(self) -> list[str]:
        """End `run`, cancel what is in flight and give its prompts back; returns their uids."""
        if self._claiming is not None:
            self._claiming.cancel()
            await asyncio.wait({self._claiming})
        if self._supervisor is not None:
            await self._supervisor.cancel()
        return await self._manager.release_worker.remote(self._worker_id)

    async def validate(self, batch: TensorDict) -> None:
        """Run verl's own validation path for `batch` and return when all of it is in TransferQueue."""
        await self.generate_sequences(batch)
        if self.background_tasks:
            await asyncio.wait(set(self.background_tasks))

    async def _claim_loop(self, supervisor: Supervisor) -> None:
        num_per_prompt = self.rollout_config.n
        while True:
            await self._slots.wait_free(num_per_prompt)
            claims = await self._manager.claim.remote(self._worker_id, self._slots.free, CLAIM_POLL_S)
            for claim in claims:
                self._slots.reserve(claim.num_trajectories)
                supervisor.spawn(self._run_group(claim), name=f"group-{claim.uid}")
            self._reporter.changed()

    def _status(self) -> WorkerStatus:
        return WorkerStatus(
            inflight_trajectories=self._slots.in_use,
            slot_budget=self._slots.budget,
            requests_in_flight=self.llm_client.num_in_flight,
        )

    async def _run_group(self, claim: Claim) -> None:
        """One prompt: all its trajectories, then exactly one report to the manager."""
        try:
            row = await self._read_row(claim)
        except DataError as error:
            await self._slots.release(claim.num_trajectories)
            await self._drop(claim, error)
            return
        outcomes = await asyncio.gather(
            *(self._run_trajectory(claim, row, session) for session in range(claim.num_trajectories)),
            return_exceptions=True,
        )
        await self._report(claim, outcomes)

    async def _report(self, claim: Claim, outcomes: Sequence[list[TrajectorySummary] | BaseException]) -> None:
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        fatal = next((error for error in errors if isinstance(error, _FATAL_ERRORS)), None)
        if fatal is not None:
            raise fatal
        summaries = [summary for outcome in outcomes if isinstance(outcome, list) for summary in outcome]
        if not errors:
            self._reporter.finish(claim, summaries)
        elif any(isinstance(error, RunEnded) for error in errors):
            await self._manager.give_back.remote(claim)
        else:
            await self._give_up(claim, errors[0], [summary.key for summary in summaries])

    async def _give_up(self, claim: Claim, error: BaseException, written: list[str]) -> None:
        """Forget the siblings' trajectories first: once the claim is given back, another worker writes these keys."""
        if written:
            await tq.async_kv_clear(keys=written, partition_id="train")
        if isinstance(error, DataError):
            await self._drop(claim, error)
            return
        logger.error("attempt %d of prompt %s failed", claim.attempt, claim.uid, exc_info=error)
        if not await self._manager.fail.remote(claim, f"{type(error).__name__}: {error}"):
            await tq.async_kv_clear(keys=[claim.uid], partition_id="train")

    async def _drop(self, claim: Claim, error: DataError) -> None:
        logger.warning("prompt %s dropped: %s", claim.uid, error)
        await self._manager.drop.remote(claim, error.reason)
        await tq.async_kv_clear(keys=[claim.uid], partition_id="train")

    async def _read_row(self, claim: Claim) -> dict[str, Any]:
        batch = await tq.async_kv_batch_get(keys=[claim.uid], partition_id="train")
        row = prompt_row(batch)
        row.setdefault("agent_name", self.rollout_config.agent.default_agent_loop)
        row["uid"], row["global_steps"] = claim.uid, claim.global_step
        row.pop("__rollout_n__", None)
        self._check_length(row)
        return row

    def _check_length(self, row: dict[str, Any]) -> None:
        """Refuse a prompt that verl would cut silently from the left."""
        limit = self.rollout_config.prompt_length
        token_ids = self.tokenizer.apply_chat_template(
            list(row["raw_prompt"]), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if len(token_ids) > limit:
            raise DataError(
                f"prompt of {len(token_ids)} tokens is longer than data.max_prompt_length={limit}",
                reason="prompt_too_long",
            )

    async def _run_trajectory(self, claim: Claim, row: dict[str, Any], session: int) -> list[TrajectorySummary]:
        trace = start_trace()
        try:
            outputs = await self._run_agent_loop(
                rollout_sampling_params(self.rollout_config),
                {"step": claim.global_step, "sample_index": row["index"], "rollout_n": session, "validate": False},
                trace=False,
                session_id=session,
                **row,
            )
            if not outputs:
                raise DataError(f"agent loop of prompt {claim.uid} returned no trajectory", reason="empty_trajectory")
            return [_summary(f"{claim.uid}_{session}_{index}", output, trace) for index, output in enumerate(outputs)]
        finally:
            await self._slots.release()
            self._reporter.changed()

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> list[Any]:
        """Score and store as verl does, and hand the outputs back to `_run_trajectory`."""
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        return output if isinstance(output, list) else [output]


def _summary(key: str, output: Any, trace: TrajectoryTrace) -> TrajectorySummary:
    extra = output.extra_fields
    versions = [span.version for span in trace.spans] or [extra["min_global_steps"], extra["max_global_steps"]]
    return TrajectorySummary(
        key=key,
        prompt_len=len(output.prompt_ids),
        response_len=len(output.response_ids),
        min_version=min(versions),
        max_version=max(versions),
        num_interruptions=trace.num_interruptions,
        num_reprefilled_tokens=trace.num_reprefilled_tokens,
        version_spans=tuple(trace.spans),
    )
