"""An agent loop whose tool never answers."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.trace_agent import LengthTraceAgentLoop


class HangingAgentLoop(LengthTraceAgentLoop):
    """Generates as recorded, and then waits for ever."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Return nothing."""
        await super().run(sampling_params, **kwargs)
        await asyncio.Event().wait()
