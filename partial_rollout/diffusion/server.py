"""One server: vllm-omni's AsyncOmni behind the same gate that text engines have, and the calls that interrupt it.

Two ways to interrupt the requests between denoise steps:

    hold / release           requests stay in the engine's memory; enough for an update of weights
    drain / resume           each request comes back as a snapshot, and new requests wait at the gate; for releasing the
                             engine's memory (sleep and wake in between) and for moving requests to another server

All methods run on one event loop; AsyncOmni runs its engine and the denoise steps in threads behind queues.

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
from partial_rollout.integrations.omni_compat import async_omni_arguments
from partial_rollout.rollout.admission import Admission
from partial_rollout.rollout.ends_with_server import mark_engine
from partial_rollout.runtime.death_watch import own_process
from partial_rollout.runtime.remote_call import answer_of
from partial_rollout.weights.directory import open_channels
from partial_rollout.weights.protocol.engine_weights import EngineWeights

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from partial_rollout.core.gate import GateStatistics, Ticket
    from partial_rollout.diffusion.contract import Adapter
    from partial_rollout.diffusion.sample import OnArrival
    from partial_rollout.diffusion.sampling import SamplingLimits
    from partial_rollout.types import Process
    from partial_rollout.weights.directory import ChannelAddress

ENGINE_NAME = "the diffusion engine"
SLEEP_LEVEL = 1
"""Weights go to host memory; from level 2 vllm-omni, up to 0.28.0, cannot wake."""
WORKER_EXTENSION = "partial_rollout.diffusion.worker_extension.DiffusionWorkerExtension"
DRAIN = "drain"
PACK, FORGET = "pack_samples", "forget_samples"
"""Methods of the worker extension."""
SLACK_S = 5.0
"""A bounded call to the engine ends by itself; the wait for its answer ends this much later."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What one server is started with."""

    model_path: str
    adapter: Adapter
    limits: SamplingLimits
    dtype: str = "bfloat16"
    max_num_seqs: int = 8
    """Most requests in one batch of the engine."""
    num_gpus: int = 1
    engine_backend: str = "partial_rollout.diffusion.engine.HoldableEngine"
    """Import path of the engine class."""
    timeout_s: float = 60.0
    """Most seconds for each hold, drain, release, sleep and wake."""
    sleep_mode: bool = False
    """Whether the engine can give its memory back (`sleep`). Works on CUDA; on a CPU such an engine does not start."""


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """The state of one server and its counts so far."""

    gate: GateStatistics
    version: int
    """Weight version of the engine."""
    holders: list[str]
    """Who wants the engine held: "update", "drain"."""
    num_finished: int
    num_interrupted: int
    num_denoise_steps: int
    """Denoise steps of all requests and the warm-up, up to the last hold, drain or `count_steps`."""


class DiffusionServer:
    """A plain class, used from one event loop; `launch.py` makes an actor of it."""

    def __init__(self, options: ServerOptions) -> None:
        """Start the engine, which takes seconds to minutes."""
        self.options = options
        self._channels = open_channels()
        self._weights, self._hold, self._admission = EngineWeights(), Hold(), Admission()
        self._control = asyncio.Lock()
        self._numbers = itertools.count()
        self._interrupted: dict[str, bytes | None] = {}
        self._waits: dict[str, asyncio.Task[Any]] = {}
        """The wait for each request's image, by its name."""
        self._asleep = False
        self._version = self._num_finished = self._num_interrupted = self._num_denoise_steps = 0
        mark_engine()
        # All servers on this machine would inherit the same port from their parent.
        os.environ.pop("MASTER_PORT", None)
        arguments = async_omni_arguments(
            options.model_path,
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
        with arguments as given:
            self._omni = AsyncOmni(**given)

    async def generate(self, request: SampleRequest) -> SampleResult | Interrupted:
        """Generate one image; an interrupted request comes back with the snapshot from which it can go on.

        Raises:
            DataError: the request would make its whole batch fail.
            EngineError: the engine failed, or holds half an update of weights, with which the image may be made.
        """
        self.options.limits.check(request)
        name = f"{request.request_id}#{next(self._numbers)}"
        ticket = await self._admission.enter(name)
        if ticket is None:
            raise EngineError(f"request {request.request_id!r} was turned away: {ENGINE_NAME} is shutting down")
        openings = self._admission.openings
        try:
            self._weights.require_whole(ENGINE_NAME)
            output = await self._unless_interrupted(name, self._run(name, request, ticket))
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
        """Stop taking denoise steps. Requests stay in the engine, where new ones wait too.

        Raises:
            WaitTimeout: the running step did not end within `timeout_s`.
        """
        self._require_stepwise()
        async with self._control:
            await self._hold_engine(holder)

    async def release(self, holder: str = "update") -> None:
        """Go on taking steps, unless another holder wants the engine held.

        Raises:
            EngineDead: the engine holds half an update of weights.
        """
        async with self._control:
            self._weights.require_settled(ENGINE_NAME)
            await self._release_engine(holder)

    async def drain(self) -> list[str]:
        """Close the gate and interrupt every request; return their names. Afterwards the engine holds no request.

        Raises:
            DrainTimeout: requests are left in the engine after `timeout_s`; names them. The gate stays closed.
        """
        self._require_stepwise()
        async with self._control:
            return await self._admission.close_and_drain(self._interrupt_all, self.options.timeout_s)

    async def resume(self) -> None:
        """Let the engine run and open the gate.

        Raises:
            IllegalTransition: a drain has not finished.
            EngineDead: the engine holds half an update of weights.
            EngineError: the engine sleeps.
        """
        async with self._control:
            self._weights.require_settled(ENGINE_NAME)
            self._require_awake()
            # After an unfinished drain some requests have lost their state in the engine, or are about to.
            self._admission.require_openable()
            await self._release_engine(DRAIN)
            self._admission.open()

    async def sleep(self) -> None:
        """Let the drained engine give its memory back; its weights wait in host memory. May be called again.

        Raises:
            IllegalTransition: the engine was not drained, so requests have state in its memory.
            EngineError: the engine was not started with `sleep_mode`, or it failed, and counts as asleep.
            WaitTimeout: the engine did not answer in time; it counts as asleep.
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
            EngineError: the engine failed.
            WaitTimeout: the engine did not answer in time.
        """
        async with self._control:
            if self._asleep:
                await self._acknowledged("wake_up", self._omni.wake_up())
                self._asleep = False

    async def receive_weights(self, version: int, timeout_s: float, *, is_part: bool = False) -> int:
        """Receive one update of weights by the channel to each worker; later steps carry `version`.

        `is_part`: not all weights come, and the others stay as they are.

        Raises:
            WeightUpdateError: the update did not arrive whole; from now on the engine refuses requests.
            EngineError: the engine sleeps and has no memory for them.
        """
        async with self._control:
            self._require_awake()
            self._weights.require_receivable(ENGINE_NAME)
            self._weights.begun(version, f"the update to version {version}")
            try:
                await self._call("receive_weights", timeout_s, version=version, timeout_s=timeout_s, is_part=is_part)
            except (EngineError, WaitTimeout) as error:
                self._weights.failed(str(error), version)
                raise WeightUpdateError(f"version {version} did not reach {ENGINE_NAME}: {error}") from error
            self._weights.succeeded(version)
            self._version = version
            return version

    async def count_steps(self, limit_s: float | None = None) -> int:
        """Denoise steps that the engine has computed for all requests and its warm-up.

        The engine answers between two steps, within `limit_s`, or within the time of a control call: a sign of life.
        """
        self._num_denoise_steps = await self._call(BOUNDARY, limit_s or self.options.timeout_s)
        return self._num_denoise_steps

    def place(self) -> Process:
        """The process of the server. Its engine runs in it too; a worker that vllm-omni 0.24 starts ends with it."""
        return own_process("", "")

    def weight_channel(self) -> ChannelAddress:
        """The address at which the trainer's senders meet this server's workers."""
        return self._channels.address

    def statistics(self) -> ServerStatistics:
        """The server's state and counts; asks the engine nothing."""
        return ServerStatistics(
            gate=self._admission.statistics(),
            version=self._version,
            holders=self._hold.holders,
            num_finished=self._num_finished,
            num_interrupted=self._num_interrupted,
            num_denoise_steps=self._num_denoise_steps,
        )

    def shutdown(self) -> None:
        """Turn away the waiting requests, then end the engine."""
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
            # AsyncOmni's own abort may have reached the engine before the request did, and then does nothing.
            for abort in arrived:
                abort()
            raise
        if output is None:
            raise EngineError(f"{ENGINE_NAME} ended request {request.request_id!r} without an answer")
        return output

    async def _unless_interrupted(self, name: str, run: Coroutine[Any, Any, Any]) -> Any:
        """The output of `run`; None if a drain has ended it."""
        self._waits[name] = asyncio.ensure_future(run)
        try:
            return await self._waits[name]
        except asyncio.CancelledError:
            if name not in self._interrupted:
                raise  # whoever waits for the image has given it up
            return None
        finally:
            del self._waits[name]

    def _arrived(self, ticket: Ticket, abort: Callable[[], None]) -> None:
        if self._admission.is_arriving(ticket):
            self._admission.arrived(ticket)
        else:  # nobody waits for the request any more: its caller gave up while it was on its way
            abort()

    async def _interrupt_all(self) -> None:
        """Take every request out of the engine; those that are finished by then end by themselves.

        The time for a drain may be over between any two lines. Then the next drain finds the remaining requests at the
        workers, and those that this one has noted in `_interrupted` until their callers have taken them.
        """
        unstarted = await self._hold_engine(DRAIN)
        taken: dict[str, bytes] = await self._call(PACK, self.options.timeout_s)
        for name in self._admission.in_flight_ids():  # a request that was given up has state, and no caller
            if name in taken or name in unstarted:
                self._interrupted[name] = taken.get(name)
        # AsyncOmni aborts what nobody waits for. Its own `abort` does not end the wait in its version 0.24.
        waits = [self._waits[name] for name in self._interrupted if name in self._waits]
        for wait in waits:
            wait.cancel()
        if waits:
            await asyncio.wait(waits, timeout=self.options.timeout_s)
        await self._call(FORGET, self.options.timeout_s, names=list(taken))

    async def _hold_engine(self, holder: str) -> list[str]:
        """Hold the engine for `holder`; return the names of its requests that have not begun."""
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
        """Wait for all workers to report success of `what`; vllm-omni raises nothing if one reports a failure."""
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
    """AsyncOmni's answer. AsyncOmni raises TimeoutError after its own deadline, RuntimeError if its engine is gone."""
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
        # A generator on the CPU draws the same noise on every machine, and its state can go to any server.
        generator_device="cpu",
        true_cfg_scale=request.true_cfg_scale,
        extra_args={OPTIONS_KEY: options},
    )
