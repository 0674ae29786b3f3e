"""An agent loop whose every run fails."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase


class BrokenAgentLoop(AgentLoopBase):
    """Raises before the first token."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Raise RuntimeError."""
        raise RuntimeError("the tool server is down")
