"""What a claim loop talks to, without Ray, TransferQueue and verl: every call is noted in one ordered list."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from partial_rollout.agent_loop.claim_loop import ClaimLoop
from partial_rollout.types import Claim, FinishResult, ReleaseResult, TrajectorySummary, WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

WORKER = "worker-0"


CLAIM_IDS = itertools.count(1)


def make_claim(uid: str = "a", num_trajectories: int = 2, attempt: int = 1) -> Claim:
    return Claim(uid, next(CLAIM_IDS), WORKER, num_trajectories, 1, attempt)


def make_summary(key: str) -> TrajectorySummary:
    return TrajectorySummary(key=key, prompt_len=1, response_len=1, min_version=1, max_version=1)


class Gates:
    """One future per trajectory: the test says how it ends, before or after it starts."""

    def __init__(self) -> None:
        self._futures: dict[str, asyncio.Future[None]] = {}

    def __getitem__(self, key: str) -> asyncio.Future[None]:
        return self._futures.setdefault(key, asyncio.get_running_loop().create_future())

    def open(self, *keys: str) -> None:
        for key in keys:
            self[key].set_result(None)

    def fail(self, key: str, error: BaseException) -> None:
        self[key].set_exception(error)


async def _pass(claim_id: int) -> None:
    """Nothing holds a trajectory back."""


class FakeWorker:
    """Manager, row store and trajectories in one, so that the order of calls between them is seen."""

    def __init__(self, num_slots: int = 4, max_attempts: int = 2) -> None:
        self.calls: list[str] = []
        self.gates = Gates()
        self.claims: asyncio.Queue[Claim] = asyncio.Queue()
        self.on_finish: Callable[[], None] = lambda: None
        self.on_prepare: Callable[[], None] = lambda: None
        self.free_slots: list[int] = []
        self.running = 0
        self.forgotten: list[str] = []
        self.given_up: list[str] = []
        self.noted: list[tuple[str, str, float | None]] = []
        self.flat: set[str] = set()
        """Prompts whose groups the manager finds without spread."""
        self.before_trajectory: Callable[[int], Awaitable[None]] = _pass
        self._max_attempts = max_attempts
        self.loop = ClaimLoop(WORKER, self, self, worker=self, num_slots=num_slots)

    # ---- manager ----

    async def claim(self, worker_id: str, free_slots: int, timeout_s: float) -> list[Claim]:
        self.free_slots.append(free_slots)
        return [await self.claims.get()]

    async def finish_many(self, groups: Sequence[tuple[Claim, Sequence[TrajectorySummary]]]) -> FinishResult:
        self.on_finish()
        self.calls += [f"finish {claim.uid}: {' '.join(item.key for item in items)}" for claim, items in groups]
        return FinishResult(no_spread=tuple(claim.uid for claim, _ in groups if claim.uid in self.flat))

    async def report_worker(self, worker_id: str, status: WorkerStatus) -> None:
        self.last_status = status

    async def fail(self, claim: Claim, reason: str) -> bool:
        self.calls.append(f"fail {claim.uid}: {reason}")
        return claim.attempt < self._max_attempts

    async def drop(self, claim: Claim, reason: str) -> None:
        self.calls.append(f"drop {claim.uid}: {reason}")

    async def give_back(self, claim: Claim) -> None:
        self.calls.append(f"give back {claim.uid}")

    async def expire(self, claim: Claim) -> bool:
        self.calls.append(f"expire {claim.uid}")
        return claim.attempt < self._max_attempts

    async def release_worker(self, worker_id: str) -> ReleaseResult:
        self.calls.append(f"release {worker_id}")
        return ReleaseResult(given_back=("a",))

    # ---- row store ----

    async def read_prompt(self, uid: str) -> dict[str, Any]:
        return {"index": 0, "raw_prompt": []}

    async def clear(self, keys: Sequence[str]) -> None:
        if keys:
            self.calls.append(f"clear {' '.join(keys)}")

    # ---- trajectories ----

    @property
    def requests_in_flight(self) -> int:
        return self.running

    def forget(self, claim: Claim) -> None:
        self.forgotten.append(claim.uid)

    def give_up(self, claim: Claim) -> None:
        self.given_up.append(claim.uid)

    def note_dropped(self, claim: Claim, reason: str, metric: float | None = None) -> None:
        self.noted.append((claim.uid, reason, metric))

    def prepare(self, claim: Claim, row: dict[str, Any]) -> dict[str, Any]:
        self.on_prepare()
        return row

    async def generate(self, claim: Claim, row: dict[str, Any], session: int) -> list[TrajectorySummary]:
        key = f"{claim.uid}_{session}"
        self.running += 1
        try:
            await self.before_trajectory(claim.claim_id)
            await self.gates[key]
        finally:
            self.running -= 1
        return [make_summary(f"{key}_0")]
