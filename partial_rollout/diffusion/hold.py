"""Whether an engine takes denoise steps, or is held between two of them: for an update of weights, for a drain. Pure.

             hold                  boundary
    RUNNING ------> HOLDING ----------------> HELD
       ^             |   ^                     |
       |     release |   | hold                | release
       |             v   |                     |
       +----------- RELEASING <----------------+
          running

Two holders may want an engine held at the same time: an update of weights during a drain. The engine runs again when
the last holder has let go and the engine has answered. If its answer fails to come, the next release tells it again.
"""

from __future__ import annotations

from enum import Enum

from partial_rollout.errors import IllegalTransition


class HoldState(str, Enum):
    """What the engine does, as far as its server knows."""

    RUNNING = "running"
    HOLDING = "holding"
    """The engine was told to stop; a step may still be under way."""
    HELD = "held"
    RELEASING = "releasing"
    """The engine is told to run and has not answered: it may still stand."""


class Hold:
    """Who wants one engine held, and what the engine is to be told.

    An update of weights begins while a drain holds the engine:

    >>> hold = Hold()
    >>> hold.hold("drain")  # True: tell the engine to stop
    True
    >>> hold.boundary()  # the engine has answered: no step is under way
    >>> hold.hold("update")  # it stands already
    False
    >>> hold.release("drain")  # the update still wants it held
    False
    >>> hold.release("update")  # True: tell the engine to run
    True
    >>> hold.running()
    >>> hold.state.value
    'running'
    """

    def __init__(self) -> None:
        """Start running."""
        self.state = HoldState.RUNNING
        self._holders: set[str] = set()

    @property
    def holders(self) -> list[str]:
        """Who wants the engine held."""
        return sorted(self._holders)

    def hold(self, holder: str) -> bool:
        """Note that `holder` wants the engine held; return whether the engine must be told to stop."""
        self._holders.add(holder)
        if self.state is HoldState.HELD:
            return False
        self.state = HoldState.HOLDING
        return True

    def boundary(self) -> None:
        """Note the engine's answer: it stands between two steps.

        Raises:
            IllegalTransition: nobody has asked for a hold.
        """
        if self.state in (HoldState.RUNNING, HoldState.RELEASING):
            raise IllegalTransition(f"hold {self.state.value}: event 'boundary' is not allowed")
        self.state = HoldState.HELD

    def release(self, holder: str) -> bool:
        """Note that `holder` lets go, if it held at all; return whether the engine must be told to run."""
        self._holders.discard(holder)
        if self._holders or self.state is HoldState.RUNNING:
            return False
        self.state = HoldState.RELEASING
        return True

    def running(self) -> None:
        """Note the engine's answer: it runs.

        Raises:
            IllegalTransition: nobody has released the engine.
        """
        if self.state is not HoldState.RELEASING:
            raise IllegalTransition(f"hold {self.state.value}: event 'running' is not allowed")
        self.state = HoldState.RUNNING
