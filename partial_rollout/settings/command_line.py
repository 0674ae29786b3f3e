"""Looks for mistyped keys of ours on a command line, before anything slow is imported.

Hydra would only see them once verl's configuration is composed, and would then advise to put a `+` in front.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from partial_rollout.errors import ConfigError
from partial_rollout.settings.block import BLOCK, field_keys, refuse_retired, unknown_key

if TYPE_CHECKING:
    from collections.abc import Iterable

FLAG = "async_training.partial_rollout"
CLOSE_WORD = 0.8
"""Above this likeness a first word is taken for a mistyped one of ours; verl's own words are far below it."""


def check_overrides(arguments: Iterable[str]) -> None:
    """Refuse a Hydra override of our block whose key does not exist; everything else is left to Hydra.

    >>> check_overrides(["partial_rollout.prefech_factor=3"])
    Traceback (most recent call last):
    partial_rollout.errors.ConfigError: unknown key partial_rollout.prefech_factor: did you mean ...

    Raises:
        ConfigError: a key is unknown or retired; names what was perhaps meant, or what to use instead.
    """
    for argument in arguments:
        if argument.startswith("-") or "=" not in argument:
            continue  # an option of Hydra's, or a deletion
        name, _, value = argument.lstrip("+~").partition("=")
        _check_override(name.partition("@")[0], value)


def _check_override(name: str, value: str) -> None:
    first, _, key = name.partition(".")
    if "/" in name or name == FLAG.partition(".")[0]:
        return  # a config group, or the whole block of the flag, which is checked when it is composed
    if first == BLOCK:
        _check_key(key, value)
    elif (
        name != FLAG
        and first in difflib.get_close_matches(first, [FLAG.partition(".")[0]], 1, CLOSE_WORD)
        or (difflib.get_close_matches(name, [FLAG], 1, CLOSE_WORD) and name != FLAG)
    ):
        raise ConfigError(f"unknown key {name}: did you mean {FLAG}? It is set with +{FLAG}=True")
    elif key and difflib.get_close_matches(first, [BLOCK], 1, CLOSE_WORD):
        raise ConfigError(f"unknown key {name}: did you mean {BLOCK}.{key}?")


def _check_key(key: str, value: str) -> None:
    """`value` is as it was typed: only retired names of choices are looked for in it."""
    if not key:
        return  # a choice of the whole block
    refuse_retired(key, value.strip("'\""))
    refuse_retired(key.partition(".")[0])
    known = field_keys()
    if key not in known and not any(name.startswith(f"{key}.") for name in known):
        raise unknown_key(key)
