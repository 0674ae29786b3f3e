"""Puts off the end of a step's rollout, and stops starting prompts before it, where the cost model says it pays."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from partial_rollout.core.cost_model import (
    BoundaryPlan,
    EngineProgress,
    boundary_in_s,
    given_speed,
    plan_boundary,
    why_not_start,
    with_siblings,
)
from partial_rollout.runtime.bounded import call_bounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from partial_rollout.settings.block import PartialRolloutConfig
    from partial_rollout.train.fleet import ReplicaFleet

PATIENCE = 2.0
"""What is waited for may take this much longer than expected before it is interrupted, or starts go on, after all."""
SLACK_S = 0.05
"""And so much longer, for the calls."""


class Boundary:
    """`look` while a batch is waited for, then `wait` between taking it and draining the engines."""

    def __init__(
        self,
        fleet: ReplicaFleet,
        settings: PartialRolloutConfig,
        note: Callable[[str, dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`note` is told of every event what was decided, and why."""
        self._fleet = fleet
        self._costs, self._timeouts = settings.costs, settings.timeouts
        self._note = note
        self._clock = clock
        self._paused_until_s: float | None = None
        self._was_wrong = False

    def look(self, num_missing: int, num_slots: int, pause: Callable[[bool], None]) -> None:
        """Call `pause(True)` when no prompt pays that starts before the batch is done, `pause(False)` when one does.

        A batch that takes much longer than expected ends the pause as well, and there is no other one in its round.
        `num_missing` prompts are missing from the batch.
        """
        is_paused = self._paused_until_s is not None
        if self._was_wrong or (num_missing < 1 and not is_paused):
            return
        engines = [engine for replica in self._progress() for engine in replica]
        seconds = boundary_in_s(engines, num_missing)
        why = why_not_start(engines, seconds, num_slots // len(engines))
        if self._paused_until_s is not None and self._clock() >= self._paused_until_s:
            self._was_wrong = True
            self._resume(pause, f"the batch takes more than {PATIENCE:g} times as long as expected")
        elif is_paused and not why:
            self._resume(pause, "the batch is no longer expected so soon")
        elif why and seconds is not None and not is_paused:
            self._paused_until_s = self._clock() + PATIENCE * seconds + SLACK_S
            pause(True)
            self._note("starts_paused", {"reason": why})

    def _resume(self, pause: Callable[[bool], None], why: str) -> None:
        self._paused_until_s = None
        pause(False)
        self._note("starts_resumed", {"reason": why})

    def wait(self, num_slots: int) -> dict[str, float]:
        """Let requests end whose interruption would cost more; `num_slots` are those of all engines. Returns metrics.

        No replica is waited for longer than `timeouts.drain_s`.

        Raises:
            WaitTimeout: a server did not answer.
            EngineDead: an engine is gone.
        """
        started_s, was_paused = self._clock(), self._paused_until_s is not None
        self._paused_until_s, self._was_wrong = None, False
        replicas = self._progress()
        num_engines = sum(len(engines) for engines in replicas)
        plans = [[plan_boundary(engine, num_slots // num_engines) for engine in engines] for engines in replicas]
        every = [plan for engines in plans for plan in engines]
        num_late = 0
        if any(plan.ends for plan in every):
            num_late = self._let_end(plans)
        waited_s = self._clock() - started_s
        self._note("boundary", _describe(every, waited_s, num_late))
        metrics = _metrics(every, [engine for engines in replicas for engine in engines], waited_s, num_late)
        return metrics | {"partial_rollout/boundary/starts_paused": float(was_paused)}

    def _let_end(self, plans: list[list[BoundaryPlan]]) -> int:
        request_ids = [_ends(engines) for engines in plans]
        expected_s = [max(plan.wait_s for plan in engines) for engines in plans]
        limits_s = [min(PATIENCE * wait_s + SLACK_S, self._timeouts.drain_s) for wait_s in expected_s]
        return call_bounded(
            lambda: self._fleet.let_end(request_ids, limits_s),
            timeout_s=max(limits_s) + 2 * self._timeouts.call_s,
            who_waits="trainer waits at the boundary for requests to end",
            check=self._fleet.require_health,
        )

    def _progress(self) -> list[list[EngineProgress]]:
        replicas = self._fleet.progress()
        together = iter(with_siblings([engine for engines in replicas for engine in engines]))
        return [[self._with_given_speed(next(together)) for _ in engines] for engines in replicas]

    def _with_given_speed(self, engine: EngineProgress) -> EngineProgress:
        costs = self._costs
        speed = given_speed(engine.speed, costs.decode_step_ms, costs.decode_request_ms, costs.prefill_tokens_per_s)
        return dataclasses.replace(engine, speed=speed)


def _ends(plans: list[BoundaryPlan]) -> list[str]:
    return [request_id for plan in plans for request_id in plan.ends]


def _describe(plans: list[BoundaryPlan], waited_s: float, num_late: int) -> dict[str, Any]:
    return {
        "waited_s": round(waited_s, 4),
        "late": num_late,
        "engines": [plan.reason for plan in plans],
        "requests": [
            {"uid": each.owner, "ends": each.ends, "reason": each.reason} for plan in plans for each in plan.decisions
        ],
    }


def _metrics(
    plans: list[BoundaryPlan], engines: list[EngineProgress], waited_s: float, num_late: int
) -> dict[str, float]:
    ends = sum(len(plan.ends) for plan in plans)
    values = {
        "waited_s": waited_s,
        "gain_s": sum(plan.gain_s for plan in plans),
        "let_end": ends,
        "interrupted": sum(len(plan.decisions) for plan in plans) - ends,
        "late": num_late,
    }
    known = [engine.speed for engine in engines if engine.speed.is_known]
    if known:
        values["prefill_tokens_per_s"] = sum(speed.prefill_tokens_per_s or 0.0 for speed in known)
        values["decode_step_ms"] = 1000 * max(speed.step_s(speed.steps[-1][0]) for speed in known)
        values["reprefilled_share"] = max(speed.reprefilled_share for speed in known)
    return {f"partial_rollout/boundary/{name}": float(value) for name, value in values.items()}
