"""Keys of verl's configuration that do not exist, and what was perhaps meant. Keys of ours: `command_line`."""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import TYPE_CHECKING

from partial_rollout.core.resume import UNRESUMABLE
from partial_rollout.errors import ConfigError
from partial_rollout.settings.by_hand import GENERATED, override_key, verl_defaults
from partial_rollout.settings.command_line import FLAG, check_overrides

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

CLOSE = 0.82
"""Two names that are at least this alike (difflib's ratio) are taken for a slip of the pen."""
VERY_CLOSE = 0.9
"""`CLOSE` for a key that was added on purpose: engines have options with names like verl's."""
NOT_THERE = re.compile(r"Could not override '([^']+)'")
"""Hydra's words for a key that no configuration file has."""
INNER_KEY = re.compile(r"full_key: (\S+)")
"""OmegaConf's words, in the cause of Hydra's error, for the same key, or for one within a block that was given."""


@cache
def known_keys() -> frozenset[str]:
    """Every key of verl's configuration with any backend, and the blocks that they are in."""
    leaves = [key for strategy in ("fsdp", *GENERATED) for key in verl_defaults(strategy)]
    blocks = {key[:position] for key in leaves for position, letter in enumerate(key) if letter == "."}
    return frozenset({*leaves, *blocks})


def guess(key: str, known: Collection[str]) -> str | None:
    """The known key that was perhaps meant by an unknown one.

    >>> guess("data.train_btach_size", ["data.train_batch_size", "data.val_batch_size"])
    'data.train_batch_size'
    >>> guess("rollout.tensor_model_parallel_size", ["actor_rollout_ref.rollout.tensor_model_parallel_size"])
    'actor_rollout_ref.rollout.tensor_model_parallel_size'
    >>> guess("mine.alone", ["trainer.nnodes"])
    """
    parent, _, last = key.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    near = difflib.get_close_matches(last, sorted(beside), 1, CLOSE)
    if near:
        return beside[near[0]]
    same_end = sorted((name for name in known if name.endswith(f".{key}")), key=len)
    same_name = [name for name in known if name.rpartition(".")[2] == last] if parent else []
    nearest = difflib.get_close_matches(key, sorted(same_name), 1, 0)
    close = [] if parent in known else difflib.get_close_matches(key, sorted(known), 1, CLOSE)
    return next(iter([*same_end, *nearest, *close]), None)


def of_a_request(key: str) -> str | None:
    """What to do instead with a parameter of a request among the rollout's keys, which verl does not have there."""
    name = key.rpartition(".")[2]
    if not key.startswith("actor_rollout_ref.rollout."):
        return None
    if name in UNRESUMABLE:
        return (
            f"leave it out: {name} is a parameter of a request, which an agent loop gives, and partial rollout refuses "
            "it there too, because its state in the engine covers one request and a continued response would start it "
            "anew"
        )
    if name == "stop":
        return (
            "leave it out: stop is a parameter of a request; an agent loop of your own gives it in its sampling "
            "parameters, and partial rollout finds the strings across interruptions"
        )
    return None


def unknown_key(text: str, cause: str = "") -> str | None:
    """One sentence for Hydra's error about a key that does not exist, and its cause; None for another error."""
    match = NOT_THERE.search(text)
    if match is None:
        return None
    key, inner = match[1], INNER_KEY.search(cause)
    if inner is not None and inner[1].startswith(f"{key}."):
        key = inner[1]
    try:
        check_overrides([f"{key}="])
    except ConfigError as error:
        return str(error)
    if key == FLAG:
        return f"write +{FLAG}=True: the + is needed, because verl's configuration files do not have this key"
    backends = [strategy for strategy in GENERATED if key in verl_defaults(strategy)]
    if backends:
        engines = " or ".join(backends)
        return f"{key} is a key of another training backend: set model_engine={engines}, or leave the key out"
    if instead := of_a_request(key):
        return f"unknown key {key}: {instead}"
    meant = guess(key, known_keys())
    said = f": did you mean {meant}?" if meant else ""
    return f"unknown key {key}{said} (a key that verl reads but does not list is added with +{key}=...)"


def added_by_mistake(overrides: Iterable[str]) -> dict[str, str]:
    """Keys added with `+` that look like a mistyped key of verl's; and that key."""
    added = [override_key(override) for override in overrides if override.startswith("+")]
    known = known_keys()
    found: dict[str, str] = {}
    for key in added:
        parent, _, last = key.rpartition(".")
        beside = {name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent}
        near = difflib.get_close_matches(last, sorted(beside), 1, VERY_CLOSE)
        if near and key not in known:
            found[key] = f"{parent}.{near[0]}"
    return found
