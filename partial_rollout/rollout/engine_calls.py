"""Waits for an engine's answer that end when there will be none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from partial_rollout.errors import WeightUpdateError
from partial_rollout.rollout.admission import Broadcast

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

HEALTH_INTERVAL_S = 0.5
"""vLLM tells those who wait for an answer nothing of the engine's death; this is how late it is noticed."""


class Mortal(Protocol):
    """The part of AsyncLLM used here."""

    async def check_health(self) -> None: ...


class GivenUpUpdates:
    """Tells the call of a weight update that a training rank has lost its worker.

    vLLM waits for all workers of a call, and a stuck one is known to its rank only.
    """

    def __init__(self) -> None:
        """No update was given up."""
        self._reasons: dict[int, str] = {}
        self._changed = Broadcast()

    def give_up(self, update_number: int, reason: str) -> None:
        """Update `update_number` is lost, whether its call has begun or not."""
        self._reasons.setdefault(update_number, reason)
        self._changed.notify()

    async def wait(self, update_number: int) -> None:
        """Raise WeightUpdateError as soon as update `update_number` is given up."""
        await self._changed.wait_for(lambda: update_number in self._reasons)
        raise WeightUpdateError(self._reasons[update_number])


async def while_healthy(
    engine: Mortal, call: Coroutine[Any, Any, Any], *, unless: Coroutine[Any, Any, None] | None = None
) -> None:
    """Wait for `call`, which never ends if the engine's core dies before it has taken the call.

    Raises:
        EngineDeadError: the engine has died.
        Exception: what `call` raised, or `unless`, which does nothing else.
    """
    tasks = [asyncio.ensure_future(each) for each in (call, unless) if each is not None]
    try:
        while not (
            done := (await asyncio.wait(tasks, timeout=HEALTH_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED))[0]
        ):
            await engine.check_health()
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
