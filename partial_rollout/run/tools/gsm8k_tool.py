"""A tool with which the model checks a GSM8K answer before it settles on one."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.utils.reward_score import gsm8k

TOOL_NAME = "calc_gsm8k_reward"
ANSWER_MARK = "####"


class Gsm8kTool(BaseTool):
    """Scores an answer against the row's ground truth. verl creates and releases one instance for each call."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        """Begin without instances."""
        super().__init__(config, tool_schema)
        self._truths: dict[str, str] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Keep the ground truth in the row's `create_kwargs`; without one every answer scores 0."""
        name = instance_id or uuid4().hex
        given = kwargs.get("create_kwargs") or kwargs
        self._truths[name] = str(given.get("ground_truth", ""))
        return name, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Tell the model whether `parameters["answer"]` is right; the step itself earns no reward."""
        score = self._score(instance_id, parameters.get("answer", ""))
        return ToolResponse(text=f"Current parsed answer is {'right' if score else 'wrong'}."), 0.0, {"score": score}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """0.0: the trajectory's final answer is scored by the rule reward."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the instance."""
        self._truths.pop(instance_id, None)

    def _score(self, instance_id: str, answer: object) -> float:
        truth = self._truths.get(instance_id, "")
        text = str(answer)
        marked = text if text.startswith(ANSWER_MARK) else f"{ANSWER_MARK} {text}"
        return float(gsm8k.compute_score(marked, truth)) if truth else 0.0
