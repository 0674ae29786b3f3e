"""Rule reward of the quickstart, for verl's `reward.custom_reward_function`.

`path=pkg://partial_rollout.run.quickstart.reward name=compute_score`. Rows of any other data source are scored
by verl's own rules, so that real GSM8K files work with the quickstart's configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.utils.reward_score import default_compute_score

from partial_rollout.run.quickstart.problem import ANSWER_MARK
from partial_rollout.run.task_files import text_after

if TYPE_CHECKING:
    from collections.abc import Mapping

DATA_SOURCE = "partial_rollout/letter_shift"


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """1.0 if the text after the last answer mark is the right letter, else 0.0; other data sources go to verl.

    Raises:
        NotImplementedError: neither this package nor verl knows `data_source`.
    """
    if data_source != DATA_SOURCE:
        return default_compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
    return float(is_right(solution_str, ground_truth))


def is_right(solution: object, ground_truth: object) -> bool:
    """Whether `solution` ends in the answer mark and `ground_truth`; False for anything malformed."""
    return text_after(ANSWER_MARK, solution) == ground_truth != ""
