"""What tests of `partial_rollout.settings.mode` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from partial_rollout.settings.mode import check_config, check_inputs

if TYPE_CHECKING:
    from omegaconf import DictConfig

Composed = Callable[..., "DictConfig"]


def check(config: DictConfig) -> None:
    """As `main_ppo` does before anything starts."""
    check_inputs(config)
    check_config(config)
