"""vLLM's AsyncLLM as verl's server sees it: `generate` reports to the gate and hands over segments of deltas."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.engine.exceptions import EngineDeadError

from partial_rollout.errors import EngineError
from partial_rollout.rollout.engine_request import EngineRequest, KeptRequests, OutputQueue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from vllm.outputs import RequestOutput

    from partial_rollout.core.engine_meter import EngineMeter
    from partial_rollout.core.gate import Ticket
    from partial_rollout.core.interrupt import InterruptMode, Retained
    from partial_rollout.rollout.admission import Admission

NUM_SETTLING_TURNS = 64
"""Turns of the event loop in which vLLM's front end takes in its last message: 128 requests in each."""


@dataclass(slots=True, eq=False)
class Passage:
    """What one call of the server's `generate` and the engine tell each other: verl's code lies in between."""

    ticket: Ticket
    cache_salt: str | None
    """Under which blocks are found and left in the prefix cache; None leaves it to vLLM."""
    retained: Retained | None
    """What the segment before this one has left behind."""
    went_on: bool = False
    """The request was still in the engine."""
    kept_id: str | None = None
    """The request is still in the engine now."""


CURRENT_PASSAGE: ContextVar[Passage] = ContextVar("partial_rollout_passage")
"""Of the request that the present task carries: verl's server has no argument to hand it through."""


class Engine(Protocol):
    """The part of AsyncLLM used here."""

    errored: bool
    engine_core: Any

    async def add_request(self, request_id: str, prompt: Any, params: Any, **options: Any) -> OutputQueue: ...
    async def abort(self, request_id: str | Sequence[str], internal: bool = False) -> None: ...
    async def pause_generation(self, *, mode: Any, clear_cache: bool) -> None: ...
    async def resume_generation(self) -> None: ...
    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool: ...
    async def sleep(self, level: int = 1) -> None: ...
    async def wake_up(self, tags: list[str] | None = None) -> None: ...
    async def collective_rpc(self, method: str, **options: Any) -> Any: ...


class GatedEngine:
    """Everything but what is below goes straight to the engine.

    `add_request` is called directly instead of `AsyncLLM.generate`, because its return is the only sign that the
    engine has accepted a request; the first output may come much later.
    """

    def __init__(self, engine: Engine, admission: Admission, mode: InterruptMode, meter: EngineMeter) -> None:
        """Wrap a started engine; `meter` is told of every request and its tokens."""
        self._meter = meter
        self._engine = engine
        self._admission = admission
        self._mode = mode
        self._running: dict[str, EngineRequest] = {}
        self.kept = KeptRequests()
        self.num_generated_tokens = 0

    def __getattr__(self, name: str) -> Any:
        """Delegate to the engine."""
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yield one output: the whole segment, complete or interrupted."""
        passage = CURRENT_PASSAGE.get()
        request = self.kept.take(passage.retained.kept_id if passage.retained else None)
        passage.went_on = request is not None
        if request is None:
            request = await self._add(prompt, sampling_params, request_id, passage.cache_salt, options)
        self._running[request.queue.request_id] = request
        self._admission.arrived(passage.ticket)
        self._meter.begin(request_id)
        has_left = False
        try:
            output = await request.segment(lambda num_tokens: self._count(request_id, num_tokens))
            has_left = True
        finally:
            self._meter.end(request_id)
            del self._running[request.queue.request_id]
            if not has_left:
                await self._engine.abort(request.queue.request_id, internal=True)
        if request.is_cut:
            self.kept.keep(request)
            passage.kept_id = request.queue.request_id
        yield output

    async def _add(
        self, prompt: Any, sampling_params: Any, request_id: str, cache_salt: str | None, options: dict[str, Any]
    ) -> EngineRequest:
        if cache_salt is not None:
            prompt = {**prompt, "cache_salt": cache_salt}
        queue = await self._engine.add_request(request_id, prompt, sampling_params, **options)
        return EngineRequest(queue, may_stay=self._mode.stays and not prompt.get("multi_modal_data"))

    def _count(self, request_id: str, num_tokens: int) -> None:
        self.num_generated_tokens += num_tokens
        self._meter.tokens(request_id, num_tokens, time.monotonic())

    async def interrupt(self, *, clear_cache: bool) -> None:
        """Pause the engine and end all segments; requests stay in it or leave it as the mode says."""
        clear_cache = clear_cache and self._mode.clears_cache
        if not self._mode.stays:
            await self._engine.pause_generation(mode="abort", clear_cache=clear_cache)
            return
        await self._engine.pause_generation(mode="keep", clear_cache=clear_cache)
        await self._take_in_everything()
        leaving = [request.queue.request_id for request in self._running.values() if not request.cut()]
        if leaving:
            await self._engine.abort(leaving, internal=True)

    async def _take_in_everything(self) -> None:
        """Let the front end take in all that a paused engine has sent.

        vLLM answers the pause after the last tokens, but a task of its own takes these in, some requests a turn. A
        token that is late would count as one of the next weights.

        Raises:
            EngineDeadError: the engine is gone, and nobody takes in anything.
        """
        messages: asyncio.Queue[Any] = self._engine.engine_core.outputs_queue
        while not messages.empty():
            if self._engine.errored:
                raise EngineDeadError
            await asyncio.sleep(0)
        for _ in range(NUM_SETTLING_TURNS):
            await asyncio.sleep(0)

    async def resume_generation(self) -> None:
        """Let the engine go on with those kept requests that somebody is here for; the others leave it."""
        unclaimed = self.kept.drop_unclaimed()
        if unclaimed:
            await self._engine.abort(unclaimed, internal=True)
        await self._engine.resume_generation()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """As vLLM's, but what is to be retained is not forgotten: salts keep it from everybody else."""
        if self._mode.retains_kv and not self._mode.releases_memory:
            return True
        return await self._engine.reset_prefix_cache(
            reset_running_requests=reset_running_requests,
            reset_connector=reset_connector and not self._mode.releases_memory,
        )

    async def sleep(self, level: int = 1) -> None:
        """As vLLM's, which would also forget what has been moved to host memory; the engine is paused already.

        Raises:
            EngineError: a request still holds blocks, so that later ones would find what memory has lost.
        """
        if self._mode.releases_memory:
            if not await self._engine.reset_prefix_cache(reset_connector=False):
                raise EngineError("the engine cannot release its memory: the prefix cache is in use after the drain")
            await self._engine.collective_rpc("sleep", kwargs={"level": level})
        else:
            await self._engine.sleep(level=level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """As vLLM's; after our own `sleep` the engine does not know that it slept, and stays paused."""
        if self._mode.releases_memory:
            await self._engine.collective_rpc("wake_up", kwargs={"tags": tags})
        else:
            await self._engine.wake_up(tags=tags)
