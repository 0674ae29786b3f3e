"""Calls that must end: control calls of a server full of requests, and calls to an engine that may have died."""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from vllm.v1.engine.async_llm import AsyncLLM

CONTROL_GROUP = "control"
"""Ray's concurrency group for control calls: they have threads of their own, whatever waits in the server."""
HEALTH_INTERVAL_S = 0.5
"""vLLM does not tell callers that the engine has died; a caller notices after this time at the latest."""


def control(base: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    """Run a server's coroutine method in the control group; it hops to the engine's loop by `_on_engine_loop`."""

    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await self._on_engine_loop(base(self, *args, **kwargs))

    functools.update_wrapper(method, base)
    # Ray follows __wrapped__ and would look for the group on the function at its end, where it is not.
    del method.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]
    method.__signature__ = inspect.signature(base)  # pyright: ignore[reportFunctionMemberAccess]
    return ray.method(concurrency_group=CONTROL_GROUP)(method)


async def while_healthy(
    engine: AsyncLLM, call: Coroutine[Any, Any, Any], *, unless: Coroutine[Any, Any, None] | None = None
) -> None:
    """Wait for `call` as long as the engine lives: a call that a dead engine's core never took would not end.

    Raises:
        EngineDeadError: the engine has died.
        Exception: what `call` raised; or what `unless` raised, which can only end by raising.
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
