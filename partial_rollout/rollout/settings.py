"""Settings of the engine side. They travel in `RolloutConfig.custom["partial_rollout"]`, verl's extension point."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partial_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

CUSTOM_BLOCK = "partial_rollout"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server needs to know beyond verl's RolloutConfig; times in seconds."""

    stream_interval: int = 32
    """Tokens between two streamed outputs of a request; what an engine death can lose."""
    drain_s: float = 60.0
    """From closing the gate to an empty engine."""
    resume_s: float = 600.0
    """From the order to resume to an open gate."""
    call_s: float = 60.0
    """Any other control call."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that is not positive."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"rollout.custom.{CUSTOM_BLOCK}.{field.name}={value!r}: must be a number above 0")

    @classmethod
    def from_custom(cls, custom: Mapping[str, Any] | None) -> ServerSettings:
        """Build from `rollout.custom`; without our block, the defaults.

        Raises:
            ConfigError: an unknown key or a value out of range.
        """
        block = dict((custom or {}).get(CUSTOM_BLOCK) or {})
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(block) - known)
        if unknown:
            raise ConfigError(f"unknown key rollout.custom.{CUSTOM_BLOCK}.{unknown[0]}; known: {sorted(known)}")
        return cls(**block)
