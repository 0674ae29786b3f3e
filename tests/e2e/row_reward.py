"""A reward whose groups have spread, but for every fourth row of the data set."""

from __future__ import annotations

import zlib
from typing import Any

FLAT_EVERY = 4
FLAT_REWARD = 0.5


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **kwargs: Any
) -> float:
    """A number that differs between texts; FLAT_REWARD for the rows 0, 4, 8, ..."""
    if extra_info["index"] % FLAT_EVERY == 0:
        return FLAT_REWARD
    return zlib.crc32(solution_str.encode()) / 2**32
