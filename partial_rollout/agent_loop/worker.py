"""Agent-loop worker: verl's actor, generating the prompts that its claim loop pulls from the manager.

The tasks of the claim loop are described in claim_loop.py. Beside them runs validation, verl's own path: it consumes
the rows handed to `validate`, produces rows in TransferQueue's partition "val", and ends with its last trajectory.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import transfer_queue as tq

from partial_rollout.agent_loop.claim_loop import ClaimLoop, RemoteManager
from partial_rollout.agent_loop.journal import Journals, Saved
from partial_rollout.agent_loop.rows import active_tool_schemas, rollout_sampling_params
from partial_rollout.agent_loop.store import TransferQueueStore
from partial_rollout.agent_loop.trace import RecordingClient, TrajectoryTrace, start_trace
from partial_rollout.errors import DataError
from partial_rollout.integrations.verl_compat import AgentLoopWorkerTQBase
from partial_rollout.runtime.prompt_manager import find_manager
from partial_rollout.types import Claim, TrajectorySummary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDict

    from partial_rollout.rollout.client import ResumingLLMServerClient
    from partial_rollout.settings.block import PartialRolloutConfig


class PartialRolloutAgentLoopWorker(AgentLoopWorkerTQBase):
    """verl's agent-loop worker plus a supervised claim loop; agent loops run inside unchanged."""

    def __init__(self, worker_id: str, settings: PartialRolloutConfig, num_slots: int, *args: Any) -> None:
        super().__init__(*args)
        self._worker_id = worker_id
        manager = RemoteManager(find_manager(settings.manager.name), settings.timeouts.call_s)
        store = TransferQueueStore(tq, worker_id, settings.timeouts.call_s)
        self._claim_loop = ClaimLoop(worker_id, manager, store, trajectories=self, num_slots=num_slots)
        client = cast("ResumingLLMServerClient", self.llm_client)
        self._journals = Journals()
        client.before_segment, client.on_generation = self._before_segment, self._journals.record
        self.llm_client = RecordingClient(client)

    async def ping(self) -> str:
        """Answer once the constructor has succeeded."""
        return self._worker_id

    async def run(self) -> None:
        """Claim and generate until `stop`; raises as `ClaimLoop.run` does."""
        await self._claim_loop.run(num_per_prompt=self.rollout_config.n)

    async def stop(self) -> list[str]:
        """End `run`, cancel what is in flight and give its prompts back; returns their uids."""
        return await self._claim_loop.stop()

    async def hold(self, claims: Sequence[Claim], oldest_version: int | None) -> None:
        """Hold back trajectories of those `claims` that are this worker's, and end those with tokens that are older."""
        self._claim_loop.hold(claims)
        self._journals.oldest_version = oldest_version

    async def resize(self, num_slots: int) -> None:
        """Change the slot budget."""
        await self._claim_loop.slots.resize(num_slots)

    async def _before_segment(self) -> None:
        """A trajectory asks an engine for tokens: here it waits while it is held back, and ends if it is too old."""
        await self._claim_loop.holds.pass_by()
        self._journals.require_fresh()

    async def unclaimed(self) -> frozenset[str]:
        """Restored trajectories that have not started here."""
        return self._journals.unclaimed()

    async def journals(self, unclaimed: frozenset[str], *, with_unclaimed: bool) -> Saved:
        """Tokens of all trajectories whose groups have not ended, and `with_unclaimed` those of restored ones.

        Restored tokens of trajectories that are not in `unclaimed` are forgotten.
        """
        restored = self._journals.keep_unclaimed(unclaimed)
        return self._journals.states() | (restored if with_unclaimed else {})

    async def restore_journals(self, saved: Saved) -> None:
        """Let trajectories go on from the tokens of a checkpoint, except where routed experts would be missing."""
        if not self.rollout_config.enable_rollout_routing_replay:
            self._journals.restore(saved)

    async def validate(self, batch: TensorDict) -> None:
        """Run verl's own validation path for `batch` and return when all of it is in TransferQueue.

        Raises what a prompt's task raised: such a prompt never becomes terminal there, and verl would wait for it.
        """
        await self.generate_sequences(batch)
        if not self.background_tasks:
            return
        ended, _ = await asyncio.wait(set(self.background_tasks))
        error = next(filter(None, [task.exception() for task in ended]), None)
        if error is not None:
            raise error

    # ---- what the claim loop asks for -------------------------------------------------------------------------------

    @property
    def requests_in_flight(self) -> int:
        """Generate calls that have not returned."""
        return self.llm_client.num_in_flight

    def prepare(self, claim: Claim, row: dict[str, Any]) -> dict[str, Any]:
        """Arguments of verl's `_run_agent_loop`; raises DataError for a prompt that is too long."""
        row = {key: value for key, value in row.items() if key != "__rollout_n__"}
        row.setdefault("agent_name", self.rollout_config.agent.default_agent_loop)
        row["uid"], row["global_steps"] = claim.uid, claim.global_step
        self._check_length(row)
        return row

    def _check_length(self, row: dict[str, Any]) -> None:
        """Refuse a prompt that verl would cut silently from the left."""
        limit = self.rollout_config.prompt_length
        options = {
            **self.config.data.get("apply_chat_template_kwargs", {}),
            "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": False,
        }
        tools = active_tool_schemas(row, self.tools)
        token_ids = self.tokenizer.apply_chat_template(list(row["raw_prompt"]), tools=tools, **options)
        if len(token_ids) > limit:
            raise DataError(
                f"prompt of {len(token_ids)} tokens is longer than data.max_prompt_length={limit}",
                reason="prompt_too_long",
            )

    async def generate(self, claim: Claim, row: dict[str, Any], session: int) -> list[TrajectorySummary]:
        """One trajectory by verl's agent loop, scored and stored."""
        trace = start_trace()
        self._journals.start(claim, session)
        outputs: Any = await self._run_agent_loop(
            rollout_sampling_params(self.rollout_config),
            {"step": claim.global_step, "sample_index": row["index"], "rollout_n": session, "validate": False},
            trace=False,
            session_id=session,
            **row,
        )
        if not outputs:
            raise DataError(f"agent loop of prompt {claim.uid} returned no trajectory", reason="empty_trajectory")
        return summaries(f"{claim.uid}_{session}", outputs, trace)

    def forget(self, claim: Claim) -> None:
        """The claim has ended."""
        self._journals.forget(claim.claim_id)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> list[Any]:
        """Score and store as verl does, and hand the outputs back to `generate`."""
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        return output if isinstance(output, list) else [output]


def summaries(prefix: str, outputs: list[Any], trace: TrajectoryTrace) -> list[TrajectorySummary]:
    """One summary per output; the last one carries the trajectory's interruptions and spans, so that sums hold."""
    nothing, last = TrajectoryTrace(), len(outputs) - 1
    return [
        _summary(f"{prefix}_{index}", output, trace, trace if index == last else nothing)
        for index, output in enumerate(outputs)
    ]


def _summary(key: str, output: Any, whole: TrajectoryTrace, counted: TrajectoryTrace) -> TrajectorySummary:
    extra = output.extra_fields
    versions = [span.version for span in whole.spans] or [extra["min_global_steps"], extra["max_global_steps"]]
    return TrajectorySummary(
        key=key,
        prompt_len=len(output.prompt_ids),
        response_len=len(output.response_ids),
        min_version=min(versions),
        max_version=max(versions),
        num_interruptions=counted.num_interruptions,
        num_reprefilled_tokens=counted.num_reprefilled_tokens,
        version_spans=tuple(counted.spans),
        context_spans=tuple(counted.context_spans),
    )
