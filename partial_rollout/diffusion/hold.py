"""Whether an engine takes denoise steps: the hold of a weight-only update, and that of a drain. Pure.

             hold                  boundary
    RUNNING ------> HOLDING ----------------> HELD
       ^             |   ^                     |
       |     release |   | hold                | release
       |             v   |                     |
       +----------- RELEASING <----------------+
          running

Two may want an engine held at the same time (an update while it is drained): it runs again when the last lets go, and
the engine has answered. Until then it is told again by whoever releases it.
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
    RELEASING = "releasing"
    """It was told to run, or is about to be, and has not answered: it may still stand."""


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
        if self.state in (HoldState.RUNNING, HoldState.RELEASING):
            raise IllegalTransition(f"hold {self.state.value}: event 'boundary' is not allowed")
        self.state = HoldState.HELD

    def release(self, holder: str) -> bool:
        """Note that `holder` lets go, or never held it; return whether the engine must be told to run."""
        self._holders.discard(holder)
        if self._holders or self.state is HoldState.RUNNING:
            return False
        self.state = HoldState.RELEASING
        return True

    def running(self) -> None:
        """The engine has answered that it runs.

        Raises:
            IllegalTransition: it was not released.
        """
        if self.state is not HoldState.RELEASING:
            raise IllegalTransition(f"hold {self.state.value}: event 'running' is not allowed")
        self.state = HoldState.RUNNING
