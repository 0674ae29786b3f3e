"""Prompt queues for tests, and what goes into them."""

from __future__ import annotations

from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.tail import Partial
from partial_rollout.types import Claim, PromptMeta, TrajectorySummary

GROUP = 2


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def prompts(*uids: str, n: int = GROUP) -> list[PromptMeta]:
    return [PromptMeta(uid, n, global_step=1, source_index=f"row-{uid}") for uid in uids]


def trajectories(uid: str, n: int = GROUP) -> list[TrajectorySummary]:
    return [
        TrajectorySummary(f"{uid}_{i}_0", prompt_len=3, response_len=5, min_version=0, max_version=1) for i in range(n)
    ]


def make_queue(*uids: str, capacity: int = 16, max_attempts: int = 2, clock: ManualClock | None = None) -> PromptQueue:
    queue = PromptQueue(Partial(capacity), max_attempts, clock or ManualClock())
    queue.admit(prompts(*uids))
    return queue


def claim_all(queue: PromptQueue, worker_id: str = "w0") -> list[Claim]:
    return queue.claim(worker_id, free_slots=1000)


def uids(claims: list[Claim]) -> list[str]:
    return [claim.uid for claim in claims]
