"""Warns once of tokens that older weights sampled and that are trained without a correction."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from partial_rollout.settings.auto import CORRECTION_KEY, is_corrected

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omegaconf import DictConfig

logger = logging.getLogger(__name__)


class UncorrectedTokens:
    """The trainer calls `look` with the metrics of each step."""

    def __init__(self, config: DictConfig) -> None:
        self._armed = not is_corrected(config)

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn at the first step that trains stale tokens without a correction; a warning is an event as well."""
        share = metrics.get("partial_rollout/stale_token_share", 0.0)
        if self._armed and share:
            self._armed = False
            logger.warning(
                "step %d trains tokens of older weights without a correction: %.0f %% of its tokens; later steps do so "
                "too. %s=token turns the correction on",
                step,
                100 * share,
                CORRECTION_KEY,
            )
