"""A reward that asks the reward model of the job, through the router whose address verl hands to reward functions."""

from __future__ import annotations

from typing import Any

import aiohttp

LIMIT = aiohttp.ClientTimeout(total=60.0)


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    model: str,
    reward_router_address: str,
    reward_model_tokenizer: Any,
) -> float:
    """The probability that the classifier `model` gives to a response."""
    asked = {"model": model, "input": solution_str or " ", "use_activation": True}
    url = f"http://{reward_router_address}/classify"
    async with aiohttp.ClientSession(timeout=LIMIT) as session, session.post(url, json=asked) as answer:
        answer.raise_for_status()
        return float((await answer.json())["data"][-1]["probs"][-1])
