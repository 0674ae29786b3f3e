"""Requests in vLLM's engine whose tokens are handed over in segments, and those that stay there between two segments.

add → running ─ends→ gone
        │  ↑
     cut│  │claimed, then taken by the request that goes on
        ↓  │
       kept ─not claimed when the engine goes on→ aborted
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTERRUPTED = "abort"
"""vLLM's finish reason of a request that was interrupted; verl's server makes "aborted" of it."""


class OutputQueue(Protocol):
    """vLLM's RequestOutputCollector, in which deltas that nobody has taken are one."""

    request_id: str
    output: RequestOutput | Exception | None

    def put(self, output: RequestOutput) -> None: ...
    def get_nowait(self) -> RequestOutput | None: ...
    async def get(self) -> RequestOutput: ...


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request of the engine."""

    queue: OutputQueue
    may_stay: bool
    """Whether it can go on after an interruption; one with images is sent again."""
    has_tokens: bool = False
    """Whether it has handed over any."""
    is_cut: bool = False
    """Whether its present segment was ended while the engine kept the request."""

    async def segment(self, count: Callable[[int], None]) -> RequestOutput:
        """The next segment, to the request's end or to where it is cut.

        `count` is told the number of tokens as they come.
        """
        merged: RequestOutput | None = None
        while merged is None or not merged.finished:
            output = self.queue.get_nowait() or await self.queue.get()
            for completion in output.outputs:
                drop_repeated_logprobs(completion)
                self.has_tokens = self.has_tokens or len(completion.token_ids) > 0
                count(len(completion.token_ids))
            if merged is None:
                merged = output
            else:
                merged.add(output, aggregate=True)
        return merged

    def cut(self) -> bool:
        """End the segment here, after all that the engine has sent; False if the request is not worth keeping.

        A request that has ended by itself stays as it is.
        """
        waiting = self.queue.output
        if isinstance(waiting, Exception) or (waiting is not None and waiting.finished):
            return True
        has_tokens = self.has_tokens or (waiting is not None and any(c.token_ids for c in waiting.outputs))
        if not (self.may_stay and has_tokens):
            return False
        self.is_cut = True
        self.queue.put(_cut_mark(self.queue.request_id))
        return True


class KeptRequests:
    """Requests that wait in a paused engine, by the engine's own id."""

    def __init__(self) -> None:
        """Start with none."""
        self._kept: dict[str, EngineRequest] = {}
        self._claimed: set[str] = set()

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._kept)

    def keep(self, request: EngineRequest) -> None:
        """A request was cut."""
        request.is_cut = False
        self._kept[request.queue.request_id] = request

    @contextlib.contextmanager
    def claimed(self, kept_id: str | None) -> Iterator[None]:
        """Somebody is here to go on with the request, or with none."""
        if kept_id is None:
            yield
            return
        self._claimed.add(kept_id)
        try:
            yield
        finally:
            self._claimed.discard(kept_id)

    def take(self, kept_id: str | None) -> EngineRequest | None:
        """The request, which is running from here on; None if it is not here."""
        return self._kept.pop(kept_id, None) if kept_id is not None else None

    def drop_unclaimed(self) -> list[str]:
        """Forget the requests that nobody is here for; returns the engine's ids."""
        unclaimed = [kept_id for kept_id in self._kept if kept_id not in self._claimed]
        for kept_id in unclaimed:
            del self._kept[kept_id]
        return unclaimed


def _cut_mark(request_id: str) -> RequestOutput:
    """An output without tokens that ends a segment; the queue adds it to those before it."""
    completion = CompletionOutput(
        index=0, text="", token_ids=[], cumulative_logprob=None, logprobs=[], finish_reason=INTERRUPTED
    )
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=[],
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
    )


def drop_repeated_logprobs(completion: CompletionOutput) -> None:
    """Cut log-probs that belong to no token of this delta.

    A delta's log-probs are cut with `logprobs[-len(token_ids):]` in vLLM, which is the whole history when an abort
    brings no new token. The surplus is always at the end.
    """
    if completion.logprobs is not None and len(completion.logprobs) > len(completion.token_ids):
        completion.logprobs = completion.logprobs[: len(completion.token_ids)]
