"""Actors that are started again while the run goes on; called from the threads of the RunWatch."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from partial_rollout.errors import ActorLost
from partial_rollout.rollout.balancer import has_restarted
from partial_rollout.runtime import processes
from partial_rollout.runtime.remote_call import wait_for
from partial_rollout.train.roles import engine_servers

if TYPE_CHECKING:
    from collections.abc import Callable

    from partial_rollout.types import Death

MAX_RESTARTS_A_STEP = 8
"""Restarts of one kind of process without a completed step in between: what dies at once again and again is broken."""
START_S = 300.0
"""Loading tokenizer and reward code on a cold file system takes a minute or two."""


class Restarts:
    """Starts reward workers and agent-loop workers again for as long as steps are completed in between.

    reward worker:     died -> started again -> watched -> known to all agent-loop workers
    engine server:     died -> started again by Ray, without an engine -> watched -> given an engine by the trainer
    load balancer:     died -> started again by Ray, with its servers -> watched
    prompt manager:    died -> started again by Ray, with its queue -> told whom to watch
    agent-loop worker: died -> its rows cleared, its log handed on, its prompts pending -> started again -> watched
    """

    def __init__(self, trainer: Any, agent_loops: Any, step: Callable[[], int | None]) -> None:
        """`step` tells the step that the trainer is in."""
        self._trainer, self._agent_loops, self._step = trainer, agent_loops, step
        self._counts: Counter[tuple[str, int | None]] = Counter()
        self._lock = threading.Lock()

    def reactions(self) -> dict[str, Callable[[Death], str]]:
        """By role, for the RunWatch."""
        reactions = {
            processes.AGENT_LOOP_WORKER.role: self.agent_loop_worker,
            processes.PROMPT_MANAGER.role: self.prompt_manager,
        }
        # Where agent-loop workers do not score, verl's trainer asks for a whole batch, and cannot ask other workers.
        if self._trainer.reward_loop_manager.reward_loop_worker_handles is not None:
            reactions[processes.REWARD_WORKER.role] = self.reward_worker
        if has_restarted(self._trainer.llm_server_manager):
            reactions[processes.LOAD_BALANCER.role] = self.load_balancer
        if all(replica.is_replaceable for replica in self._trainer.llm_server_manager.get_replicas()):
            reactions[processes.ENGINE_SERVER.role] = self.engine_server
        return reactions

    def engine_server(self, death: Death) -> str:
        """Wait until Ray has started an engine server again; whoever sends weights next gives it an engine."""
        with self._lock:
            self._count(death)
            name = death.process.name
            server = next(server for _, known, server in engine_servers(self._trainer) if known == name)
            wait_for(server.__ray_ready__.remote(), timeout_s=START_S, who_waits=f"the run waits for {name} to start")
            self._trainer.watch.watch([(death.process.role, name, server)])
        return f"{name} was started again; its requests wait until it has an engine with all weights"

    def prompt_manager(self, death: Death) -> str:
        """Tell the manager, which Ray has started again, whom to watch."""
        # Not under the lock: whoever holds it may wait for the manager.
        self._count(death)
        self._trainer.watch.watch_again()
        return f"it was started again with its queue, as pid {self._trainer.watch.manager_pid}"

    def load_balancer(self, death: Death) -> str:
        """Wait until Ray has started the load balancer again; requests that ask it for a server wait meanwhile."""
        with self._lock:
            self._count(death)
            name, balancer = death.process.name, self._trainer.llm_server_manager.global_load_balancer
            wait_for(balancer.__ray_ready__.remote(), timeout_s=START_S, who_waits=f"the run waits for {name} to start")
            self._trainer.watch.watch([(death.process.role, name, balancer)])
        return f"{name} was started again; a trajectory's next request may go to another engine than before"

    def agent_loop_worker(self, death: Death) -> str:
        """Let others generate what the worker had, and start it again."""
        with self._lock:
            self._count(death)
            rank = self._agent_loops.worker_ids.index(death.process.name)
            worker_id = self._agent_loops.restart(rank)
            self._trainer.watch.watch([(death.process.role, worker_id, self._agent_loops.agent_loop_workers[rank])])
        return f"it was started again as {worker_id}; any worker goes on with its prompts"

    def reward_worker(self, death: Death) -> str:
        """Start a reward worker again, as verl has started it."""
        with self._lock:
            self._count(death)
            rewards, name = self._trainer.reward_loop_manager, death.process.name
            number = int(name.rpartition("-")[2])
            options = {"name": f"reward_loop_worker_{number}_{uuid4().hex[:8]}"}
            worker = rewards.reward_loop_workers_class.options(**options).remote(
                rewards.config, rewards.reward_router_address
            )
            wait_for(worker.__ray_ready__.remote(), timeout_s=START_S, who_waits=f"the run waits for {name} to start")
            rewards.reward_loop_workers[number] = worker
            self._trainer.watch.watch([(death.process.role, name, worker)])
            self._agent_loops.replace_reward_worker(number, worker)
        return f"{name} was started again; the responses that it had are scored by others"

    def _count(self, death: Death) -> None:
        key = (death.process.role, self._step())
        self._counts[key] += 1
        if self._counts[key] > MAX_RESTARTS_A_STEP:
            raise ActorLost(f"{MAX_RESTARTS_A_STEP} processes of the kind {key[0]} died in step {key[1]}")
