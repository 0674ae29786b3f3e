"""All that is decided before anything heavy is imported: the start of a run and `doctor` both call `examine`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from partial_rollout.errors import ConfigError, UserError
from partial_rollout.settings.auto import propose, take
from partial_rollout.settings.changes import Changes
from partial_rollout.settings.derived import read_settings
from partial_rollout.settings.flag import (
    apply_mode,
    fit_workers,
    is_enabled,
    place_engines,
    place_events,
    provide_attention,
)
from partial_rollout.settings.refused import INPUT_CHECKS, MODE_CHECKS, check_counts, refusals_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from partial_rollout.settings.auto import Choice, Proposal
    from partial_rollout.settings.by_hand import ByHand
    from partial_rollout.settings.changes import Change
    from partial_rollout.settings.derived import Settings
    from partial_rollout.settings.hub import AskHub


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration that can be started, as far as one can see without the cluster."""

    config: DictConfig
    settings: Settings
    is_enabled: bool
    """Whether the flag is set."""
    changes: tuple[Change, ...]
    """What was changed in the configuration, which is the one that was given."""
    choices: tuple[Choice, ...] = ()
    """Values that the run chose among the changes, and what it leaves open until it sees the cluster."""
    proposals: tuple[Proposal, ...] = ()
    """What would be faster where the hardware has room for it."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What became of a configuration: it is prepared, or there are refusals."""

    prepared: Prepared | None
    refusals: tuple[UserError, ...]
    changes: tuple[Change, ...]
    """What was changed, as in `prepared`; with refusals, what would be changed."""
    choices: tuple[Choice, ...] = ()
    proposals: tuple[Proposal, ...] = ()


def examine(config: DictConfig, by_hand: ByHand, ask: AskHub | None = None) -> Examined:
    """Check a composed configuration and, with the flag, change it in place; `by_hand` are the keys that were typed.

    `ask` is asked for a model of the hub that is not downloaded yet; None: nobody is asked.

    Raises:
        ConfigError: the flag, our block or the sizes of a batch cannot be read, so that nothing else can be said.
    """
    check_counts(config)
    enabled, settings = is_enabled(config), read_settings(config)
    refusals = [error for check in INPUT_CHECKS for error in refusals_of(check, config)]
    changes = Changes(config, by_hand)
    provide_attention(changes)
    place_events(changes)
    choices: tuple[Choice, ...] = ()
    proposals: tuple[Proposal, ...] = ()
    if enabled:
        place_engines(changes, settings)
        fit_workers(changes, settings)
        proposals = tuple(propose(config))
        choices = tuple(take(changes, ask))
        settings = read_settings(config)
        refusals += [error for check in MODE_CHECKS for error in refusals_of(check, config, settings)]
        apply_mode(changes, settings)
        refusals += changes.refused
    made = tuple(changes.made)
    prepared = None if refusals else Prepared(config, settings, enabled, made, choices, proposals)
    return Examined(prepared, tuple(refusals), made, choices, proposals)


def prepare(config: DictConfig, by_hand: ByHand, ask: AskHub | None = None) -> Prepared:
    """Prepare a configuration as `examine` does, but raise its refusals.

    Raises:
        UserError: what no run can use, or what partial rollout cannot run; names value, reason and way out.
    """
    examined = examine(config, by_hand, ask)
    if examined.prepared is None:
        if len(examined.refusals) == 1:
            raise examined.refusals[0]
        raise ConfigError("\n".join([f"{len(examined.refusals)} settings are refused:", *map(str, examined.refusals)]))
    return examined.prepared
