"""Collects what happened to one trajectory's generate calls, whatever the agent loop does with their outputs.

An agent loop of several turns calls `generate` several times and forwards only some of the extra fields. The recorder
sits between agent loop and client and adds up interruptions and weight versions per trajectory, in a context variable
that every task of a trajectory inherits.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from partial_rollout.core.resume import extend
from partial_rollout.types import ContextSpan, VersionSpan


@dataclass(slots=True)
class TrajectoryTrace:
    """Sums over the generate calls of one trajectory."""

    num_interruptions: int = 0
    num_reprefilled_tokens: int = 0
    spans: list[VersionSpan] = field(default_factory=list)
    context_spans: list[ContextSpan] = field(default_factory=list)

    def add(self, extra_fields: dict[str, Any]) -> None:
        """Add one finished generate call."""
        self.num_interruptions += int(extra_fields.get("num_interruptions", 0))
        self.num_reprefilled_tokens += int(extra_fields.get("num_reprefilled_tokens", 0))
        for version, num_tokens in extra_fields.get("version_spans", ()):
            extend(self.spans, VersionSpan(int(version), int(num_tokens)))
        for kv_version, origin, num_tokens in extra_fields.get("context_spans", ()):
            extend(self.context_spans, ContextSpan(int(kv_version), str(origin), int(num_tokens)))


_current_trace: ContextVar[TrajectoryTrace | None] = ContextVar("trajectory_trace", default=None)


def start_trace() -> TrajectoryTrace:
    """Begin a trace for the current task and everything it starts."""
    trace = TrajectoryTrace()
    _current_trace.set(trace)
    return trace


class RecordingClient:
    """An LLM client that adds every generate call to the current trace; everything else is the wrapped client's."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.num_in_flight = 0
        """Generate calls that have not returned; while the gate is closed, the parked ones."""

    def __getattr__(self, name: str) -> Any:
        """Delegate to the wrapped client."""
        return getattr(self._client, name)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Same contract as the wrapped client's `generate`."""
        self.num_in_flight += 1
        try:
            output = await self._client.generate(*args, **kwargs)
        finally:
            self.num_in_flight -= 1
        trace = _current_trace.get()
        if trace is not None:
            trace.add(output.extra_fields)
        return output
