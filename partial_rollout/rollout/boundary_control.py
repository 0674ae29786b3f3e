"""What a server tells of its requests, and how a boundary waits for some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partial_rollout.rollout.control import control

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine, Sequence

    from partial_rollout.core.cost_model import EngineProgress
    from partial_rollout.core.engine_meter import EngineMeter
    from partial_rollout.rollout.admission import Admission


class BoundaryControl:
    """Control calls of a server with a gate, which sets the attributes below."""

    _admission: Admission
    _control_lock: asyncio.Lock
    _meter: EngineMeter

    async def _on_engine_loop(self, call: Coroutine[Any, Any, Any]) -> Any:
        raise NotImplementedError

    @control
    async def progress(self) -> EngineProgress:
        """Running requests and measured speeds."""
        return self._meter.progress()

    @control
    async def let_end(self, request_ids: Sequence[str], wait_s: float) -> list[str]:
        """Close the gate, and wait for up to `wait_s` until these requests have ended; returns those that have not.

        Everything else in the engine goes on meanwhile; `abort_all_requests` interrupts it.
        """
        async with self._control_lock:
            return await self._admission.close_and_wait(request_ids, wait_s)
