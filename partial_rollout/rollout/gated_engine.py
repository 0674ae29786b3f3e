"""vLLM's AsyncLLM as verl's server sees it, with `generate` reporting to the gate and streaming in deltas."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm.outputs import CompletionOutput, RequestOutput

    from partial_rollout.core.gate import Ticket
    from partial_rollout.rollout.admission import Admission

CURRENT_TICKET: ContextVar[Ticket] = ContextVar("partial_rollout_ticket")
"""Ticket of the request that the present task carries: verl's server has no argument to hand it through."""


class OutputQueue(Protocol):
    """vLLM's RequestOutputCollector."""

    request_id: str

    def get_nowait(self) -> RequestOutput | None: ...
    async def get(self) -> RequestOutput: ...


class Engine(Protocol):
    """The part of AsyncLLM used here."""

    async def add_request(self, request_id: str, prompt: Any, params: Any, **options: Any) -> OutputQueue: ...
    async def abort(self, request_id: str, internal: bool = False) -> None: ...


class GatedEngine:
    """Everything but `generate` goes straight to the engine.

    `add_request` is called directly instead of `AsyncLLM.generate`, because its return is the only sign that the
    engine has accepted a request; the first output may come much later.
    """

    def __init__(self, engine: Engine, admission: Admission) -> None:
        """Wrap a started engine."""
        self._engine = engine
        self._admission = admission
        self.num_generated_tokens = 0

    def __getattr__(self, name: str) -> Any:
        """Delegate to the engine."""
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yield one output: the whole segment, complete or interrupted."""
        queue = await self._engine.add_request(request_id, prompt, sampling_params, **options)
        self._admission.arrived(CURRENT_TICKET.get())
        finished = False
        try:
            output = await self._collect(queue)
            finished = True
        finally:
            if not finished:
                await self._engine.abort(queue.request_id, internal=True)
        yield output

    async def _collect(self, queue: OutputQueue) -> RequestOutput:
        merged: RequestOutput | None = None
        while merged is None or not merged.finished:
            output = queue.get_nowait() or await queue.get()
            for completion in output.outputs:
                drop_repeated_logprobs(completion)
                self.num_generated_tokens += len(completion.token_ids)
            if merged is None:
                merged = output
            else:
                merged.add(output, aggregate=True)
        return merged


def drop_repeated_logprobs(completion: CompletionOutput) -> None:
    """Cut log-probs that belong to no token of this delta.

    A delta's log-probs are cut with `logprobs[-len(token_ids):]` in vLLM, which is the whole history when an abort
    brings no new token. The surplus is always at the end.
    """
    if completion.logprobs is not None and len(completion.logprobs) > len(completion.token_ids):
        completion.logprobs = completion.logprobs[: len(completion.token_ids)]
