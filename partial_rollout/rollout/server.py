"""verl's vLLM server with a gate before its engine: no request passes a closed gate.

Two Ray concurrency groups, and so two event-loop threads:

| group            | runs                          | waits for                  | unblocked by            |
|------------------|-------------------------------|----------------------------|-------------------------|
| (default)        | launch_server, generate, HTTP | the gate, the engine       | control: resume, reject |
| control          | all calls that a trainer awaits | the engine, a drain     | the engine, deadlines   |

AsyncLLM and the gate belong to the default group's loop, where the engine was launched; a control call hops there. So
parked requests can use up the concurrency of the default group, and the call that frees them still gets through.

An engine that dies with requests inside: they hand over the tokens that have come, as if they were interrupted, and the
gate shuts. `engine_death` tells the trainer, which relaunches the engine, sends weights and opens the gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from partial_rollout.core.engine_meter import EngineMeter
from partial_rollout.core.gate import GateState
from partial_rollout.core.resume import ABORTED, STOPPED
from partial_rollout.errors import ActorLost, DataError, EngineDead, WaitTimeout
from partial_rollout.observability.events import EventWriter, Fault, ProcessFound, events_folder
from partial_rollout.rollout.admission import Admission
from partial_rollout.rollout.control import control, while_healthy
from partial_rollout.rollout.ends_with_server import mark_engine
from partial_rollout.rollout.engine_process import (
    KILLED_S,
    EngineProcess,
    NoEngine,
    RolloutStatistics,
    counted_tokens,
    end_orphans,
    end_processes,
    engine_load,
    engine_processes,
    title_of,
)
from partial_rollout.rollout.gated_engine import CURRENT_PASSAGE, GatedEngine, Interruption, Passage
from partial_rollout.rollout.http_server import require_key, stop_http_server
from partial_rollout.rollout.progress_watch import ROLE as ENGINE
from partial_rollout.rollout.progress_watch import ProgressWatch
from partial_rollout.runtime.death_watch import Parking, last_lines, own_log
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.weights.directory import open_channels
from partial_rollout.weights.server import ChannelServer
from partial_rollout.weights.transfer_engine import choose_backend

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from contextlib import AbstractContextManager

    import psutil

    from partial_rollout.core.interrupt import Retained

    Within = tuple[float, str]
    """Seconds, and which limit that is."""

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "partial_rollout.weights.worker.WorkerExtension"
ENGINE_STOP_S = 20.0
"""How long an engine core may take to end by itself before it is killed."""
BROKEN_ENGINE_STOP_S = 2.0
"""How long the core of a relaunched engine may take: it has nothing to save, and may wait for a stuck worker."""
WORKER_STOP_S = 5.0
"""How long the engine's workers may take to end after their core has."""
SHUTDOWN_S = 2 * ENGINE_STOP_S + WORKER_STOP_S + KILLED_S
"""How long `shutdown` may take."""
INITIAL_VERSION = 0
"""Weight version of what the engine loaded by itself, before the first update."""


class PartialRolloutServer(ChannelServer):
    """Server actor of one replica; all state below is touched on the engine's loop only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what vLLMHttpServer takes; the engine starts in `launch_server`."""
        super().__init__(*args, **kwargs)
        self._init_gate(PartialRolloutConfig.from_rollout(self.config.custom))
        self._channels = open_channels()
        self._parking = Parking()
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._begin_without_engine()

    def _init_gate(self, settings: PartialRolloutConfig) -> None:
        self.settings = settings
        self._init_weights()
        self._admission = Admission()
        self._interruption = Interruption(settings)
        self._meter = EngineMeter()
        self._events = EventWriter(events_folder(settings), f"server-{self.replica_rank}-{self.node_rank}")
        self._watch: ProgressWatch | None = None
        self._death = asyncio.Event()
        """Set while the engine is dead and waits to be relaunched."""
        self._is_ending = False
        self._control_lock = asyncio.Lock()
        self._engine_loop: asyncio.AbstractEventLoop | None = None
        self._num_reprefilled_tokens = 0
        self._engine_processes: list[psutil.Process] = []
        self._has_lost_engine = False
        self._may_launch = True

    def _begin_without_engine(self) -> None:
        """Ray has started this actor again after its death: requests wait until it has an engine with weights."""
        self._weights.failed(f"the engine server of replica {self.replica_rank} has died, and the engine with it")
        self._admission.shut_empty()  # after the drain of its step the trainer begins no other one
        self._death.set()
        self._has_lost_engine = True
        self._may_launch = False
        self._put_gate_before(NoEngine())

    def _put_gate_before(self, engine: Any) -> None:
        self.engine = self._gated = GatedEngine(
            engine, self._admission, self._interruption.mode, self._meter, self._note_death
        )

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Start the engine as verl's server does.

        Raises:
            ActorLost: this actor has died while it launched, and Ray makes the call again: it might die for ever.
        """
        if not self._may_launch:
            raise ActorLost(f"{self._name}: its process died while it started the engine")
        await super().launch_server(*args, **kwargs)

    async def run_server(self, args: Any) -> None:
        """Start engine and HTTP server, which asks for a key, then put the gate in front of the engine."""
        self._launch_args = args
        mark_engine()
        await asyncio.to_thread(require_key, args, events_folder(self.settings))
        await super().run_server(args)
        self._attach_engine(self.engine)

    def _attach_engine(self, engine: Any) -> None:
        self._engine_loop = asyncio.get_running_loop()
        self._engine_processes = engine_processes()
        # verl sets the engine without a gate first, and then waits for its HTTP server; requests may come meanwhile.
        self._put_gate_before(engine)
        self._death.clear()
        self._has_lost_engine = False
        self._interruption.unlink_host_memory()
        if self.node_rank == 0:
            self._watch = ProgressWatch(self._name, self.settings.timeouts.stall_s, self._events, self._note_stuck)
            self._watch.start(self._load, self._engine_processes)
        for process in self._engine_processes:
            name = f"{title_of(process)} of {self._name}"
            self._events.write(ProcessFound(role=ENGINE, name=name, node=self._server_address, pid=process.pid))

    def _load(self) -> tuple[int, int]:
        """Requests that keep the engine busy, and tokens that it has generated; a paused engine has no requests.

        Where tokens are handed over at a request's end, vLLM's own count says that the engine goes on. Without that
        count nobody can tell such an engine from one that stands still, and 0 requests keep it from being ended.
        """
        num_running = self._gated.num_running if self._admission.statistics().state is GateState.OPEN else 0
        if self._output_kind is RequestOutputKind.DELTA:
            return num_running, self._gated.num_generated_tokens
        return (num_running, counted_tokens()) if self._gated.log_stats else (0, 0)

    @property
    def _why_dead(self) -> str:
        pids = ", ".join(str(process.pid) for process in self._engine_processes)
        return (self._watch.verdict if self._watch else "") or f"the engine (pid {pids}) died"

    @property
    def _can_be_relaunched(self) -> bool:
        """Whether somebody starts a dead engine again and sends it weights, while its requests wait."""
        weights = self.settings.weights
        return self.nnodes == 1 and weights.backend != "verl" and weights.relaunches > 0 and not self._is_ending

    def _note_death(self) -> bool:
        """The engine is dead. True: it will be relaunched, and until then requests wait at the gate."""
        if self._can_be_relaunched and not self._death.is_set():
            self._weights.failed(self._why_dead)
            self._admission.shut()
            self._death.set()
            self._tell_fault(self._why_dead)
        return self._can_be_relaunched

    def _note_stuck(self) -> None:
        """The engine was ended, because it stood still. Its requests are told here, since vLLM may not tell them."""
        self._note_death()
        self._gated.fail_running()

    def _tell_fault(self, why: str) -> None:
        action = "it is started again, and all engines get all weights; its requests wait"
        logger.error("%s: %s; %s", self._name, why, action)
        if self._watch is None or not self._watch.verdict:  # else it has told of the fault
            pid = self._engine_processes[0].pid if self._engine_processes else 0
            name, node = f"replica {self.replica_rank}", self._server_address
            self._events.write(Fault(role=ENGINE, name=name, node=node, pid=pid, text=f"{name}: {why}", action=action))

    async def _unless_dead(self, call: Coroutine[Any, Any, Any], within: Within, what: str) -> None:
        """Wait for `call`; an engine that has died and will be relaunched need not answer, others raise EngineDead.

        One that has not done `what` within that time stands still, and is ended.
        """
        if self._death.is_set():
            call.close()
            return
        try:
            with self._bounded(within, what):
                await self._while_alive(call)
        except EngineDead:
            if not self._note_death():
                raise

    def _bounded(self, within: Within, what: str) -> AbstractContextManager[None]:
        return self._watch.answers_within(*within, what) if self._watch else contextlib.nullcontext()

    @property
    def _to_pause(self) -> Within:
        """Half: the requests of an engine that is ended hand over what they have within the other half."""
        return self.settings.timeouts.drain_s / 2, "half of partial_rollout.timeouts.drain_s"

    @property
    def _to_sleep_or_go_on(self) -> Within:
        return self.settings.timeouts.weights_s, "a tenth of partial_rollout.timeouts.resume_s"

    async def _on_engine_loop(self, call: Coroutine[Any, Any, Any]) -> Any:
        # Before the launch there is no engine whose loop could be another one.
        if self._engine_loop is None or self._engine_loop is asyncio.get_running_loop():
            return await call
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._engine_loop))

    async def _while_alive(self, call: Coroutine[Any, Any, Any]) -> None:
        engine: Any = self.engine  # a GatedEngine passes `check_health` on to the engine
        try:
            await while_healthy(engine, call)
        except EngineDeadError as error:
            raise EngineDead(f"{self._name}: {self._why_dead}") from error

    # ---- generation -------------------------------------------------------------------------------------------------

    async def generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        *,
        is_resumption: bool = False,
        retained: Retained | None = None,
        **inputs: Any,
    ) -> TokenOutput:
        """Generate one segment; other arguments and the result as in verl's `vLLMHttpServer.generate`.

        `stop_reason` is "aborted" for an interrupted segment. `extra_fields` holds `global_steps` (the weight version
        that sampled the tokens), `gate_openings`, `num_cached_tokens`, `context` (a Context), `retained` (to be given
        with the resumption; None if there is nothing), `stop_string` (at which the engine ended the request), and
        `rejected` for a request turned away.

        Raises:
            DataError: the prompt leaves no room in the context.
            EngineDead: the engine is gone and cannot be relaunched, or its last weight update failed.
        """
        self._engine_loop = self._engine_loop or asyncio.get_running_loop()
        full = self._answer_full_context(len(prompt_ids), is_resumption)
        if full is not None:
            return full
        # Claimed before the gate: while this caller waits there, its kept request must not be aborted as nobody's.
        with self._gated.kept.claimed(retained.kept_id if retained else None):
            ticket = await self._admission.enter(request_id)
            if ticket is None:
                return self._empty_output(ABORTED, rejected=True)
            # Read inside the gate: it cannot close and open again before this request has left the engine.
            version, openings = self._version, self._admission.openings
            passage = Passage(ticket, self._interruption.cache_salt(retained, openings, version), retained)
            reset = CURRENT_PASSAGE.set(passage)
            try:
                # A failed update leaves the engine with weights of two versions.
                self._weights.require_whole(self._name)
                output = await super().generate(prompt_ids, self._engine_params(sampling_params), request_id, **inputs)
            except EngineDeadError as error:
                if not self._note_death():
                    raise EngineDead(f"{self._name}: {self._why_dead} while it held request {request_id!r}") from error
                return self._empty_output(ABORTED)
            finally:
                CURRENT_PASSAGE.reset(reset)
                self._admission.leave(ticket)
        context_len = len(prompt_ids) if is_resumption else 0
        output.extra_fields |= {"global_steps": version, "gate_openings": openings}
        output.extra_fields |= self._interruption.fields(passage, output, version=version, context_len=context_len)
        self._count(output, context_len)
        return output

    def _answer_full_context(self, prompt_len: int, is_resumption: bool) -> TokenOutput | None:
        """A resumed request that has filled the context is complete; a fresh one that has is an error."""
        room = self.config.max_model_len - prompt_len
        if room >= 1:
            return None
        if is_resumption:
            return self._empty_output(STOPPED)
        raise DataError(
            f"a prompt of {prompt_len} tokens leaves no room in "
            f"actor_rollout_ref.rollout.max_model_len={self.config.max_model_len}: "
            "raise it, or drop long prompts with data.filter_overlong_prompts=True"
        )

    def _engine_params(self, sampling_params: dict[str, Any]) -> dict[str, Any]:
        """Add options for streaming deltas without text; verl hands keys it does not know to vLLM's SamplingParams."""
        return {
            "output_kind": self._output_kind,
            "detokenize": bool(sampling_params.get("stop")),
            **sampling_params,
        }

    def _empty_output(self, stop_reason: str, **fields: Any) -> TokenOutput:
        fields |= {"global_steps": self._version, "gate_openings": self._admission.openings}
        fields |= self._interruption.nothing(self._version)
        return TokenOutput(token_ids=[], stop_reason=stop_reason, extra_fields=fields)

    def _count(self, output: TokenOutput, context_len: int) -> None:
        if context_len and output.token_ids:
            num_reused = output.extra_fields["context"].num_reused_tokens
            self._num_reprefilled_tokens += context_len - num_reused

    @property
    def _output_kind(self) -> RequestOutputKind:
        """Deltas; or one final output where vLLM reports, with the last output, data that merged deltas would lose."""
        mtp = self.config.mtp
        if self.config.enable_rollout_routing_replay or (mtp is not None and mtp.enable and mtp.enable_rollout):
            return RequestOutputKind.FINAL_ONLY
        return RequestOutputKind.DELTA

    @property
    def _version(self) -> int:
        return INITIAL_VERSION if self.global_steps is None else self.global_steps

    @property
    def _name(self) -> str:
        return f"replica {self.replica_rank} node {self.node_rank} ({self._server_address}:{self._server_port})"

    # ---- gate -------------------------------------------------------------------------------------------------------

    @control
    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Close the gate, interrupt every request and wait until all have handed over; repeating it is allowed.

        Args:
            reset_prefix_cache: forget the KV cache, as new weights demand, unless the interrupt mode retains it.
            reject_request: turn waiting and coming requests away instead of parking them.

        Returns:
            verl's `{"aborted_count", "request_ids"}`.

        Raises:
            DrainTimeout: requests are left after `drain_s`; names them.
            EngineDead: the engine died before it had paused, and cannot be relaunched.
        """
        if self.node_rank != 0:
            return {"aborted_count": 0, "request_ids": []}
        if self._has_lost_engine and self._engine_loop is None:
            # A new process with a shut gate: no request has come, so none is drained, and nothing binds the lock to the
            # loop of control calls.
            self._admission.shut()
            if reject_request:
                self._admission.reject()
            return {"aborted_count": 0, "request_ids": []}

        async def pause() -> None:
            await self._unless_dead(self.engine.interrupt(clear_cache=reset_prefix_cache), self._to_pause, "pause")

        async with self._control_lock:
            request_ids = await self._admission.close_and_drain(pause, self.settings.timeouts.drain_s)
            if reject_request:
                self._admission.reject()
        return {"aborted_count": len(request_ids), "request_ids": request_ids}

    @control
    async def resume_engine_generation(self) -> None:
        """Let the engine schedule again; the gate stays as it is.

        Raises EngineDead if it dies before it does; whoever waits for tokens next brings it back.
        """
        if self.node_rank != 0:
            return
        try:
            with self._bounded(self._to_sleep_or_go_on, "go on"):
                await self._while_alive(self.engine.resume_generation())
        except EngineDead:
            self._note_death()
            raise

    @control
    async def open_submission_gate(self) -> None:
        """Admit parked and coming requests.

        Raises:
            IllegalTransition: a drain has not finished.
            EngineDead: the last weight update failed or has not ended.
        """
        self._weights.require_settled(self._name)
        async with self._control_lock:
            # Under the lock: a drain that is under way has to end first.
            self._admission.open()

    @control
    async def resume_generation(self) -> None:
        """Resume the engine, then open the gate."""
        await self.resume_engine_generation()
        await self.open_submission_gate()

    @control
    async def reject_parked(self) -> int:
        """Turn away all waiting and coming requests until the gate moves again; return how many were waiting."""
        return self._admission.reject()

    @control
    async def rollout_statistics(self) -> RolloutStatistics:
        """Counts of this server."""
        gate = self._admission.statistics()
        num_generated_tokens = self._gated.num_generated_tokens if self.node_rank == 0 else 0
        return RolloutStatistics(
            replica_rank=self.replica_rank,
            gate=gate,
            version=self._version,
            mean_running=self._admission.mean_running(),
            num_generated_tokens=num_generated_tokens,
            num_reprefilled_tokens=self._num_reprefilled_tokens,
            kept=len(self._gated.kept) if self.node_rank == 0 else 0,
            load=engine_load(num_generated_tokens),
            speed=self._meter.speed(),
        )

    @control
    async def engine_death(self) -> str:
        """Wait until the engine dies that will be relaunched; returns the reason. Its requests wait meanwhile.

        Returns also when the server shuts down: of a call that is open when the server is killed, Ray prints an error.
        """
        await self._death.wait()
        if self._is_ending:
            return f"{self._name}: the run ends"
        lines = await asyncio.to_thread(last_lines, own_log())
        told = f". The log of its server ends with:\n{lines}" if lines else ""
        return f"{self._name}: {self._weights.failure}{told}"

    @control
    async def until_killed(self) -> None:
        """Return for the next call of this kind only: who watches this actor hears of its death by the call's end."""
        await self._parking.until_killed()

    @control
    async def require_health(self) -> None:
        """Raise EngineDead if the engine is gone or holds half an update. A further node has no engine to ask."""
        if self.node_rank != 0:
            return
        self._weights.require_whole(self._name)
        await self._while_alive(self.engine.check_health())

    @control
    async def shutdown(self, orphans: Sequence[EngineProcess] = ()) -> None:
        """Turn all requests away, stop the HTTP server and end the engine's processes; `orphans` as in `relaunch`.

        Raises:
            WaitTimeout: the HTTP server or the engine did not end in time.
        """
        self._is_ending = True
        # First: the answer is on its way while the engine ends, and the server is killed after that.
        self._death.set()
        self._admission.reject()
        self._channels.remove()
        if self._has_lost_engine:
            await asyncio.to_thread(end_orphans, orphans)
        elif self.node_rank == 0:
            await self._stop_engine(ENGINE_STOP_S)

    async def _stop_engine(self, grace_s: float) -> None:
        """Stop the HTTP server and end the engine's processes, however they are; their memory is free afterwards."""
        if self._watch is not None:
            self._watch.stop()
        await stop_http_server(self._server_task, self._name)
        # Workers whose core was killed have lost their parent, and are no descendants of this process any more.
        processes = {*self._engine_processes, *engine_processes()}
        stop = asyncio.to_thread(self.engine.shutdown, timeout=grace_s)
        try:
            await asyncio.wait_for(stop, 2 * ENGINE_STOP_S)
        except asyncio.TimeoutError:  # noqa: UP041 - not the built-in one on Python 3.10
            raise WaitTimeout(f"{self._name}: the engine did not end within {2 * ENGINE_STOP_S:g} s") from None
        # GPU memory is free only when the last worker has ended, and the next engine needs all of it.
        await asyncio.to_thread(end_processes, processes, grace_s=WORKER_STOP_S)

    # ---- relaunch ----------------------------------------------------------------------------------------------------

    async def adopt_loop(self) -> None:
        """The engine belongs to the event loop of this call, unless it has one."""
        self._engine_loop = self._engine_loop or asyncio.get_running_loop()

    @control
    async def engines(self) -> list[EngineProcess]:
        """The engine's processes."""
        return [EngineProcess(process.pid, process.create_time()) for process in self._engine_processes]

    @control
    async def relaunch(self, orphans: Sequence[EngineProcess] = ()) -> None:
        """End the engine and start it again in this actor; the new engine generates nothing before it was sent weights.

        The gate and everything else stays as it is; only the port of the HTTP server changes. `orphans` are processes
        of the engine that this actor had before Ray started it again.

        Raises:
            ActorLost: nobody has told this process yet on which loop requests wait (`adopt_loop`): it is a new one.
            EngineDead: the engine did not start; or it runs on several nodes, of which this actor can start only one.
        """
        if self.nnodes > 1:
            raise EngineDead(f"{self._name}: an engine over several nodes is not relaunched; {self._weights.failure}")
        # Where a process has died, Ray makes this call again in the new one, which may not know its loop yet. An engine
        # on the loop of control calls would not wake its requests, which wait on another one.
        if self._engine_loop is not asyncio.get_running_loop():
            raise ActorLost(f"{self._name}: its process is new and has not been told its loop")
        if not self._death.is_set():  # no request was in it that would have failed
            self._tell_fault(self._weights.failure or self._why_dead)
        if not self._has_lost_engine:
            await self._stop_engine(BROKEN_ENGINE_STOP_S)
        elif ended := await asyncio.to_thread(end_orphans, orphans):
            logger.warning("%s: processes of the engine before were left and were killed: %s", self._name, ended)
        self._may_launch = True
        try:
            await (self.launch_server() if self._has_lost_engine else self.run_server(self._launch_args))
        except Exception as error:
            raise EngineDead(f"{self._name} did not start again: {error}; {self._weights.failure}") from error
        self._weights.relaunched()
        if self._admission.statistics().state is not GateState.OPEN:
            # Requests that come by the HTTP server wait in the paused engine, as they did in the engine before.
            await self._while_alive(self.engine.pause_generation(mode="abort", clear_cache=True))

    # ---- the rest of verl's control calls ---------------------------------------------------------------------------

    collective_rpc = control(vLLMHttpServer.collective_rpc)
    clear_kv_cache = control(vLLMHttpServer.clear_kv_cache)
    release_kv_cache = control(vLLMHttpServer.release_kv_cache)
    resume_kv_cache = control(vLLMHttpServer.resume_kv_cache)
    set_global_steps = control(vLLMHttpServer.set_global_steps)
    abort_request = control(vLLMHttpServer.abort_request)
    start_profile = control(vLLMHttpServer.start_profile)
    stop_profile = control(vLLMHttpServer.stop_profile)

    @control
    async def wait_for_requests_to_drain(self) -> None:
        """Wait until no data-parallel engine has requests; a dead one that will be relaunched has none."""
        call = vLLMHttpServer.wait_for_requests_to_drain(self)
        await self._unless_dead(call, self._to_pause, "tell whether it has requests")

    @control
    async def sleep(self) -> None:
        """Let the engine release its memory, as verl's; a dead one that will be relaunched has none.

        Raises EngineDead if it dies before it has, and cannot be relaunched.
        """
        if self.node_rank == 0:
            await self._unless_dead(vLLMHttpServer.sleep(self), self._to_sleep_or_go_on, "release its memory")

    # ---- verl's hooks -----------------------------------------------------------------------------------------------

    def _get_worker_extension_cls(self) -> str:
        return WORKER_EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        self._interruption.engine_arguments(engine_kwargs, self.model_config.hf_config.to_dict())
        if self.settings.weights.backend != "verl":
            choose_backend(engine_kwargs)


class CpuServer(vLLMHttpServer):
    """verl's own server; only the worker extension differs, because vLLM's CPU layers cannot be loaded in place."""

    def _get_worker_extension_cls(self) -> str:
        return WORKER_EXTENSION
