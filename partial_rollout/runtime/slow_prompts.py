"""What the prompt manager says of prompts that take long."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partial_rollout.core.queue.queue import PromptQueue

logger = logging.getLogger(__name__)


def warn_of_long_running(queue: PromptQueue, limit_s: float) -> None:
    """Log each claim that has been ongoing for more than `limit_s`, once."""
    for claim, age_s in queue.take_long_running(limit_s):
        logger.warning(
            "prompt %r is ongoing at worker %r for %.1f s (attempt %d; time held back is not counted), more than "
            "partial_rollout.timeouts.batch_s=%g: its unfinished trajectories keep their slots",
            claim.uid,
            claim.worker_id,
            age_s,
            claim.attempt,
            limit_s,
        )


def describe_wait(queue: PromptQueue, num_groups: int, timeout_s: float) -> str:
    """Why a wait for `num_groups` groups that ended after `timeout_s` was in vain, as far as the queue knows."""
    now = queue.statistics()
    oldest = (
        f"oldest ongoing prompt {now.oldest_ongoing_uid!r} at worker {now.oldest_ongoing_worker!r} "
        f"for {now.oldest_ongoing_s:.1f} s"
        if now.ongoing
        else f"no prompt is ongoing, the next one needs {queue.next_group_size} free slots"
    )
    num_due = queue.num_due(num_groups)
    due = f"; {num_due} of them must finish first, by tail.max_staleness" if num_due else ""
    return (
        f"take_batch waited {timeout_s:.1f} s for {num_groups} groups: pending {now.pending}, "
        f"ongoing {now.ongoing}, done {now.done}, deferred {now.deferred}; {oldest}{due}"
    )
