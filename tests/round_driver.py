"""Drives a prompt queue through rounds, without waiting and without a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.staleness import UNBOUNDED, StalenessBound
from partial_rollout.types import Claim, PromptMeta, TakeResult, TrajectorySummary

if TYPE_CHECKING:
    from partial_rollout.core.queue.tail import RoundPlan, TailPolicy

BATCH = 4
MAX_ATTEMPTS = 2


def summaries(uid: str, min_version: int = 0) -> list[TrajectorySummary]:
    return [TrajectorySummary(f"{uid}_0_0", prompt_len=1, response_len=1, min_version=min_version, max_version=99)]


class Trainer:
    """Drives a queue as the trainer does, one round after the other, and counts the steps of every prompt."""

    def __init__(self, policy: TailPolicy, bound: StalenessBound = UNBOUNDED) -> None:
        self.queue = PromptQueue(policy, MAX_ATTEMPTS, lambda: 0.0, bound)
        self.claims: dict[str, Claim] = {}
        self.step = 0
        self.admitted: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.kinds: list[str] = []

    def begin(self) -> RoundPlan:
        self.step += 1
        plan = self.queue.begin_round()
        self.kinds.append(plan.kind)
        self.admit(plan.num_fresh)
        return plan

    def admit(self, num: int) -> None:
        fresh = [f"p{len(self.admitted) + i}" for i in range(num)]
        self.queue.admit([PromptMeta(uid, 1, self.step) for uid in fresh])
        self.admitted |= dict.fromkeys(fresh, self.step)

    def claim(self, free_slots: int = 1000) -> list[str]:
        claims = self.queue.claim("w0", free_slots)
        self.claims |= {claim.uid: claim for claim in claims}
        return [claim.uid for claim in claims]

    def finish(self, *uids: str) -> None:
        for uid in uids:
            self.queue.finish(self.claims.pop(uid), summaries(uid))

    def fail(self, uid: str) -> None:
        if not self.queue.fail(self.claims.pop(uid)):
            self.ended[uid] = self.step

    def take(self) -> TakeResult:
        result = self.queue.take(BATCH)
        self.ended |= dict.fromkeys((group.uid for group in result.groups), self.step)
        return result

    def restart(self, policy: TailPolicy | None = None, bound: StalenessBound | None = None) -> None:
        old = self.queue
        policy, bound = policy or old.policy, bound or old.bound
        self.queue = PromptQueue.restore(old.snapshot(), policy, MAX_ATTEMPTS, lambda: 0.0, bound)
        self.queue.version = old.version
        self.claims = {}
