"""Starts and watches the agent-loop workers; admits training prompts and runs validation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.trainer.ppo.v1 import AgentLoopManagerTQ

from partial_rollout.agent_loop.worker import PartialRolloutAgentLoopWorker
from partial_rollout.core.slots import share_slots
from partial_rollout.errors import ActorLost
from partial_rollout.runtime.prompt_manager import find_manager
from partial_rollout.runtime.remote_call import wait_for, wait_for_all
from partial_rollout.settings.derived import read_settings
from partial_rollout.types import PromptMeta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray.actor import ActorHandle
    from tensordict import TensorDict

    from partial_rollout.agent_loop.trajectory import Saved
    from partial_rollout.types import Claim

HOLD_TIMEOUT_S = 60.0
"""A worker answers at once: it only notes which claims are held back."""
TOKENS_TIMEOUT_S = 300.0
"""Tokens of all trajectories in flight travel through Ray's object store."""
STOP_TIMEOUT_S = 60.0
"""A worker that stops cancels its tasks and waits until they have ended."""
WORKER_START_TIMEOUT_S = 300.0
"""Loading tokenizer and reward code on a cold file system takes a minute or two."""


class PartialRolloutAgentLoopManager(AgentLoopManagerTQ):
    """The agent-loop workers as the trainer sees them; lives in the trainer's process.

    `generate_sequences` admits training prompts to the prompt manager, from which the workers claim them. It pushes
    validation prompts to the workers, as verl does, and `wait_validation` waits for their end.
    `loops` are the workers' `run` calls: whoever waits for a batch waits for them too, so a lost worker ends the run.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = read_settings(self.config)
        self._settings, self._slot_shares = settings.block, settings.slot_shares
        self._prompt_manager = find_manager(self._settings.manager.name)
        self._validations: list[ray.ObjectRef] = []
        self.loops: dict[ray.ObjectRef, str] = {}

    async def _init_agent_loop_workers(self) -> None:
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        self.agent_loop_workers = [
            self._spawn(rank, nodes[rank % len(nodes)], share) for rank, share in enumerate(self._slot_shares)
        ]
        self._wait_all([worker.ping.remote() for worker in self.agent_loop_workers], "start", WORKER_START_TIMEOUT_S)

    def _spawn(self, rank: int, node_id: str, num_slots: int) -> ActorHandle:
        worker_id = f"agent_loop_worker_{rank}"
        actor_class: Any = ray.remote(PartialRolloutAgentLoopWorker).options(
            name=f"{worker_id}_{uuid4().hex[:8]}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=True),
        )
        return actor_class.remote(
            worker_id,
            self._settings,
            num_slots,
            self.config,
            self.llm_client,
            self.teacher_client,
            self.reward_loop_worker_handles,
        )

    def start(self) -> None:
        """Start the workers' claim loops."""
        self.loops = {worker.run.remote(): f"agent-loop worker {i}" for i, worker in enumerate(self.agent_loop_workers)}

    def stop(self) -> None:
        """Stop the claim loops and give their prompts back. Does nothing when they are not running."""
        loops, self.loops = self.loops, {}
        if not loops:
            return
        ended, _ = ray.wait(list(loops), num_returns=len(loops), timeout=0)
        self._wait_all([worker.stop.remote() for worker in self.agent_loop_workers], "stop", STOP_TIMEOUT_S)
        for ref in ended:
            ray.get(ref)  # raises what ended a claim loop that nobody asked to end

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Admit training prompts, or dispatch validation prompts; does not wait for tokens."""
        if prompts.get("validate", None) is not None:
            self._dispatch_validation(prompts)
        else:
            self._admit(prompts)

    def wait_validation(self, timeout_s: float) -> None:
        """Wait until every dispatched validation prompt is in TransferQueue."""
        validations, self._validations = self._validations, []
        self._wait_all(validations, "finish validation", timeout_s)

    def hold(self, claims: Sequence[Claim], oldest_version: int | None) -> None:
        """Hold back the trajectories of deferred prompts, and end those with older tokens than `oldest_version`.

        Returns when every worker knows. Each trajectory finds out before its next request to an engine.
        """
        if claims or oldest_version is not None:
            calls = [worker.hold.remote(claims, oldest_version) for worker in self.agent_loop_workers]
            self._wait_all(calls, "hold", HOLD_TIMEOUT_S)

    def resize(self, num_slots: int) -> None:
        """Share `num_slots` among the workers, in whole prompt groups."""
        shares = share_slots(num_slots, num_workers=len(self.agent_loop_workers), group=self.rollout_config.n)
        calls = [worker.resize.remote(share) for worker, share in zip(self.agent_loop_workers, shares, strict=True)]
        self._wait_all(calls, "take over their slots", HOLD_TIMEOUT_S)

    def tokens_in_flight(self) -> Saved:
        """Tokens of all trajectories in flight, and of restored ones that nobody has claimed yet, by `{uid}_{session}`.

        The first worker sends the restored trajectories that no worker has started; all workers forget the others. A
        trajectory may start between the two calls: then the worker that runs it sends it too, and that answer counts.
        """
        workers = self.agent_loop_workers
        calls = [worker.unclaimed.remote() for worker in workers]
        unclaimed = frozenset.intersection(*self._wait_all(calls, "name unstarted trajectories", TOKENS_TIMEOUT_S))
        calls = [worker.tokens_in_flight.remote(unclaimed, with_unclaimed=worker is workers[0]) for worker in workers]
        merged: Saved = {}
        for answer in cast("list[Saved]", self._wait_all(calls, "hand over their tokens", TOKENS_TIMEOUT_S)):
            merged |= answer
        return merged

    def restore_tokens(self, saved: Saved) -> None:
        """Give every worker the tokens of a checkpoint: any of them may claim the prompt."""
        ref = ray.put(saved)
        calls = [worker.restore_tokens.remote(ref) for worker in self.agent_loop_workers]
        self._wait_all(calls, "take over tokens", TOKENS_TIMEOUT_S)

    def raise_if_ended(self, ready: Sequence[ray.ObjectRef]) -> None:
        """Raise what ended a claim loop, if one of `ready` is such a loop."""
        for ref in ready:
            if ref in self.loops:
                ray.get(ref)
                raise ActorLost(f"{self.loops[ref]} ended its claim loop while the run goes on")

    def _dispatch_validation(self, prompts: TensorDict) -> None:
        chunks = prompts.chunk(len(self.agent_loop_workers))
        self._validations += [
            worker.validate.remote(chunk) for worker, chunk in zip(self.agent_loop_workers, chunks, strict=False)
        ]

    def _admit(self, prompts: TensorDict) -> None:
        step = int(prompts["global_steps"])
        uids = cast("Sequence[str]", prompts["uid"])
        metas = [
            PromptMeta(uid=uid, num_trajectories=self.rollout_config.n, global_step=step, source_index=str(index))
            for uid, index in zip(uids, prompts["index"], strict=True)
        ]
        wait_for(
            self._prompt_manager.admit.remote(metas),
            timeout_s=self._settings.timeouts.call_s,
            who_waits="trainer waits for the prompt manager to admit prompts",
        )

    @staticmethod
    def _wait_all(refs: Sequence[ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
        return wait_for_all(refs, timeout_s=timeout_s, who_waits=f"trainer waits for agent-loop workers to {what}")
