"""Replicas for verl's registry: one whose servers have a gate, and one that makes verl's own modes work on a CPU."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import ray
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs
from verl.utils.device import get_device_name
from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from partial_rollout.errors import ActorLost, PartialRolloutError, WaitTimeout
from partial_rollout.observability import stages
from partial_rollout.rollout.control import CONTROL_GROUP
from partial_rollout.rollout.server import SHUTDOWN_S, CpuServer, PartialRolloutServer
from partial_rollout.runtime.placement import RESTARTED
from partial_rollout.settings.block import PartialRolloutConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray.actor import ActorHandle

    from partial_rollout.rollout.engine_process import EngineProcess, RolloutStatistics

logger = logging.getLogger(__name__)

NAME = "vllm"
"""verl asks for rollout.name == "vllm" in many places, so the replacement keeps the name."""
NUM_CONTROL_CALLS = 64
"""How many control calls one server runs at the same time."""
MIN_GENERATE_CONCURRENCY = 4096
"""How many requests one server holds, parked ones included. Further requests wait in Ray, and delay no other call."""
MARGIN_S = 10.0
"""Added to a server's own deadline, whose error says more than that of the caller."""


class KeptArguments:
    """Stands in for an actor class: keeps what its constructor is given, which a restart needs again.

    Ray puts a large argument into its object store by itself, and forgets the object when the constructor has run (seen
    with Ray 2.60: `ReferenceCountingAssertionError`).
    """

    def __init__(self, actor_class: Any, kept: list[ray.ObjectRef[Any]]) -> None:
        """`kept` takes the arguments of all actors; they are forgotten with it."""
        self._actor_class, self._kept = actor_class, kept

    def options(self, **options: Any) -> KeptArguments:
        """A stand-in for the actor class with these options."""
        return KeptArguments(self._actor_class.options(**options), self._kept)

    def remote(self, **arguments: Any) -> ActorHandle:
        """Start the actor."""
        given = {name: ray.put(value) for name, value in arguments.items()}
        self._kept += given.values()
        return self._actor_class.remote(**given)


class EnginePlace(Worker):
    """Holds a device for an engine that shares none with training; it has nothing to do."""


class PartialRolloutReplica(vLLMReplica):
    """vLLMReplica whose servers have a gate; every call is awaited, on every server, with a deadline."""

    _engines: tuple[EngineProcess, ...] = ()
    """Processes of the engine: nobody ends them when the server has died."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what vLLMReplica takes."""
        super().__init__(*args, **kwargs)
        self.settings = PartialRolloutConfig.from_rollout(self.config.custom)
        options = RESTARTED if self.is_replaceable else {}
        as_actor: Any = ray.remote(concurrency_groups={CONTROL_GROUP: NUM_CONTROL_CALLS}, **options)  # pyright: ignore[reportCallIssue]
        self.server_class = KeptArguments(as_actor(PartialRolloutServer), [])

    @property
    def is_replaceable(self) -> bool:
        """Whether the run goes on without a server that has died, and without its engine."""
        weights = self.settings.weights
        return self.nnodes == 1 and weights.backend != "verl" and weights.relaunches > 0

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        """The class of the actors that hold the devices of a standalone replica.

        verl's would receive weights too, and send them on to the engine; ours go straight to the engine's workers.
        """
        return RayClassWithInitArgs(cls=ray.remote(EnginePlace))

    @property
    def places(self) -> list[ActorHandle]:
        """Actors that hold the devices; empty where these are those of the training ranks."""
        return self.workers if self.rollout_mode is RolloutMode.STANDALONE else []

    async def launch_servers(self) -> None:
        """Start servers and engines."""
        await super().launch_servers()
        await self._find_engines()

    @property
    def max_concurrency(self) -> int:
        """Concurrency of `generate`; control calls have their own."""
        return max(MIN_GENERATE_CONCURRENCY, super().max_concurrency)

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Close the gates, interrupt and drain.

        Raises:
            DrainTimeout: requests are left in an engine; names them.
            EngineDead: an engine died before it had paused.
            WaitTimeout: a server did not answer.
        """
        limit_s = self.settings.timeouts.drain_s + MARGIN_S
        results = await self._on_all("abort_all_requests", limit_s=limit_s, reject_request=reject_request)
        request_ids = [request_id for result in results for request_id in result["request_ids"]]
        return {"aborted_count": len(request_ids), "request_ids": request_ids, "server_results": results}

    async def resume_generation(self) -> None:
        """Resume the engine, then open the gates (in this order over all nodes, as data-parallel engines need it)."""
        await self._on_all("resume_engine_generation", limit_s=self.settings.timeouts.resume_s)
        await self._on_all("open_submission_gate", limit_s=self.settings.timeouts.resume_s)

    async def reject_parked(self) -> int:
        """Turn away all waiting requests; return how many there were."""
        return sum(await self._on_all("reject_parked", limit_s=self.settings.timeouts.call_s))

    async def statistics(self) -> list[RolloutStatistics]:
        """One entry for each server."""
        return await self._on_all("rollout_statistics", limit_s=self.settings.timeouts.call_s)

    def engine_death(self) -> ray.ObjectRef[str]:
        """Ready when the engine has died while it generated, with the reason; it is to be relaunched then."""
        return self.servers[0].engine_death.remote()

    async def check_health(self) -> None:
        """Raise EngineDead if an engine has died."""
        await self._on_all("require_health", limit_s=self.settings.timeouts.call_s)

    async def weights_failure(self) -> str | None:
        """Why the last weight update failed; None if it did not."""
        answers = await self._on_all("weights_failure", limit_s=self.settings.timeouts.call_s)
        return next((answer for answer in answers if answer is not None), None)

    async def relaunch(self) -> None:
        """Start the engine again, in the same actor; it must be sent weights before it generates."""
        while not await self._is_relaunched():
            logger.warning(
                "replica %d: its engine server was started again just now, and starts no engine yet; it is asked again",
                self.replica_rank,
            )
        await self._find_engines()

    async def _is_relaunched(self) -> bool:
        """Ask the servers to start their engines; False if a process was too new, and is to be asked again.

        Ray makes the call again in the new process of a server that has died. It does not know the loop of its requests
        before `adopt_loop`, and starts no engine.
        """
        with contextlib.suppress(WaitTimeout):  # a server that is full of requests has the loop of these
            await self._on_all("adopt_loop", limit_s=MARGIN_S)
        try:
            await self._on_all("relaunch", limit_s=self.settings.timeouts.resume_s, orphans=self._engines)
        except ActorLost:
            return False
        return True

    async def _find_engines(self) -> None:
        found = await self._on_all("engines", limit_s=self.settings.timeouts.call_s)
        self._engines = tuple(each for engines in found for each in engines)

    async def sleep(self) -> None:
        """Release device memory on every server; only the first one of a replica over several nodes has requests.

        An engine with devices of its own keeps its memory.
        """
        if self.rollout_mode is RolloutMode.STANDALONE:
            return
        await self._on_all(
            "wait_for_requests_to_drain", limit_s=self.settings.timeouts.drain_s, servers=self.servers[:1]
        )
        await self._on_all("sleep", limit_s=self.settings.timeouts.resume_s)

    async def shutdown(self) -> None:
        """End engines and HTTP servers, then the server actors; the replica cannot be used again."""
        try:
            await self._on_all("shutdown", limit_s=SHUTDOWN_S + MARGIN_S, orphans=self._engines)
        finally:
            for actor in [*self.servers, *self.places]:
                ray.kill(actor)
            self.servers.clear()

    async def _on_all(
        self, method: str, *, limit_s: float, servers: Sequence[ActorHandle] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a control method on every server, or on `servers`, and wait for all answers."""
        refs = [getattr(server, method).remote(**kwargs) for server in (servers or self.servers)]
        try:
            return await asyncio.wait_for(asyncio.gather(*refs), limit_s)
        except asyncio.TimeoutError as error:  # noqa: UP041 - not the built-in one on Python 3.10
            if isinstance(error, PartialRolloutError):
                raise
            raise WaitTimeout(
                f"replica {self.replica_rank}: {method} was not answered by all {len(refs)} server(s) "
                f"within {limit_s:g} s"
            ) from None


class CpuReplica(vLLMReplica):
    """verl's replica with weight updates that work on vLLM's CPU backend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what vLLMReplica takes."""
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(CpuServer)


def register_replicas(partial_rollout: bool) -> None:
    """Choose what verl creates for rollout.name=vllm in this process.

    With partial rollout the engines of the trained model are ours. Engines of a reward model or a teacher, and all
    engines without partial rollout, are verl's own, except on a CPU, where verl's cannot update weights.
    """
    plain = CpuReplica if get_device_name() == "cpu" else vLLMReplica

    def create(*args: Any, is_reward_model: bool = False, is_teacher_model: bool = False, **kwargs: Any) -> vLLMReplica:
        is_trained = not (is_reward_model or is_teacher_model)
        chosen = PartialRolloutReplica if partial_rollout and is_trained else plain
        return chosen(*args, is_reward_model=is_reward_model, is_teacher_model=is_teacher_model, **kwargs)

    def load() -> Any:
        stages.begin(stages.ENGINES)  # verl asks for the class when it is about to start the engines
        return create  # verl only calls what it is given

    RolloutReplicaRegistry.register(NAME, load)
