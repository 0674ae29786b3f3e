"""What tests of `partial_rollout.settings` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from partial_rollout.settings.by_hand import ByHand, leaves
from partial_rollout.settings.changes import Change, Changes
from partial_rollout.settings.derived import read_settings
from partial_rollout.settings.flag import apply_mode
from partial_rollout.settings.refused import check_config, check_inputs

if TYPE_CHECKING:
    from omegaconf import DictConfig

Composed = Callable[..., "DictConfig"]


def check(config: DictConfig) -> None:
    """Check a configuration as `main_ppo` does before anything starts."""
    check_inputs(config)
    check_ours(config)


def check_ours(config: DictConfig) -> None:
    """What is refused with partial rollout only."""
    check_config(config, read_settings(config))


def apply(config: DictConfig, *overrides: str) -> tuple[Change, ...]:
    """Apply the mode as `main_ppo` does once nothing is refused; `overrides` are those of the command line."""
    changes = Changes(config, ByHand.read(overrides))
    apply_mode(changes, read_settings(config))
    if changes.refused:
        raise changes.refused[0]
    return tuple(changes.made)


def values(config: DictConfig) -> dict[str, Any]:
    """Every value of a configuration by its dotted key, interpolations unresolved."""
    container: Any = OmegaConf.to_container(config)
    return dict(leaves(container))


def unlisted(before: dict[str, Any], after: dict[str, Any], made: Iterable[Change]) -> list[str]:
    """Keys that differ, and that no listed change names."""
    listed = [change.key for change in made]
    return [
        key
        for key in {*before, *after}
        if before.get(key) != after.get(key)
        and not any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in listed)
    ]
