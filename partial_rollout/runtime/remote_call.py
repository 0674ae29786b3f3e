"""Ray calls with a deadline; warnings and the error of a late one name who waits for whom."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from partial_rollout.errors import WaitTimeout
from partial_rollout.runtime.bounded import BLOCKED_S, Wait

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from ray.actor import ActorHandle

MORE_S = 10 * BLOCKED_S
"""At most: what a wait lasts beyond its limit while the event loop is blocked again and again."""


def wait_for(ref: ray.ObjectRef[Any], *, timeout_s: float, who_waits: str) -> Any:
    """The call's answer.

    Raises:
        WaitTimeout: no answer in time; `who_waits` names both ends.
        Exception: what the call raised.
    """
    return wait_for_all([ref], timeout_s=timeout_s, who_waits=who_waits)[0]


def wait_for_all(refs: Sequence[ray.ObjectRef[Any]], *, timeout_s: float, who_waits: str) -> list[Any]:
    """All answers, in order. Raises as `wait_for`; WaitTimeout says how many answers were late."""
    waiting = Wait(who_waits, timeout_s)
    while True:
        try:
            return ray.get(list(refs), timeout=waiting.step_s())
        except GetTimeoutError as error:
            if isinstance(error, RayTaskError):  # a call has waited for something itself
                raise
        late = f"{_num_late(refs)} of {len(refs)}"
        if waiting.is_over:
            raise WaitTimeout(f"{who_waits}: {late} did not answer within {timeout_s:g} s") from None
        waiting.look(late)


def _num_late(refs: Sequence[ray.ObjectRef[Any]]) -> int:
    return len(ray.wait(list(refs), num_returns=len(refs), timeout=0)[1])


def settle_all(refs: Sequence[ray.ObjectRef[Any]], *, timeout_s: float, who_waits: str) -> list[Any]:
    """All answers, in order; in the place of a missing one stands the reason: RayActorError or WaitTimeout.

    Raises:
        Exception: what a call raised.
    """
    found, late, waiting = [], list(refs), Wait(who_waits, timeout_s)
    while late:
        found, late = ray.wait(list(refs), num_returns=len(refs), timeout=waiting.step_s())
        if waiting.is_over:
            break
        waiting.look(f"{len(late)} of {len(refs)}")
    missing = WaitTimeout(f"{who_waits}: {len(late)} of {len(refs)} did not answer within {timeout_s:g} s")
    ready = set(found)
    return [_answer_or_death(ref) if ref in ready else missing for ref in refs]


def _answer_or_death(ref: ray.ObjectRef[Any]) -> Any:
    try:
        return ray.get(ref)
    except RayActorError as error:
        return error


def is_missing(answer: Any) -> bool:
    """Whether an element of `settle_all` is the reason why there is no answer."""
    return isinstance(answer, RayActorError | WaitTimeout)


async def answer_of(ref: Awaitable[Any], *, timeout_s: float, who_waits: str, sound_s: float = 0.0) -> Any:
    """The call's answer, awaited in an event loop; raises as `wait_for`.

    A late answer is dropped; a sound one may take `sound_s`. The time by which a timer comes late, as something blocks
    the event loop, is left out but for BLOCKED_S: the answer may be there, and nobody could see it.
    """

    async def awaited() -> Any:
        return await ref

    answer = asyncio.create_task(awaited())
    try:
        clock = asyncio.get_running_loop().time
        waiting, step_s = Wait(who_waits, timeout_s, sound_s, clock), 0.0
        while True:
            step_s = max(step_s, waiting.step_s())
            due_s = clock() + step_s
            # asyncio.wait_for would not tell its own timeout from a TimeoutError that the call raised.
            if (await asyncio.wait([answer], timeout=step_s))[0]:
                return answer.result()
            late_s = clock() - due_s
            was_blocked = late_s > BLOCKED_S
            waiting.put_off(late_s - BLOCKED_S if was_blocked else 0.0)
            # After a block at the very end the answer gets some more turns of the event loop, and not for ever.
            if waiting.is_over and not (was_blocked and waiting.waited_s < timeout_s + MORE_S):
                raise WaitTimeout(f"{who_waits}: no answer within {timeout_s:g} s")
            step_s = BLOCKED_S if was_blocked else 0.0
            waiting.look()
    finally:
        answer.cancel()


class RemoteActor:
    """An actor's methods as coroutines that wait no longer than they may; for callers a plain object of its class.

    A call raises what the method raised, Ray's error when the actor is dead, and WaitTimeout when no answer has come
    after `call_s`. A method that itself waits for up to `timeout_s`, given by keyword, may take so much longer.
    """

    def __init__(self, handle: ActorHandle, call_s: float, who_waits: str) -> None:
        """`who_waits` names both ends, for WaitTimeout."""
        self._handle = handle
        self._call_s = call_s
        self._who_waits = who_waits

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """The actor's method `name`."""
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self._handle, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            own_s = kwargs.get("timeout_s", 0.0)
            who_waits, call = f"{self._who_waits} to answer {name!r}", method.remote(*args, **kwargs)
            return await answer_of(call, timeout_s=self._call_s + own_s, who_waits=who_waits, sound_s=own_s)

        return call


def root_cause(error: BaseException) -> BaseException:
    """What was raised first, below Ray's wrappers of every actor it passed through."""
    while isinstance(error, RayTaskError):
        error = error.cause
    return error
