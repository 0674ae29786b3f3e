"""The engine with denoise steps that a test can count: who joins at which cycle, and after which cycle it holds."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from partial_rollout.diffusion.engine import HoldableEngine, HoldableScheduler
from partial_rollout.diffusion.sample import SampleOptions


@dataclass
class Script:
    """What the next cycles do; in-process engines share it with the test."""

    joins: dict[str, int] = field(default_factory=dict)
    """Request id -> cycle, counted from the first in which anything runs."""
    hold_after: int | None = None
    """Cycles that run before the engine holds by itself."""
    num_cycles: int = 0
    held: threading.Event = field(default_factory=threading.Event)

    def begin(self, *, joins: dict[str, int] | None = None, hold_after: int | None = None) -> None:
        """Start counting anew."""
        self.joins, self.hold_after, self.num_cycles = joins or {}, hold_after, 0
        self.held.clear()


SCRIPT = Script()


class SteppingScheduler(HoldableScheduler):
    def schedule(self):
        if SCRIPT.hold_after is not None and SCRIPT.num_cycles >= SCRIPT.hold_after:
            SCRIPT.hold_after = None
            self.hold()
            SCRIPT.held.set()
        output = super().schedule()
        SCRIPT.num_cycles += not output.is_empty
        return output

    def _can_schedule_waiting(self, state):
        request_id = SampleOptions.of(state.req.sampling_params.extra_args).name.partition("#")[0]
        return SCRIPT.num_cycles >= SCRIPT.joins.get(request_id, 0) and super()._can_schedule_waiting(state)


class SteppingEngine(HoldableEngine):
    scheduler_class = SteppingScheduler
