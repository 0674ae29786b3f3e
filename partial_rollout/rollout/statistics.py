"""What one server reports about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partial_rollout.core.engine_meter import EngineSpeed
    from partial_rollout.core.gate import GateStatistics
    from partial_rollout.core.slots import EngineLoad


@dataclass(frozen=True, slots=True)
class RolloutStatistics:
    """Counts of one server at one moment; token counts since its start."""

    replica_rank: int
    gate: GateStatistics
    version: int
    """Weight version the engine holds."""
    parked: int
    running: int
    """Requests the engine holds, scheduled or waiting for a slot; after a drain none."""
    kept: int
    """Interrupted requests that have stayed in the paused engine."""
    mean_running: float
    """Time-weighted mean of `running` from the gate's last opening until now, or until it closed."""
    num_generated_tokens: int
    """Tokens streamed by the engine; lags by up to `stream_interval` for each running request."""
    num_reprefilled_tokens: int
    """Prompt and response tokens computed again for resumed requests (prefix-cache hits are not counted)."""
    num_aborted: int
    """Requests that came back interrupted."""
    num_finished: int
    """Requests that came back complete."""
    last_drain_s: float
    """Duration of the last drain, 0 before the first."""
    load: EngineLoad
    """By vLLM's own statistics; zeros where they are off."""
    speed: EngineSpeed
    """As measured by the tokens that it hands over."""
