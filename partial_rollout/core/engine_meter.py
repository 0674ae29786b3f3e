"""How long an engine's decode step takes at each load, measured on the tokens it hands over. Pure: no clock."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

SMOOTHING = 0.02
"""Weight of a decode step, once 50 have been measured: a step that waits for a prefill hardly counts, and after a
change some tens bring the average to the new value."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Seconds of a decode step by the number of requests in it."""

    steps: tuple[tuple[float, float], ...] = ()
    """Pairs of number of requests and seconds, ascending; without any measurement empty."""

    def step_s(self, batch: float) -> float:
        """Seconds of a decode step of `batch` requests.

        Between two measured sizes it is interpolated; beyond the largest one the last slope goes on.
        """
        sizes = [size for size, _ in self.steps]
        at = bisect_left(sizes, batch)
        if at == 0 or len(sizes) == 1:
            return self.steps[0][1]
        (low, low_s), (high, high_s) = self.steps[min(at, len(sizes) - 1) - 1 : min(at, len(sizes) - 1) + 1]
        return max(low_s, low_s + (high_s - low_s) * (batch - low) / (high - low))

    def tokens_per_s(self, batch: float) -> float:
        """Tokens that `batch` requests generate in a second."""
        return batch / self.step_s(batch)


@dataclass(slots=True)
class _Average:
    """Exponential average of a batch size and of the seconds of a decode step with it."""

    batch: float = 0.0
    step_s: float = 0.0
    num_steps: float = 0.0
    """Decode steps so far. A request that hands over a token has measured its share of one, also beside requests that
    wait inside the engine: these count in the batch."""

    def add(self, batch: int, step_s: float, num_tokens: int) -> None:
        share = num_tokens / batch
        self.num_steps += share
        weight = min(1.0, share * max(SMOOTHING, 1 / self.num_steps))
        self.batch += weight * (batch - self.batch)
        self.step_s += weight * (step_s - self.step_s)


class EngineMeter:
    """Averages the seconds of an engine's decode steps, one average for each power of two of the batch size.

    begin -> tokens, again and again -> end

    A measurement is the time between two hand-overs of one request, divided by the number of tokens handed over. It
    includes whatever else the engine did meanwhile, so it is what a token really takes at that load. A request's first
    tokens are not measured, because the request waited for its prefill.

    >>> meter = EngineMeter()
    >>> meter.begin("request-1")
    >>> for now_s in (0.0, 0.5, 1.0):
    ...     meter.tokens("request-1", num_tokens=10, now_s=now_s)
    >>> meter.speed().step_s(batch=1)
    0.05
    """

    def __init__(self) -> None:
        self._since_s: dict[str, float | None] = {}
        """By running request: when it last handed over tokens; None before its first ones."""
        self._steps: dict[int, _Average] = {}

    def begin(self, request_id: str) -> None:
        """A request enters the engine, or goes on in it."""
        self._since_s[request_id] = None

    def tokens(self, request_id: str, num_tokens: int, now_s: float) -> None:
        """The engine has handed over tokens; a request that did not `begin` is left out."""
        if request_id not in self._since_s or num_tokens < 1:
            return
        since_s, self._since_s[request_id] = self._since_s[request_id], now_s
        if since_s is not None:
            self._decoded((now_s - since_s) / num_tokens, num_tokens)

    def end(self, request_id: str) -> None:
        """The request has left the engine, or waits in the paused one."""
        del self._since_s[request_id]

    def speed(self) -> EngineSpeed:
        """What has been measured so far."""
        return EngineSpeed(tuple(sorted((average.batch, average.step_s) for average in self._steps.values())))

    def _decoded(self, step_s: float, num_tokens: int) -> None:
        batch = len(self._since_s)
        self._steps.setdefault(batch.bit_length(), _Average()).add(batch, step_s, num_tokens)
