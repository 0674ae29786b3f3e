"""The reward workers as verl's agent-loop worker sees them: a dead one is nobody's fault, and others do its work.

verl's worker picks one of its handles at random and calls `compute_score.remote(data)`. It is given a `RewardPool` as
its only handle.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from partial_rollout.errors import ScoringFailed, WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

MAX_DEATHS_A_CALL = 3
"""Reward workers that may die with one and the same response before the response is taken for the reason."""


class RewardPool:
    """Reward workers by number; a call goes to the one that has the fewest calls.

    call -> at a worker -> answered, or raises what the reward function raised
               |  ^
          died |  | another one lives, or a dead one was replaced
               v  |
             waits, `wait_s` at most
    """

    def __init__(self, workers: Sequence[Any], *, wait_s: float) -> None:
        """`workers` are handles of Ray actors."""
        self._workers: dict[int, Any] = dict(enumerate(workers))
        self._num_calls: dict[int, int] = dict.fromkeys(self._workers, 0)
        self._wait_s = wait_s
        self._replaced = asyncio.Condition()

    @property
    def compute_score(self) -> RewardPool:
        """The pool itself, which is called like an actor: `pool.compute_score.remote(data)`."""
        return self

    async def remote(self, data: Any) -> dict[str, Any]:
        """The score of a response.

        Raises:
            ScoringFailed: one worker after the other died with this response.
            WaitTimeout: all workers are dead, and none was started again.
            Exception: what the reward function raised.
        """
        for _ in range(MAX_DEATHS_A_CALL):
            number, worker = await self._pick()
            try:
                return await self._call(number, worker, data)
            except RayActorError as error:
                logger.warning("reward worker %d died with a response, which another one scores: %s", number, error)
                if self._workers.get(number) is worker:
                    del self._workers[number]
        raise ScoringFailed(f"{MAX_DEATHS_A_CALL} reward workers, one after the other, died while they scored it")

    async def replace(self, number: int, worker: Any) -> None:
        """A dead worker was started again."""
        async with self._replaced:
            self._workers[number] = worker
            self._replaced.notify_all()

    async def _call(self, number: int, worker: Any, data: Any) -> dict[str, Any]:
        """A caller that gives up leaves its call at the worker, which is counted until the worker has answered."""

        async def answer() -> dict[str, Any]:
            return await worker.compute_score.remote(data)

        def end(ended: asyncio.Task[dict[str, Any]]) -> None:
            self._num_calls[number] -= 1
            if not ended.cancelled():
                ended.exception()  # nobody else may be there to look at it

        call = asyncio.create_task(answer(), name=f"call of reward worker {number}")
        self._num_calls[number] += 1
        call.add_done_callback(end)
        return await asyncio.shield(call)

    async def _pick(self) -> tuple[int, Any]:
        if not self._workers:
            async with self._replaced:
                try:
                    await asyncio.wait_for(self._replaced.wait_for(lambda: bool(self._workers)), self._wait_s)
                except asyncio.TimeoutError:  # noqa: UP041 - not the built-in one on Python 3.10
                    who = f"a response has waited {self._wait_s:g} s for a reward worker"
                    raise WaitTimeout(f"{who}: all have died, and none was started again") from None
        number = min(self._workers, key=self._num_calls.__getitem__)
        return number, self._workers[number]
