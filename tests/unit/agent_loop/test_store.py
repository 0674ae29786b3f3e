"""Calls to TransferQueue end, whatever its controller does."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from partial_rollout.agent_loop.store import RowStore
from partial_rollout.errors import TransferQueueSilent
from tests.unit.runtime.virtual_time import run_virtual


class Queue:
    def __init__(self) -> None:
        self.cleared = []

    async def async_kv_batch_get(self, keys, partition_id):
        row = {"index": torch.tensor([7]), "raw_prompt": NonTensorStack("hello")}
        return TensorDict(row, batch_size=[1])

    async def async_kv_clear(self, keys, partition_id):
        self.cleared.append((partition_id, keys))


class Opened(Queue):
    """Notes what it is asked for, and answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.may_answer = [], asyncio.Event()

    async def async_kv_batch_get(self, keys, partition_id):
        self.keys += keys
        await self.may_answer.wait()
        return await super().async_kv_batch_get(keys, partition_id)


class LostQueue:
    async def async_kv_batch_get(self, keys, partition_id):
        await asyncio.Event().wait()

    async_kv_clear = async_kv_batch_get


class SlowQueue(Queue):
    """Answers one question a second, however many are open."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = asyncio.Lock()

    async def async_kv_batch_get(self, keys, partition_id):
        async with self.turn:
            await asyncio.sleep(1)
            return await super().async_kv_batch_get(keys, partition_id)


def test_a_queue_that_answers_slower_than_prompts_are_asked_for_is_not_taken_for_a_dead_one():
    """A worker whose slots are all free claims hundreds of prompts at the same moment."""

    async def main():
        store = RowStore(SlowQueue(), "w3", 60, num_workers=1)
        rows = await asyncio.gather(*(store.read_prompt(f"p{number}") for number in range(512)))
        assert len(rows) == 512
        assert asyncio.get_running_loop().time() == 512

    run_virtual(main())


@pytest.mark.parametrize(("num_workers", "num_open"), [(1, 32), (8, 4), (100, 1)])
async def test_all_workers_together_read_as_many_prompts_at_once_as_one_may(num_workers: int, num_open: int):
    opened = Opened()
    store = RowStore(opened, "w3", 60, num_workers)
    reads = asyncio.gather(*(store.read_prompt(f"p{number}") for number in range(64)))
    for _ in range(2 * 64):  # turns of the event loop, in which all that may be asked for is
        await asyncio.sleep(0)
    assert len(opened.keys) == num_open
    opened.may_answer.set()
    assert len(await reads) == 64


async def test_rows_are_plain_dicts_and_only_given_keys_are_cleared():
    queue = Queue()
    store = RowStore(queue, "w3", 60, num_workers=1)
    assert await store.read_prompt("a") == {"index": torch.tensor(7), "raw_prompt": "hello"}
    await store.clear(["a_0_0", "a_1_0"])
    await store.clear([])
    assert queue.cleared == [("train", ["a_0_0", "a_1_0"])]


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda store: store.read_prompt("a"), "read prompt 'a'"),
        (lambda store: store.clear(["a_0_0", "a_1_0"]), "clear 2 rows from 'a_0_0' on"),
    ],
)
def test_a_queue_that_never_answers_is_named(call, what):
    with pytest.raises(TransferQueueSilent, match=f"worker w3 waited 60 s for TransferQueue to {what}"):
        run_virtual(call(RowStore(LostQueue(), "w3", 60, num_workers=1)))


class Blocked(Queue):
    """A tool blocks the event loop for two minutes; the answer has come, and takes a few turns to get through."""

    async def async_kv_batch_get(self, keys, partition_id):
        loop = asyncio.get_running_loop()
        loop._jumping.now_s += 120
        for _ in range(5):
            await asyncio.sleep(0)
        return await super().async_kv_batch_get(keys, partition_id)


def test_the_time_in_which_the_event_loop_was_blocked_is_not_the_queues():
    row = run_virtual(RowStore(Blocked(), "w3", 60, num_workers=1).read_prompt("a"))
    assert row["raw_prompt"] == "hello"
