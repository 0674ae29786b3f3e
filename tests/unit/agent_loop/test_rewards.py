"""Reward workers that die while they score: others score in their place; the workers are stand-ins."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from partial_rollout.agent_loop.rewards import MAX_DEATHS_A_CALL, RewardPool
from partial_rollout.errors import ScoringFailed, WaitTimeout
from tests.unit.runtime.virtual_time import run_virtual, settle, woken

WAIT_S = 600.0


class RewardWorker:
    """A reward worker whose calls end when the test says so."""

    def __init__(self, *, is_dead: bool = False) -> None:
        self.is_dead = is_dead
        self.calls: list[asyncio.Future[dict[str, Any]]] = []

    @property
    def compute_score(self) -> RewardWorker:
        return self

    def remote(self, data: Any) -> asyncio.Future[dict[str, Any]]:
        call = asyncio.get_running_loop().create_future()
        self.calls.append(call)
        if self.is_dead:
            call.set_exception(RayActorError())
        return call

    def die(self) -> None:
        self.is_dead = True
        for call in self.calls:
            call.set_exception(RayActorError())


def score(pool: RewardPool) -> asyncio.Task[dict[str, Any]]:
    return asyncio.create_task(pool.compute_score.remote("a response"))


def test_calls_are_spread_and_those_of_a_dead_worker_go_to_the_others() -> None:
    async def main() -> None:
        first, second = RewardWorker(), RewardWorker()
        pool = RewardPool([first, second], wait_s=WAIT_S)
        calls = [score(pool) for _ in range(4)]
        await settle()
        assert (len(first.calls), len(second.calls)) == (2, 2)
        first.die()
        await settle()
        assert len(second.calls) == 4
        for number, call in enumerate(second.calls):
            call.set_result({"reward_score": number})
        answers = [(await woken(call))["reward_score"] for call in calls]
        assert sorted(answers) == [0, 1, 2, 3]

    run_virtual(main())


def test_without_a_living_worker_a_call_waits_for_one_that_is_started_again() -> None:
    async def main() -> None:
        only = RewardWorker()
        pool = RewardPool([only], wait_s=WAIT_S)
        call = score(pool)
        await settle()
        only.die()
        later = score(pool)
        await settle()
        again = RewardWorker()
        await pool.replace(0, again)
        await settle()
        for each in again.calls:
            each.set_result({"reward_score": 1.0})
        assert await woken(call) == await woken(later) == {"reward_score": 1.0}

    run_virtual(main())


def test_the_wait_for_a_worker_has_a_bound_that_is_not_the_prompts_fault() -> None:
    async def main() -> None:
        with pytest.raises(WaitTimeout, match="600 s for a reward worker: all have died"):
            await RewardPool([RewardWorker(is_dead=True)], wait_s=WAIT_S).remote("a response")

    run_virtual(main())


def test_a_response_that_is_the_end_of_one_worker_after_the_other_has_failed() -> None:
    async def main() -> None:
        workers = [RewardWorker(is_dead=True) for _ in range(MAX_DEATHS_A_CALL + 1)]
        with pytest.raises(ScoringFailed, match=f"{MAX_DEATHS_A_CALL} reward workers"):
            await RewardPool(workers, wait_s=WAIT_S).remote("a response")
        assert sum(len(worker.calls) for worker in workers) == MAX_DEATHS_A_CALL

    run_virtual(main())


def test_a_call_that_its_caller_has_given_up_still_counts_as_its_workers_work() -> None:
    async def main() -> None:
        hung, other = RewardWorker(), RewardWorker()
        pool = RewardPool([hung, other], wait_s=WAIT_S)
        given_up = score(pool)
        await settle()
        given_up.cancel()
        later = [score(pool), score(pool)]
        await settle()
        assert (len(hung.calls), len(other.calls)) == (2, 1)  # not both to the one that hangs
        hung.calls[0].set_exception(ValueError("too late"))
        await settle()
        later.append(score(pool))
        await settle()
        assert (len(hung.calls), len(other.calls)) == (3, 1)
        for call in later:
            call.cancel()

    run_virtual(main())


def test_an_error_of_the_reward_function_is_not_tried_elsewhere() -> None:
    async def main() -> None:
        first, second = RewardWorker(), RewardWorker()
        call = score(RewardPool([first, second], wait_s=WAIT_S))
        await settle()
        first.calls[0].set_exception(ValueError("no answer found"))
        await settle()
        with pytest.raises(ValueError, match="no answer found"):
            await call
        assert second.calls == []

    run_virtual(main())


def test_verls_worker_asks_its_reward_workers_in_the_way_that_the_pool_answers() -> None:
    """The pool stands in verl's list of handles; if verl asks otherwise, scores are computed elsewhere."""
    spec = Path(next(p for p in sys.path if (Path(p) / "verl/experimental/agent_loop/agent_loop.py").exists()))
    source = (spec / "verl/experimental/agent_loop/agent_loop.py").read_text()
    assert "random.choice(self.reward_loop_worker_handles)" in source
    assert "await selected_reward_loop_worker_handle.compute_score.remote(data)" in source
