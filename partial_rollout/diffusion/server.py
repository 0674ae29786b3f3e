"""One replica: AsyncOmni behind the gate of the text replicas, with the same words for interrupting it.

Two ways to interrupt the requests between denoise steps:

    hold / release           in place: requests stay in the engine's memory; for updates of weights alone
    drain / resume           out of it: each request comes back as a snapshot, and new ones park at the gate; for
                             releasing the engine's memory (sleep / wake in between) and moving requests to another
                             replica

Everything runs on one event loop; AsyncOmni keeps its engine and the thread of the denoise steps behind queues.

| waits                       | for                                   | unblocked by                          |
|-----------------------------|---------------------------------------|---------------------------------------|
| generate                    | the gate, the image                   | resume; a denoise step, drain's abort |
| drain                       | requests on their way to the engine   | `_arrived`, `timeout_s`               |
| hold, drain                 | the end of the running step           | the engine, `timeout_s`               |
| receive_weights             | the sender                            | the channel's `timeout_s`             |
"""

from __future__ import annotations

import asyncio
import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from partial_rollout.diffusion.engine import BOUNDARY, HOLD, RELEASE
from partial_rollout.diffusion.hold import Hold
from partial_rollout.diffusion.result import SampleResult, to_result
from partial_rollout.diffusion.sample import OPTIONS_KEY, SampleOptions
from partial_rollout.diffusion.sampling import Interrupted, SampleRequest
from partial_rollout.diffusion.snapshot import read_header
from partial_rollout.errors import EngineError, PartialRolloutError, WaitTimeout, WeightUpdateError
from partial_rollout.rollout.admission import Admission
from partial_rollout.runtime.remote_call import answer_of
from partial_rollout.weights.directory import open_channels
from partial_rollout.weights.protocol.engine_weights import EngineWeights

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from partial_rollout.core.gate import GateStatistics, Ticket
    from partial_rollout.diffusion.contract import Adapter
    from partial_rollout.diffusion.sample import OnArrival
    from partial_rollout.diffusion.sampling import SamplingLimits
    from partial_rollout.weights.directory import ChannelAddress

ENGINE_NAME = "the diffusion engine"
SLEEP_LEVEL = 1
"""Weights go to host memory; from level 2 vllm-omni 0.28.0 cannot wake."""
WORKER_EXTENSION = "partial_rollout.diffusion.worker_extension.DiffusionWorkerExtension"
DRAIN = "drain"
PACK, FORGET = "pack_samples", "forget_samples"
"""Of the worker extension."""
SLACK_S = 5.0
"""Bounded calls to the engine bound themselves; this much later the wait for their answer ends as well."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What one server is started with."""

    model_path: str
    adapter: Adapter
    limits: SamplingLimits
    dtype: str = "bfloat16"
    max_num_seqs: int = 8
    """Requests that share a batch."""
    num_gpus: int = 1
    engine_backend: str = "partial_rollout.diffusion.engine.HoldableEngine"
    """Import path of the engine class."""
    timeout_s: float = 60.0
    """Of a hold, a drain, a release, and of putting the engine to sleep or waking it."""
    sleep_mode: bool = False
    """Whether the engine can give its memory back (`sleep`): on CUDA only, on a CPU it does not start then."""


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Counts of one server at one moment."""

    gate: GateStatistics
    version: int
    """Weight version the engine holds."""
    holders: list[str]
    """Who wants the engine held."""
    num_finished: int
    num_interrupted: int
    num_denoise_steps: int
    """Computed by the engine up to its last hold, drain or `count_steps`, each request's counted; warm-up included."""
    last_drain_s: float


class DiffusionServer:
    """Plain class; becomes an actor where it is created. Used from one event loop."""

    def __init__(self, options: ServerOptions) -> None:
        """Start the engine, which takes seconds to minutes."""
        self.options = options
        self._channels = open_channels()
        self._weights, self._hold, self._admission = EngineWeights(), Hold(), Admission()
        self._control = asyncio.Lock()
        self._numbers = itertools.count()
        self._interrupted: dict[str, bytes | None] = {}
        self._asleep = False
        self._version = self._num_finished = self._num_interrupted = self._num_denoise_steps = 0
        # Inherited, it would be the port of every server on this machine.
        os.environ.pop("MASTER_PORT", None)
        self._omni = AsyncOmni(
            model=options.model_path,
            dtype=options.dtype,
            enforce_eager=options.dtype == "float32",
            step_execution=options.adapter.stepwise,
            max_num_seqs=options.max_num_seqs,
            num_gpus=options.num_gpus,
            custom_pipeline_args={"pipeline_class": options.adapter.pipeline},
            engine_backend=options.engine_backend,
            worker_extension_cls=WORKER_EXTENSION,
            enable_sleep_mode=options.sleep_mode,
        )

    async def generate(self, request: SampleRequest) -> SampleResult | Interrupted:
        """Generate one image; a request that is interrupted comes back with where to go on.

        Raises:
            DataError: the request would break the batch it shares.
            EngineError: the engine failed, or holds half an update, which the image or its snapshot may be made with.
        """
        self.options.limits.check(request)
        name = f"{request.request_id}#{next(self._numbers)}"
        ticket = await self._admission.enter(name)
        if ticket is None:
            raise EngineError(f"request {request.request_id!r} was turned away: {ENGINE_NAME} is shutting down")
        openings = self._admission.openings
        try:
            self._weights.require_whole(ENGINE_NAME)
            output = await self._run(name, request, ticket)
            self._weights.require_whole(ENGINE_NAME)
        finally:
            interrupted = name in self._interrupted
            snapshot = self._interrupted.pop(name, None)
            self._admission.leave(ticket)
        if interrupted:
            self._num_interrupted += 1
            kept = snapshot or request.snapshot
            return Interrupted(kept, read_header(kept)["step_index"] if kept else 0, openings)
        self._num_finished += 1
        return to_result(request.request_id, output)

    async def hold(self, holder: str = "update") -> None:
        """Stop taking denoise steps, in place; requests stay where they are, new ones wait in the engine.

        Raises:
            WaitTimeout: the running step did not end in time.
        """
        self._require_stepwise()
        async with self._control:
            await self._hold_engine(holder)

    async def release(self, holder: str = "update") -> None:
        """Go on taking steps, unless somebody else wants the engine held.

        Raises:
            EngineDead: the engine holds half an update.
        """
        async with self._control:
            self._weights.require_settled(ENGINE_NAME)
            await self._release_engine(holder)

    async def drain(self) -> list[str]:
        """Close the gate and interrupt every request; return their names. Afterwards the engine holds none.

        Raises:
            DrainTimeout: some are still there after `timeout_s`; names them. The gate stays shut.
        """
        self._require_stepwise()
        async with self._control:
            return await self._admission.close_and_drain(self._interrupt_all, self.options.timeout_s)

    async def resume(self) -> None:
        """Let the engine run and open the gate.

        Raises:
            IllegalTransition: a drain has not finished.
            EngineDead: the engine holds half an update.
            EngineError: it sleeps.
        """
        async with self._control:
            self._weights.require_settled(ENGINE_NAME)
            self._require_awake()
            # What an unfinished drain took has no state in the engine any more, or will soon have none.
            self._admission.require_openable()
            await self._release_engine(DRAIN)
            self._admission.open_nowait()

    async def sleep(self) -> None:
        """Let the drained engine give its memory back; its weights wait in host memory. Repeating it is allowed.

        Raises:
            IllegalTransition: it was not drained: what requests have in its memory would be lost.
            EngineError: it was not started with `sleep_mode`, or failed; then it counts as asleep until it is woken.
            WaitTimeout: it did not answer in time; the same.
        """
        if not self.options.sleep_mode:
            raise EngineError(f"{ENGINE_NAME} cannot sleep: it was started with sleep_mode=False (needs a CUDA GPU)")
        async with self._control:
            self._admission.require_drained()
            self._asleep = True
            await self._acknowledged("sleep", self._omni.sleep(level=SLEEP_LEVEL))

    async def wake(self) -> None:
        """Give the engine its memory and its weights again; `resume` lets it run.

        Raises:
            EngineError: it failed.
            WaitTimeout: it did not answer in time.
        """
        async with self._control:
            if self._asleep:
                await self._acknowledged("wake_up", self._omni.wake_up())
                self._asleep = False

    async def receive_weights(self, version: int, timeout_s: float) -> int:
        """Receive one whole update by the channel to each worker; later steps carry `version`.

        Raises:
            WeightUpdateError: it did not arrive whole; from now on the engine refuses requests.
            EngineError: the engine sleeps and has no memory for them.
        """
        async with self._control:
            self._require_awake()
            self._weights.require_receivable(ENGINE_NAME)
            self._weights.begun(version, f"the update to version {version}")
            try:
                await self._call("receive_weights", timeout_s, version=version, timeout_s=timeout_s)
            except (EngineError, WaitTimeout) as error:
                self._weights.failed(str(error), version)
                raise WeightUpdateError(f"version {version} did not reach {ENGINE_NAME}: {error}") from error
            self._weights.succeeded(version)
            self._version = version
            return version

    async def count_steps(self) -> int:
        """Denoise steps that the engine has computed, each request's counted, with that of its warm-up."""
        self._num_denoise_steps = await self._call(BOUNDARY, self.options.timeout_s)
        return self._num_denoise_steps

    def weight_channel(self) -> ChannelAddress:
        """Where a sender meets this server's workers."""
        return self._channels.address

    def statistics(self) -> ServerStatistics:
        """Counts."""
        return ServerStatistics(
            gate=self._admission.statistics(),
            version=self._version,
            holders=self._hold.holders,
            num_finished=self._num_finished,
            num_interrupted=self._num_interrupted,
            num_denoise_steps=self._num_denoise_steps,
            last_drain_s=self._admission.last_drain_s,
        )

    def shutdown(self) -> None:
        """Turn away who waits, end the engine."""
        self._admission.reject()
        self._omni.shutdown()
        self._channels.remove()

    async def _run(self, name: str, request: SampleRequest, ticket: Ticket) -> Any:
        output, loop = None, asyncio.get_running_loop()
        arrived: list[Callable[[], None]] = []

        def on_arrival(abort: Callable[[], None]) -> None:
            arrived.append(abort)
            loop.call_soon_threadsafe(self._arrived, ticket, abort)

        try:
            async for item in self._omni.generate(_prompt(request), _sampling_params(name, request, on_arrival), name):
                output = item
        except asyncio.CancelledError:
            # AsyncOmni's own abort may have come to the engine before the request did.
            for abort in arrived:
                abort()
            raise
        if output is None:
            raise EngineError(f"{ENGINE_NAME} ended request {request.request_id!r} without an answer")
        return output

    def _arrived(self, ticket: Ticket, abort: Callable[[], None]) -> None:
        if self._admission.is_arriving(ticket):
            self._admission.arrived(ticket)
        else:  # it was given up on its way, and would run for nobody
            abort()

    async def _interrupt_all(self) -> None:
        """Take every request out of the engine; those that were done by then end by themselves.

        The deadline of a drain may fall between any two lines: the next drain finds what this one has not taken note of
        still with the workers, and what it has in `_interrupted`, until its caller has it.
        """
        unstarted = await self._hold_engine(DRAIN)
        taken: dict[str, bytes] = await self._call(PACK, self.options.timeout_s)
        for name in self._admission.in_flight_ids():  # nobody waits for what a request left that was given up
            if name in taken or name in unstarted:
                self._interrupted[name] = taken.get(name)
        await self._omni.abort(list(self._interrupted))
        await self._call(FORGET, self.options.timeout_s, names=list(taken))

    async def _hold_engine(self, holder: str) -> list[str]:
        """Hold; return the names of the requests in the engine that have not begun."""
        self._hold.hold(holder)
        answer = await self._call(HOLD, self.options.timeout_s)
        self._num_denoise_steps = answer["num_denoise_steps"]
        self._hold.boundary()
        return answer["unstarted"]

    async def _release_engine(self, holder: str) -> None:
        if self._hold.release(holder):
            await self._call(RELEASE, self.options.timeout_s)
            self._hold.running()

    async def _call(self, method: str, limit_s: float, **kwargs: Any) -> Any:
        """The first worker's answer to a call to all, or the engine's own.

        Raises:
            EngineError: a worker reports a failure, or the engine is gone.
            WaitTimeout: no answer in time.
        """
        call = self._omni.collective_rpc(method, timeout=limit_s, kwargs=kwargs)
        [answer] = await _answer(method, call, limit_s, slack_s=SLACK_S)
        reports = answer if isinstance(answer, list) else [answer]
        for report in reports:
            error = getattr(report, "error", None) or (report.get("error") if isinstance(report, dict) else None)
            if error:
                raise EngineError(f"{method!r} failed in {ENGINE_NAME}: {error}")
        return getattr(reports[0], "value", reports[0])

    async def _acknowledged(self, what: str, call: Awaitable[list[Any]]) -> None:
        """Wait for all workers to say that it was done: vllm-omni raises nothing where one says that it was not."""
        for report in await _answer(what, call, self.options.timeout_s):
            if report.status != "SUCCESS":
                raise EngineError(f"{what!r} failed in {ENGINE_NAME}: {report.error_msg}")

    def _require_awake(self) -> None:
        if self._asleep:
            raise EngineError(f"{ENGINE_NAME} sleeps (wake it first)")

    def _require_stepwise(self) -> None:
        if not self.options.adapter.stepwise:
            raise EngineError(
                f"{ENGINE_NAME} runs whole requests and cannot be interrupted between denoise steps "
                "(set rollout.step_execution=true)"
            )


async def _answer(what: str, call: Awaitable[list[Any]], limit_s: float, *, slack_s: float = 0.0) -> list[Any]:
    """AsyncOmni's answer; its own deadline is a bare TimeoutError, an orchestrator that is gone a RuntimeError."""
    who_waits = f"the server waits for {ENGINE_NAME} to answer {what!r}"
    try:
        return await answer_of(call, timeout_s=limit_s + slack_s, who_waits=who_waits)
    except PartialRolloutError:
        raise
    except TimeoutError as error:
        raise WaitTimeout(f"{who_waits}: no answer within {limit_s:g} s") from error
    except RuntimeError as error:
        raise EngineError(f"{what!r} failed in {ENGINE_NAME}: {error}") from error


def _prompt(request: SampleRequest) -> Any:
    prompt: dict[str, Any] = {"prompt": "", "prompt_token_ids": list(request.prompt_ids)}
    if request.negative_ids is not None:
        prompt |= {"negative_prompt": "", "negative_prompt_token_ids": list(request.negative_ids)}
    return prompt


def _sampling_params(name: str, request: SampleRequest, on_arrival: OnArrival) -> OmniDiffusionSamplingParams:
    options = SampleOptions(request.window, request.noise_level, request.sde_type, request.snapshot, name, on_arrival)
    return OmniDiffusionSamplingParams(
        height=request.height,
        width=request.width,
        num_inference_steps=request.num_steps,
        seed=request.seed,
        # A generator on the CPU draws the same noise everywhere, and its state can go to any replica.
        generator_device="cpu",
        true_cfg_scale=request.true_cfg_scale,
        extra_args={OPTIONS_KEY: options},
    )
