"""An engine's speeds and its requests' progress, learned from the tokens it hands over. Pure: times are passed in."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from dataclasses import dataclass

from partial_rollout.core.cost_model import EngineProgress, EngineSpeed, RunningRequest

NUM_LENGTHS = 1024
"""Response lengths that are remembered: some batches, so that estimates follow the policy."""
NUM_OWNERS = 1024
"""Prompts whose finished responses are remembered; more than are usually in flight."""
SMOOTHING = 0.1
"""Weight of a new measurement: some tens of them follow a change."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a request goes on with."""

    owner: str = ""
    """Uid of the training prompt; empty for any other request."""
    num_tokens: int = 0
    """Response tokens of segments before, which the request's prompt holds."""


NOBODY = Origin()


@dataclass(slots=True)
class _Request:
    origin: Origin
    num_prompt: int
    max_tokens: int
    since_s: float
    waits: bool
    """For its prefill, and so for its first token."""
    num_tokens: int = 0

    @property
    def num_done(self) -> int:
        return self.origin.num_tokens + self.num_tokens


@dataclass(slots=True)
class _Average:
    """Exponential average of a batch size and of the seconds of a decode step with it."""

    batch: float
    step_s: float

    def add(self, batch: float, step_s: float) -> None:
        self.batch += SMOOTHING * (batch - self.batch)
        self.step_s += SMOOTHING * (step_s - self.step_s)


class EngineMeter:
    """begin -> tokens, again and again -> end

    The seconds of a decode step are those between two hand-overs of a request, by its tokens: they hold whatever the
    engine did besides, so they are what a token really takes at that load. One average for each power of two of the
    batch size. Prefill is measured from a request's start to its first token, over all that wait for theirs, by the
    tokens that no cache had.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._steps: dict[int, _Average] = {}
        self._recent: deque[int] = deque(maxlen=NUM_LENGTHS)
        self._lengths: list[int] = []
        self._finished: OrderedDict[str, list[int]] = OrderedDict()
        self._num_prefilling = 0
        self._prefilling_since_s = 0.0
        self._prefill_s = self._prefilled = 0.0
        self._num_resumed = self._num_reprefilled = 0

    def begin(
        self,
        request_id: str,
        now_s: float,
        origin: Origin,
        *,
        num_prompt: int,
        max_tokens: int,
        stayed: bool = False,
    ) -> None:
        """A request enters the engine, or goes on in it if it `stayed` there.

        What `origin` goes on with is among the `num_prompt` tokens.
        """
        self._requests[request_id] = _Request(origin, num_prompt, max_tokens, now_s, waits=not stayed)
        if not stayed:
            self._prefilling(+1, now_s)

    def tokens(self, request_id: str, num_tokens: int, now_s: float, num_cached: int = 0) -> None:
        """The engine has handed over tokens; requests that did not `begin` are left out.

        Of the request's prompt `num_cached` tokens were found in a cache.
        """
        request = self._requests.get(request_id)
        if request is None or num_tokens < 1:
            return
        if request.waits:
            request.waits = False
            self._prefilling(-1, now_s)
            self._prefilled += max(0, request.num_prompt - num_cached)
        elif request.num_tokens:
            self._decoded((now_s - request.since_s) / num_tokens)
        request.num_tokens += num_tokens
        request.since_s = now_s

    def end(self, request_id: str, now_s: float, *, is_complete: bool) -> None:
        """The request has left the engine, with its response complete or interrupted."""
        request = self._requests.pop(request_id)
        if request.waits:
            self._prefilling(-1, now_s)
        if is_complete:
            self._remember(request)

    def resumed(self, num_context: int, num_cached: int) -> None:
        """An interrupted request went on from `num_context` tokens, of which so many were found in a cache."""
        self._num_resumed += num_context
        self._num_reprefilled += num_context - num_cached

    def progress(self) -> EngineProgress:
        """What decisions need."""
        running = tuple(
            RunningRequest(
                request_id=request_id,
                owner=each.origin.owner,
                num_context=each.num_prompt + each.num_tokens,
                num_done=each.num_done,
                num_left=each.max_tokens - each.num_tokens,
            )
            for request_id, each in self._requests.items()
        )
        return EngineProgress(self.speed(), running, dict(self._finished), tuple(self._lengths))

    def speed(self) -> EngineSpeed:
        """What has been measured so far."""
        steps = sorted((average.batch, average.step_s) for average in self._steps.values())
        return EngineSpeed(
            steps=tuple(steps),
            prefill_tokens_per_s=self._prefilled / self._prefill_s if self._prefill_s else None,
            reprefilled_share=self._num_reprefilled / self._num_resumed if self._num_resumed else 1.0,
        )

    def _decoded(self, step_s: float) -> None:
        batch = len(self._requests)
        average = self._steps.setdefault(batch.bit_length(), _Average(batch, step_s))
        average.add(batch, step_s)

    def _prefilling(self, change: int, now_s: float) -> None:
        if self._num_prefilling:
            self._prefill_s += now_s - self._prefilling_since_s
        self._num_prefilling += change
        self._prefilling_since_s = now_s

    def _remember(self, request: _Request) -> None:
        if len(self._recent) == NUM_LENGTHS:
            self._lengths.remove(self._recent[0])
        self._recent.append(request.num_done)
        insort(self._lengths, request.num_done)
        owner = request.origin.owner
        if owner:
            self._finished.setdefault(owner, []).append(request.num_done)
            if len(self._finished) > NUM_OWNERS:
                self._finished.popitem(last=False)
