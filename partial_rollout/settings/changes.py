"""What the flag changes in a composed configuration: every change goes through `Changes`, which lists it.

A value that the user set is never replaced: the change is refused with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from partial_rollout.errors import Refusal
from partial_rollout.settings.by_hand import leaves

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from partial_rollout.settings.by_hand import ByHand


@dataclass(frozen=True, slots=True)
class Change:
    """A key of the composed configuration that the flag changed."""

    key: str
    before: Any
    after: Any
    why: str

    def __str__(self) -> str:
        """One line: key, old and new value, reason."""
        return f"{self.key}: {_short(self.before)} -> {_short(self.after)} ({self.why})"


MAX_SHOWN = 60
"""Characters of a value in a line."""


def _short(value: Any) -> str:
    if value is None:
        return "null"
    text = f"a block of {len(dict(leaves(value)))} keys" if isinstance(value, dict) and value else str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 4]} ..."


@dataclass
class Changes:
    """Changes one configuration in place, and lists what it changed.

    >>> from partial_rollout.settings.by_hand import ByHand
    >>> changes = Changes(OmegaConf.create({"trainer": {"nnodes": 1}}), ByHand.read(["trainer.nnodes=1"]))
    >>> changes.replace("trainer.nnodes", 2, "it takes two", instead="leave it out")
    >>> print(changes.refused[0])
    trainer.nnodes=1 (set on the command line) is not possible with partial rollout: it takes two; leave it out
    >>> changes.complete("trainer.nnodes", 2, "it takes two")
    >>> print(changes.made[0])
    trainer.nnodes: 1 -> 2 (it takes two)
    """

    config: DictConfig
    by_hand: ByHand
    made: list[Change] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    """Changes that were refused because they would have replaced what the user set."""

    def replace(self, key: str, after: Any, why: str, *, instead: str) -> None:
        """Give a key another value, or refuse to if the user set it; `why` is a clause, `instead` what he can do."""
        before = self._value(key)
        where = self.by_hand.where(self.config, key) if before != after else None
        if where is None:
            self.complete(key, after, why)
        else:
            self.refuse(key, where, why, instead=instead)

    def refuse(self, key: str, where: str, why: str, *, instead: str) -> None:
        """Note that a key which the user set cannot be as it is."""
        given = f"{key}={_short(self._value(key))} (set {where})"
        message = f"{given} is not possible with partial rollout: {why}; {instead}"
        self.refused.append(Refusal(message, given, because=why, instead=instead))

    def complete(self, key: str, after: Any, why: str) -> None:
        """Give a key a value that keeps all of what the user said by the one before, and more."""
        before = self._value(key)
        if before == after:
            return
        OmegaConf.update(self.config, key, after, merge=False, force_add=True)
        self.made.append(Change(key, before, after, why))

    def announce(self, key: str, after: Any, why: str) -> None:
        """List a change that another part of the run makes later, from the value that is here until then."""
        before = self._value(key)
        if (before or None) != (after or None):
            self.made.append(Change(key, before, after, why))

    def _value(self, key: str) -> Any:
        value = OmegaConf.select(self.config, key)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
