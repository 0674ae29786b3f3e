"""Waiting for an actor from an event loop: bounded, and the error says who waited for whom."""

from __future__ import annotations

import asyncio

import pytest

from partial_rollout.errors import WaitTimeout
from partial_rollout.runtime.remote_call import answer_of


async def test_an_answer_in_time_is_returned():
    answer = asyncio.get_running_loop().create_future()
    answer.set_result(3)
    assert await answer_of(answer, timeout_s=5.0, who_waits="worker waits for the manager") == 3


async def test_what_the_call_raised_is_raised():
    answer = asyncio.get_running_loop().create_future()
    answer.set_exception(ValueError("no such claim"))
    with pytest.raises(ValueError, match="no such claim"):
        await answer_of(answer, timeout_s=5.0, who_waits="worker waits for the manager")


async def test_silence_is_told_with_both_ends():
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(WaitTimeout, match=r"worker waits for the manager: no answer within 0\.01 s"):
        await answer_of(never, timeout_s=0.01, who_waits="worker waits for the manager")
