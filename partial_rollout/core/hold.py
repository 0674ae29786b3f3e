"""Whether an engine takes denoise steps: the hold of a weight-only update, and that of a drain. Pure.

             hold                  boundary
    RUNNING ------> HOLDING ----------------> HELD
       ^               |  release               |
       +---------------+------------------------+

Two may want an engine held at the same time (an update while it is drained): it runs again when the last lets go.
"""

from __future__ import annotations

from enum import Enum

from partial_rollout.errors import IllegalTransition


class HoldState(str, Enum):
    """What the engine does."""

    RUNNING = "running"
    HOLDING = "holding"
    """A step may still be under way."""
    HELD = "held"


class Hold:
    """The hold of one engine, and who asked for it."""

    def __init__(self) -> None:
        """Start running."""
        self.state = HoldState.RUNNING
        self._holders: set[str] = set()

    @property
    def holders(self) -> list[str]:
        """Who wants it held."""
        return sorted(self._holders)

    def hold(self, holder: str) -> bool:
        """Note that `holder` wants it held; return whether the engine must be told."""
        self._holders.add(holder)
        if self.state is HoldState.HELD:
            return False
        self.state = HoldState.HOLDING
        return True

    def boundary(self) -> None:
        """The engine stands between two steps.

        Raises:
            IllegalTransition: nobody has asked for a hold.
        """
        if self.state is HoldState.RUNNING:
            raise IllegalTransition("hold running: event 'boundary' is not allowed")
        self.state = HoldState.HELD

    def release(self, holder: str) -> bool:
        """Note that `holder` lets go, or never held it; return whether the engine must be told to run."""
        self._holders.discard(holder)
        if self._holders or self.state is HoldState.RUNNING:
            return False
        self.state = HoldState.RUNNING
        return True
