"""Reward of the SmolLM2 recipe, for verl's `reward.custom_reward_function`: reasoning-gym's own verifiers.

`path=pkg://partial_rollout.run.smollm2_reasoning_gym.reward name=compute_score`. Rows of any other data source are
scored by verl's own rules.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from verl.utils.reward_score import default_compute_score

from partial_rollout.run.smollm2_reasoning_gym.packages import reasoning_gym
from partial_rollout.run.smollm2_reasoning_gym.problems import ANSWER_MARK, SOURCE_PREFIX
from partial_rollout.run.task_files import text_after

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """1.0 if the task's verifier gives its full score to the text after the last `Answer:`, else 0.0.

    Raises:
        NotImplementedError: neither this package nor verl knows `data_source`.
    """
    if not data_source.startswith(SOURCE_PREFIX):
        return default_compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
    answer = text_after(ANSWER_MARK, solution_str)
    if not answer or not extra_info:
        return 0.0
    return float(_verifier(data_source.removeprefix(SOURCE_PREFIX))(answer, json.loads(extra_info["entry"])) >= 1.0)


@cache
def _verifier(task: str) -> Callable[[str, dict[str, Any]], float]:
    return reasoning_gym().get_score_answer_fn(task)
