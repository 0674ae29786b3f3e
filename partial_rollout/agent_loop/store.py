"""The training rows in TransferQueue as a worker needs them; no call waits for ever."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import torch

from partial_rollout.errors import TransferQueueSilent, WaitTimeout
from partial_rollout.runtime.remote_call import answer_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence

    from tensordict import TensorDict

PARTITION = "train"
NUM_READS = 32
"""Prompts that all workers together read at once, and each at least one: behind hundreds of them a sound TransferQueue
takes longer than it may."""


class RowStore:
    """Rows of prompts and trajectories by key, in TransferQueue.

    TransferQueue's own client waits for ever when its controller is gone; here every call raises TransferQueueSilent
    after `timeout_s`.
    """

    def __init__(self, queue: Any, worker_id: str, timeout_s: float, num_workers: int) -> None:
        """`queue` is the `transfer_queue` module; `num_workers` read from it."""
        self._queue = queue
        self._worker_id = worker_id
        self._timeout_s = timeout_s
        self._reads = asyncio.Semaphore(max(1, NUM_READS // num_workers))

    async def read_prompt(self, uid: str) -> dict[str, Any]:
        """The row of one prompt as a plain dict, which agent loops take."""
        async with self._reads:
            call = self._queue.async_kv_batch_get(keys=[uid], partition_id=PARTITION)
            return _only_row(await self._bounded(call, f"read prompt {uid!r}"))

    async def clear(self, keys: Sequence[str]) -> None:
        """Forget rows; unknown keys are allowed."""
        if keys:
            call = self._queue.async_kv_clear(keys=list(keys), partition_id=PARTITION)
            await self._bounded(call, f"clear {len(keys)} rows from {keys[0]!r} on")

    async def _bounded(self, call: Awaitable[Any], what: str) -> Any:
        who, silent = f"worker {self._worker_id}", f"for TransferQueue to {what}"
        try:
            return await answer_of(call, timeout_s=self._timeout_s, who_waits=f"{who} waits {silent}")
        except WaitTimeout:
            raise TransferQueueSilent(f"{who} waited {self._timeout_s:g} s {silent}") from None


def _only_row(batch: TensorDict) -> dict[str, Any]:
    """The single row of `batch`: tensors lose the batch dimension, other values are unwrapped."""
    names = cast("Iterable[str]", batch.keys())  # only nested keys, which are left out, are tuples
    return {name: _unwrap(batch.get(name)) for name in names}


def _unwrap(column: Any) -> Any:
    first = column[0]
    return first if isinstance(first, torch.Tensor) else getattr(first, "data", first)
