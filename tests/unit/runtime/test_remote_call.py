"""Waiting for an actor from an event loop: bounded, and the error says who waited for whom."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from partial_rollout.errors import WaitTimeout
from partial_rollout.runtime.remote_call import RemoteActor, answer_of
from tests.unit.runtime.virtual_time import run_virtual


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


class SilentActor:
    """An actor handle whose calls are noted and never answered."""

    def __init__(self):
        self.calls = []
        self.claim = SimpleNamespace(remote=self._call)

    def _call(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(("given", "waited_s"), [({}, 60), ({"timeout_s": 30.0}, 90)])
def test_a_long_poll_may_take_its_own_time_beside_the_bound_of_any_call(given, waited_s, caplog):
    actor = SilentActor()

    async def main():
        manager = RemoteActor(actor, 60.0, "worker-0 waits for the prompt manager")
        message = f"worker-0 waits for the prompt manager to answer 'claim': no answer within {waited_s} s"
        with pytest.raises(WaitTimeout, match=message):
            await manager.claim("worker-0", 4, **given)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(waited_s)
    assert actor.calls == [(("worker-0", 4), given)]
    own_s = given.get("timeout_s", 0.0)
    # The poll's own time is no delay.
    first_s = max(10.0, own_s + 6.0)
    assert f"to answer 'claim': no answer for {first_s:.0f} s; after {waited_s} s" in caplog.records[0].message


async def test_an_actor_without_the_method_is_an_error_at_the_call():
    with pytest.raises(AttributeError, match="finish"):
        RemoteActor(SilentActor(), 60.0, "worker-0 waits for the prompt manager").finish  # noqa: B018


class Blocking:
    """Something blocks the event loop for two minutes, several times; the answer comes after them, or never."""

    def __init__(self, times: int, *, is_answered: bool):
        self._times, self._is_answered = times, is_answered

    def __await__(self):
        return self._answer().__await__()

    async def _answer(self):
        loop = asyncio.get_running_loop()
        for _ in range(self._times):
            loop._jumping.now_s += 120
            for _ in range(5):  # turns of the event loop, in which a wait that is over ends
                await asyncio.sleep(0)
        if not self._is_answered:
            await loop.create_future()
        return 3


@pytest.mark.parametrize("timeout_s", [0.5, 60.0])
def test_the_time_in_which_the_event_loop_was_blocked_is_left_out(timeout_s):
    call = answer_of(Blocking(4, is_answered=True), timeout_s=timeout_s, who_waits="worker waits for the manager")
    assert run_virtual(call) == 3


def test_a_blocked_event_loop_does_not_keep_a_wait_from_its_end():
    async def main():
        with pytest.raises(WaitTimeout, match="no answer within 60 s"):
            await answer_of(Blocking(4, is_answered=False), timeout_s=60.0, who_waits="worker waits for the manager")
        return asyncio.get_running_loop().time()

    assert 4 * 120 < run_virtual(main()) <= 4 * 120 + 60


def test_a_wait_ends_though_the_event_loop_is_blocked_again_and_again():
    call = answer_of(Blocking(10**6, is_answered=True), timeout_s=60.0, who_waits="worker waits for the manager")
    with pytest.raises(WaitTimeout, match="no answer within 60 s"):
        run_virtual(call)
