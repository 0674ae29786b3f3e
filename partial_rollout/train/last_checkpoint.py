"""The checkpoint of a run that ends before its time: by Ctrl-C, SIGTERM or an error."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from partial_rollout.runtime.bounded import call_bounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from partial_rollout.runtime.bounded import TimeLeft

T = TypeVar("T")
logger = logging.getLogger(__name__)

SAVE_SHARE = 0.5
"""Share of `timeouts.stop_s`, as those below."""
DRAIN_SHARE = 0.25
ASK_SHARE = 0.1
"""For the prompt manager, which answers at once."""
END_SHARE = 0.25
"""Left for what follows the checkpoint: workers, engines, actors."""


class LastCheckpoint:
    """Knows of which step weights and queue belong together, and saves them when the run ends.

    begin -> step N ended: N can be saved -> batch N+1 taken: nothing can be saved, until step N+1 has ended
                                          -> fetching prompts: nothing can be saved, until they are in the queue

    What a step trains has left the queue, and half a step cannot be saved: so there is nothing to save in a step.
    """

    def __init__(self, left: TimeLeft) -> None:
        """`left` is what the end of the run has."""
        self._left = left
        self.step: int | None = None
        """The step that can be saved; None: none can."""
        self._saved: int | None = None
        self.num_taken = 0
        """Groups that the trainer has got from the queue, those of earlier runs included."""

    def begin(self, step: int, num_taken: int) -> None:
        """Training goes on from a checkpoint of `step`, or begins with step 0."""
        self.step = self._saved = step
        self.num_taken = num_taken

    def taken(self, num_groups: int) -> None:
        """A batch has left the queue."""
        self.step = None
        self.num_taken += num_groups

    def step_ended(self, step: int) -> None:
        """Weights of `step` are in the engines."""
        self.step = step

    def saved(self, step: int) -> None:
        """A checkpoint of `step` is whole."""
        self._saved = step

    @property
    def is_due(self) -> bool:
        """Whether there is something to save that no checkpoint has."""
        return self.step is not None and self.step != self._saved

    def save(self, drain: Callable[[], None], num_taken: Callable[[], int], save: Callable[[], None]) -> bool:
        """Save if there is something to save; returns whether a checkpoint was saved. Never raises.

        Args:
            drain: interrupts the engines, so that workers have the tokens of running requests.
            num_taken: how many groups the queue has given out.
            save: saves, calls `saved`, and may then remove older checkpoints: how that ends changes nothing.
        """
        if not self.is_due:
            return False
        try:
            self._bounded(drain, DRAIN_SHARE, "the last checkpoint waits for engines")
        except Exception as error:  # noqa: BLE001 - a server's death too, which Ray tells, leaves the rest to be saved
            logger.warning("the last checkpoint has no tokens that engines were still generating: %s", error)
        try:
            given_out = self._bounded(num_taken, ASK_SHARE, "the last checkpoint waits for the prompt manager")
            if given_out != self.num_taken:
                why = f"{given_out} groups have left the queue, of which {self.num_taken} have come to the trainer"
                logger.warning("the run ends without a last checkpoint, the one before it stays: %s", why)
                return False
            self._bounded(save, SAVE_SHARE, "the run's end waits for a checkpoint")
        except Exception as error:  # noqa: BLE001 - the run's own error must reach the user, whatever goes wrong here
            said = f"{type(error).__name__}: {error}"
            if not self.is_due:
                logger.warning("the last checkpoint is whole; older ones may not all be removed: %s", said)
                return True
            logger.warning("the run ends without a last checkpoint, the one before it stays: %s", said)
            return False
        return True

    def _bounded(self, call: Callable[[], T], share: float, who_waits: str) -> T:
        return call_bounded(call, timeout_s=self._left.share(share, keep=END_SHARE), who_waits=who_waits)
