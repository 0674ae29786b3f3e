"""Agent-loop worker: verl's actor, which generates the prompts that its claim loop claims from the manager.

The tasks of the claim loop are described in claim_loop.py. Validation takes verl's own path beside them: it consumes
the rows handed to `validate`, writes rows to TransferQueue's partition "val", and ends with its last trajectory.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.replay_buffer import FILTER_GROUPS_REWARD_METRIC as REWARD_METRIC

from partial_rollout.agent_loop.claim_loop import ClaimLoop
from partial_rollout.agent_loop.event_texts import EventTexts
from partial_rollout.agent_loop.limits import KEYS, PhaseLimits
from partial_rollout.agent_loop.rewards import RewardPool
from partial_rollout.agent_loop.rollout_log import WorkerLog
from partial_rollout.agent_loop.store import RowStore
from partial_rollout.agent_loop.trajectory import CURRENT, ENDED, Saved, Trajectories, Trajectory
from partial_rollout.errors import ConfigError, DataError, StaleClaim
from partial_rollout.integrations.verl_compat import AgentLoopWorkerTQBase
from partial_rollout.observability.events import (
    EventWriter,
    PhaseBegan,
    PromptDropped,
    RequestSent,
    SegmentEnded,
    TrajectoryEnded,
    events_folder,
)
from partial_rollout.observability.log import report_to
from partial_rollout.runtime.heartbeat import Pulse
from partial_rollout.runtime.prompt_manager import find_manager
from partial_rollout.runtime.remote_call import RemoteActor
from partial_rollout.runtime.run_watch import manager_limit_s
from partial_rollout.settings.derived import filter_metric
from partial_rollout.types import Claim, TrajectorySummary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tensordict import TensorDict

    from partial_rollout.agent_loop.log_reading import Left
    from partial_rollout.agent_loop.rollout_log import LogFolder, Replayed
    from partial_rollout.core.replay import Place
    from partial_rollout.core.resume import ResumableGeneration, Segment
    from partial_rollout.rollout.client import ResumingLLMServerClient
    from partial_rollout.runtime.prompt_manager import RolloutPromptManager
    from partial_rollout.settings.block import PartialRolloutConfig

TOOLLESS_AGENT = "single_turn_agent"
"""verl's agent loop that is given the tools and renders none."""


class PartialRolloutAgentLoopWorker(AgentLoopWorkerTQBase):
    """verl's agent-loop worker with a supervised claim loop; verl's agent loops run in it unchanged."""

    _filter_metric: str | None = None
    """`algorithm.filter_groups.metric`, if groups are filtered."""

    def __init__(self, worker_id: str, settings: PartialRolloutConfig, num_slots: int, *args: Any) -> None:
        super().__init__(*args)
        self._worker_id = worker_id
        handle, call_s = find_manager(), settings.timeouts.call_s
        manager = RemoteActor(handle, manager_limit_s(call_s), who_waits=f"{worker_id} waits for the prompt manager")
        self._claim_loop = ClaimLoop(
            worker_id,
            cast("RolloutPromptManager", manager),
            RowStore(tq, worker_id, call_s, self.rollout_config.agent.num_workers),
            worker=self,
            num_slots=num_slots,
        )
        self._pulse = Pulse(
            lambda count: handle.beat.remote(worker_id, count).future().result(call_s), settings.timeouts.claim_s
        )
        self._trajectories = Trajectories()
        self._log = WorkerLog(worker_id, call_s)
        self._limits = PhaseLimits({phase: getattr(settings.timeouts, key) for phase, key in KEYS.items()})
        self._filter_metric = filter_metric(self.config)
        self._rewards = RewardPool(self.reward_loop_worker_handles or (), wait_s=settings.timeouts.resume_s)
        if self.reward_loop_worker_handles:
            # verl draws one of its handles for each reward; with the pool as the only one, dead workers are replaced.
            self.reward_loop_worker_handles = [self._rewards]
        folder = events_folder(settings)
        self._events = EventWriter(folder, worker_id)
        self._texts = EventTexts(self.tokenizer, 0 if folder is None else settings.events_text)
        report_to(self._events)
        client = cast("ResumingLLMServerClient", self.llm_client)
        # One client serves all trajectories of this worker, so its hooks find theirs by CURRENT.
        client.before_segment, client.on_generation = self._before_segment, self._on_generation
        client.on_server, client.on_segment = self._on_server, self._on_segment
        client.stop_tokenizer = self.tokenizer
        self.llm_client = CountingClient(client, self._enter)

    async def ping(self) -> str:
        """Answer once the constructor has succeeded; from now on the manager hears whether the worker is alive."""
        self._pulse.begin()
        return self._worker_id

    async def run(self) -> None:
        """Claim and generate until `stop`; raises as `ClaimLoop.run` does."""
        await self._claim_loop.run(num_per_prompt=self.rollout_config.n)

    async def stop(self) -> list[str]:
        """End `run`, cancel what is in flight and give its prompts back; returns their uids."""
        return await self._claim_loop.stop()

    async def hold(self, claims: Sequence[Claim], oldest_version: int | None) -> None:
        """Hold back this worker's trajectories of `claims`, and end those with tokens older than `oldest_version`."""
        self._claim_loop.hold(claims)
        self._trajectories.oldest_version = oldest_version

    async def replace_reward_worker(self, number: int, worker: Any) -> None:
        """A reward worker has died, and was started again."""
        await self._rewards.replace(number, worker)

    async def resize(self, num_slots: int) -> None:
        """Change the slot budget."""
        await self._claim_loop.slots.resize(num_slots)

    async def _before_segment(self) -> None:
        """A trajectory asks an engine for tokens: here it waits while it is held back, and ends if it is too old."""
        # Validation runs verl's own path, so it has no trajectory here: nothing holds it back, and no token is too old.
        trajectory = CURRENT.get()
        if trajectory is not None:
            _refuse_late(trajectory)
            # Here an interruption is seen: its tokens have been added, and the response asks for more.
            self._log.write_interrupted(trajectory)
            holds, claim_id = self._claim_loop.holds, trajectory.claim.claim_id
            if holds.holds_back(claim_id):
                self._enter("held")
                await holds.pass_by(claim_id)
                self._enter("engine", again=True)
            self._trajectories.require_fresh(trajectory)

    def _on_generation(self, generation: ResumableGeneration) -> None:
        """An agent loop makes a generate call."""
        trajectory = CURRENT.get()
        if trajectory is not None:
            self._trajectories.record(trajectory, generation)

    def _on_server(self, server: str) -> None:
        """A trajectory's request goes to this engine now: a page shows it there before its end."""
        trajectory = CURRENT.get()
        if trajectory is not None:
            event = RequestSent(uid=trajectory.claim.uid, session=trajectory.session, server=server)
            self._events.write(event)

    def _on_segment(self, generation: ResumableGeneration, segment: Segment, server: str, seconds: float) -> None:
        """An engine has answered a trajectory's request, or given back what it has of the answer."""
        trajectory = CURRENT.get()
        if trajectory is None:
            return
        trajectory.engine_s += seconds
        text, text_tokens = self._texts.of_tokens(segment.token_ids)
        ended = SegmentEnded(
            uid=trajectory.claim.uid,
            session=trajectory.session,
            server=server,
            version=segment.version,
            seconds=seconds,
            prompt_tokens=generation.context_len,
            tokens=len(segment.token_ids),
            reused_tokens=segment.context.num_reused_tokens,
            reason=segment.stop_reason or "",
            text=text,
            text_tokens=text_tokens,
        )
        self._events.write(ended)

    def _enter(self, phase: str, *, again: bool = False) -> None:
        """The trajectory of the running task waits for something else than before; `again`: for the same response."""
        trajectory = CURRENT.get()
        if trajectory is None or not trajectory.enter(phase, time.monotonic()):
            return
        self._limits.enter(trajectory, phase)
        # A sign of life beside the turns of the event loop: an agent loop's own code may block those.
        self._pulse.goes_on()
        claim = trajectory.claim
        began = PhaseBegan(
            uid=claim.uid,
            session=trajectory.session,
            phase=phase,
            # A generate call is told here before `on_generation` lists it.
            response=len(trajectory.generations) + (phase == "engine" and not again),
            row=trajectory.row,
            attempt=claim.attempt,
            text=trajectory.prompt if phase == "agent" else "",
        )
        self._events.write(began)

    async def unclaimed(self) -> frozenset[str]:
        """Restored trajectories that have not started here."""
        return self._trajectories.unclaimed()

    async def keep_unclaimed(self, unclaimed: frozenset[str]) -> None:
        """Forget the restored tokens of trajectories that are not in `unclaimed`."""
        self._trajectories.keep_unclaimed(unclaimed)

    async def tokens_in_flight(self, unclaimed: frozenset[str]) -> Saved:
        """Tokens of all trajectories whose groups have not ended.

        Restored tokens of trajectories that are not in `unclaimed` are forgotten.
        """
        self._trajectories.keep_unclaimed(unclaimed)
        return self._trajectories.states()

    async def restore_tokens(self, saved: Saved) -> None:
        """Let trajectories go on from the tokens of a checkpoint or log, which hold no routed experts to replay."""
        if not self.rollout_config.enable_rollout_routing_replay:
            self._trajectories.restore(saved)

    async def go_back(self, keys: frozenset[str], before: Saved) -> None:
        """Let trajectories of `keys` go on from `before`, unless they have started here; without these, afresh."""
        self._trajectories.go_back(keys, before)

    async def begin_log(self, folder: LogFolder) -> None:
        """Write the log of rollouts into this folder from now on."""
        self._log.begin(folder, self._trajectories.records())
        for trajectory in self._trajectories.unended():
            self._log.write_interrupted(trajectory, between_calls=True)

    async def replay(self, places: Mapping[str, Place]) -> None:
        """Let these trajectories, and no others, be what the log of an earlier start says."""
        self._log.replay(places)

    async def take_over(self, left: Left) -> None:
        """Let the trajectories of a dead worker be what it had logged, and go on from its tokens."""
        self._log.take_over(left)
        self._trajectories.take_over(left)

    async def validate(self, batch: TensorDict) -> None:
        """Run verl's own validation path for `batch` and return when all of it is in TransferQueue.

        Raises what the task of a prompt raised: verl would wait for ever for that prompt's rows.
        """
        await self.generate_sequences(batch)
        if not self.background_tasks:
            return
        # A copy: a task leaves verl's set when it ends.
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
        # verl's number of responses to a prompt; here each trajectory is a call of its own.
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
        """One trajectory by verl's agent loop, scored and stored.

        Raises:
            CallOverdue: a tool or the reward has not answered in time.
            Exception: what the agent loop raised.
        """
        trajectory = self._trajectories.start(claim, session)
        trajectory.row = str(row["index"])
        trajectory.prompt = "" if session else self._texts.of_prompt(row)  # once for a group
        if session == 0 and not trajectory.may_go_on:
            self._log.give_up(claim.uid, claim.claim_id - 1)  # a lost worker has not said that its attempt has ended
        # Not reset afterwards: the claim loop runs each trajectory in a task, which has a context of its own.
        CURRENT.set(trajectory)
        try:
            return await self._limits.run(trajectory, self._run(trajectory, row))
        finally:
            self._enter(ENDED)  # no event after `TrajectoryEnded`

    async def _run(self, trajectory: Trajectory, row: dict[str, Any]) -> list[TrajectorySummary]:
        self._enter("agent")
        started_s = time.monotonic()
        replayed = await self._log.read(trajectory)
        if replayed is None:
            found = await self._run_anew(trajectory, row)
        else:
            found = await self._store_again(trajectory, row, replayed)
        now_s = time.monotonic()
        # Before the sums are read: `enter` adds the seconds of the phase that ends.
        trajectory.enter(ENDED, now_s)
        ended = TrajectoryEnded(
            uid=trajectory.claim.uid,
            session=trajectory.session,
            seconds=now_s - started_s,
            engine_seconds=trajectory.engine_s,
            tokens=sum(each.response_len for each in found),
            interruptions=trajectory.num_interruptions,
            tool_seconds=trajectory.phase_s["tool"] + trajectory.phase_s["agent"],
            reward_seconds=trajectory.phase_s["reward"],
            held_seconds=trajectory.phase_s["held"],
            responses=len(trajectory.generations),
        )
        self._events.write(ended)
        return found

    async def _run_anew(self, trajectory: Trajectory, row: dict[str, Any]) -> list[TrajectorySummary]:
        claim, session = trajectory.claim, trajectory.session
        outputs: Any = await self._run_agent_loop(
            rollout_sampling_params(self.rollout_config),
            {"step": claim.global_step, "sample_index": row["index"], "rollout_n": session, "validate": False},
            trace=False,
            session_id=session,
            **row,
        )
        if not outputs:
            raise DataError(f"agent loop of prompt {claim.uid} returned no trajectory", reason="empty_trajectory")
        return self._log.write(trajectory, outputs, summaries(trajectory, outputs, self._filter_metric))

    async def _store_again(
        self, trajectory: Trajectory, row: dict[str, Any], replayed: Replayed
    ) -> list[TrajectorySummary]:
        """Store a trajectory of the log as if its agent loop had returned it now. It has its score already."""
        fields = {name: value for name, value in row.items() if name != "agent_name"}
        outputs = [AgentLoopOutput(**output) for output in replayed.outputs]
        await self._agent_loop_postprocess(outputs, False, session_id=trajectory.session, **fields)
        return self._log.write_again(trajectory, replayed)

    def forget(self, claim: Claim) -> None:
        """The claim has ended and the manager knows; until then a checkpoint needs the tokens."""
        self._trajectories.forget(claim.claim_id)

    def give_up(self, claim: Claim) -> None:
        """The claim has ended with an error: nothing goes on from what it has."""
        self.forget(claim)
        self._log.give_up(claim.uid, claim.claim_id)

    def note_dropped(self, claim: Claim, reason: str, metric: float | None = None) -> None:
        """The prompt is gone for good; `metric` is what the trajectories of a group without spread have in common."""
        self._events.write(PromptDropped(uid=claim.uid, source_index=claim.source_index, reason=reason, metric=metric))

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> list[Any]:
        """Score and store as verl does, and hand the outputs back to `generate`."""
        trajectory = CURRENT.get()
        if trajectory is not None:
            _refuse_late(trajectory)
        self._enter("reward")
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        return output if isinstance(output, list) else [output]


class CountingClient:
    """An LLM client that counts its generate calls; everything else is the wrapped client's."""

    def __init__(self, client: Any, enter: Callable[[str], None] = lambda phase: None) -> None:
        """`enter` is told when the running task begins to wait for an engine, and when it goes on without one."""
        self._client, self._enter = client, enter
        self.num_in_flight = 0
        """Generate calls that have not returned; while the gate is closed, the parked ones."""

    def __getattr__(self, name: str) -> Any:
        """Delegate to the wrapped client."""
        return getattr(self._client, name)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Same contract as the wrapped client's `generate`."""
        self.num_in_flight += 1
        self._enter("engine")
        try:
            return await self._client.generate(*args, **kwargs)
        finally:
            # Between two calls nobody can tell a tool from the agent loop's own work: both count as the tool's time.
            self.num_in_flight -= 1
            self._enter("tool")


def _refuse_late(trajectory: Trajectory) -> None:
    """Raise StaleClaim for what an agent loop does after its trajectory was given up: its claim is another's by now."""
    if trajectory.has_ended:
        claim = trajectory.claim
        raise StaleClaim(f"claim {claim.claim_id} on {claim.prompt_name} has ended: a late result of it is refused")


def rollout_sampling_params(rollout: Any) -> dict[str, Any]:
    """Sampling parameters of a training rollout, a fresh dict per trajectory because agent loops may change it."""
    return {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "repetition_penalty": 1.0,
        "logprobs": rollout.calculate_log_probs,
    }


def active_tool_schemas(row: dict[str, Any], tools: Iterable[Any]) -> list[dict[str, Any]] | None:
    """Schemas of the tools that verl's agent loop renders into this prompt; None when it renders none."""
    if row["agent_name"] == TOOLLESS_AGENT:
        return None
    by_name = {tool.name: tool for tool in tools}
    selection = (row.get("extra_info") or {}).get("tool_selection")
    chosen = [by_name[name] for name in selection if name in by_name] if selection else by_name.values()
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in chosen] or None


def summaries(trajectory: Trajectory, outputs: Sequence[Any], metric: str | None = None) -> list[TrajectorySummary]:
    """One summary per output of the trajectory's agent loop, with the value of `metric` if groups are filtered by it.

    The last one carries the trajectory's interruptions and spans, so that sums over summaries hold.

    Raises:
        ConfigError: an output has no such metric.
    """
    last = len(outputs) - 1
    return [_summary(trajectory, index, output, metric, is_last=index == last) for index, output in enumerate(outputs)]


def _summary(
    trajectory: Trajectory, index: int, output: Any, metric: str | None, *, is_last: bool
) -> TrajectorySummary:
    spans, extra = trajectory.version_spans, output.extra_fields
    # An agent loop that did not ask our client for tokens has no spans; then verl's own versions are all there is.
    versions = [span.version for span in spans] or [extra["min_global_steps"], extra["max_global_steps"]]
    return TrajectorySummary(
        key=f"{trajectory.key}_{index}",
        prompt_len=len(output.prompt_ids),
        response_len=len(output.response_ids),
        min_version=min(versions),
        max_version=max(versions),
        num_interruptions=trajectory.num_interruptions if is_last else 0,
        num_reprefilled_tokens=trajectory.num_reprefilled_tokens if is_last else 0,
        version_spans=spans if is_last else (),
        context_spans=trajectory.context_spans if is_last else (),
        metric=None if metric is None else metric_of(output, metric),
    )


def metric_of(output: Any, metric: str) -> float:
    """The value by which verl's `algorithm.filter_groups` compares a trajectory with the others of its group.

    Raises:
        ConfigError: the reward function gives no such value, or one that is no number.
    """
    if metric == REWARD_METRIC:
        found = {} if output.reward_score is None else {metric: np.float32(output.reward_score)}  # as in `rm_scores`
    else:
        found = output.extra_fields.get("reward_extra_info") or {}
    try:
        return float(found[metric])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"algorithm.filter_groups.metric={metric} is not allowed: a trajectory has {found.get(metric)!r} there; "
            f"the reward function gives numbers for {sorted(found)}, or take {REWARD_METRIC}"
        ) from error
