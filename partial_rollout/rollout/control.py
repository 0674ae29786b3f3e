"""Methods of a server actor that must get through however many requests wait in it."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Protocol

import ray

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

CONTROL_GROUP = "control"
"""Ray's name for the threads and concurrency that these methods have for themselves."""


class OnEngineLoop(Protocol):
    """A server whose engine has an event loop of its own."""

    async def _on_engine_loop(self, call: Coroutine[Any, Any, Any]) -> Any: ...


def control(base: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    """Run an inherited or own coroutine method in the control group, on the engine's loop."""

    async def method(self: OnEngineLoop, *args: Any, **kwargs: Any) -> Any:
        return await self._on_engine_loop(base(self, *args, **kwargs))

    functools.update_wrapper(method, base)
    # Ray follows __wrapped__ and would look for the group on the function at its end, where it is not.
    del method.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]
    method.__signature__ = inspect.signature(base)  # pyright: ignore[reportFunctionMemberAccess]
    return ray.method(concurrency_group=CONTROL_GROUP)(method)
