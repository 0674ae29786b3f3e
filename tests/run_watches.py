"""A RunWatch as tests need it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partial_rollout.runtime.run_watch import Interruption, RunWatch

if TYPE_CHECKING:
    from collections.abc import Callable


def make_run_watch(
    manager: Any,
    interruption: Interruption,
    limit_s: float,
    *,
    doing: Callable[[], str] = lambda: "trained step 3",
    step: Callable[[], int | None] = lambda: 3,
    handles_need: str = "json",
) -> RunWatch:
    """One whose manager has `limit_s` to start, and for each answer."""
    return RunWatch(
        manager,
        interruption,
        doing=doing,
        step=step,
        start_s=limit_s,
        answer_s=limit_s,
        handles_need=handles_need,
    )
