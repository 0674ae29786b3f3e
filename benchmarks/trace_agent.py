"""An agent loop that replays recorded response lengths, so that every trainer mode sees identical work."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class LengthTraceAgentLoop(SingleTurnAgentLoop):
    """verl's single-turn agent loop with the response length taken from the data row.

    `extra_info["lengths"][session_id]` tokens are generated for each trajectory, end-of-sequence ignored.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Generate exactly the recorded number of tokens."""
        length = int(kwargs["extra_info"]["lengths"][kwargs["session_id"]])
        traced = {**sampling_params, "max_tokens": length, "ignore_eos": True}
        return await super().run(traced, **kwargs)  # pyright: ignore[reportAbstractUsage] - a decorator hides its body
