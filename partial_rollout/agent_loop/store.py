"""The training rows in TransferQueue as a worker needs them; no call waits for ever."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from partial_rollout.agent_loop.rows import prompt_row
from partial_rollout.errors import WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from tensordict import TensorDict

T = TypeVar("T")

PARTITION = "train"


class RowStore(Protocol):
    """Prompt rows and trajectories by key."""

    async def read_prompt(self, uid: str) -> dict[str, Any]:
        """The row of one prompt."""
        ...

    async def clear(self, keys: Sequence[str]) -> None:
        """Forget rows; unknown keys are allowed."""
        ...


class AsyncQueue(Protocol):
    """The part of the `transfer_queue` module used here."""

    async def async_kv_batch_get(self, keys: list[str], partition_id: str) -> TensorDict:
        """Rows of `keys`."""
        ...

    async def async_kv_clear(self, keys: list[str], partition_id: str) -> None:
        """Forget `keys`."""
        ...


class TransferQueueStore:
    """`RowStore` over TransferQueue, whose client waits for ever when the controller is gone.

    Every call raises WaitTimeout after `timeout_s`.
    """

    def __init__(self, queue: Any, worker_id: str, timeout_s: float) -> None:
        """`queue` is the `transfer_queue` module."""
        self._queue: AsyncQueue = queue
        self._worker_id = worker_id
        self._timeout_s = timeout_s

    async def read_prompt(self, uid: str) -> dict[str, Any]:
        """See RowStore."""
        call = self._queue.async_kv_batch_get(keys=[uid], partition_id=PARTITION)
        return prompt_row(await self._bounded(call, f"read prompt {uid!r}"))

    async def clear(self, keys: Sequence[str]) -> None:
        """See RowStore."""
        if keys:
            call = self._queue.async_kv_clear(keys=list(keys), partition_id=PARTITION)
            await self._bounded(call, f"clear {len(keys)} rows from {keys[0]!r} on")

    async def _bounded(self, call: Awaitable[T], what: str) -> T:
        try:
            return await asyncio.wait_for(call, self._timeout_s)
        except asyncio.TimeoutError:  # noqa: UP041 - not the built-in one on Python 3.10
            who = f"worker {self._worker_id} waited {self._timeout_s:g} s"
            raise WaitTimeout(f"{who} for TransferQueue to {what}") from None
