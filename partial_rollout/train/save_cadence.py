"""When a run saves a checkpoint by time, for a run whose user has set no `trainer.save_freq`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from partial_rollout.settings.memory import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_SHARE = 0.05
"""Share of a run's time that saving by time may take: after a save of two minutes the next is due after 40 minutes."""


class SaveCadence:
    """begin -> the minutes have passed -> due at the end of a step -> saved, or put off -> the minutes pass again

    The end of the last step is due as well, once the run has a checkpoint, its own or the one that it goes on from: a
    run that is shorter leaves none, as verl's.
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`minutes` is the time between two saves; None: nothing is ever due."""
        self._interval_s = None if minutes is None else 60.0 * minutes
        self._clock, self._since_s = clock, clock()
        self._cost_s = 0.0
        self._saved_step: int | None = None

    def begin(self, saved_step: int) -> None:
        """The first step begins; `saved_step` is that of the checkpoint that the run goes on from, 0: there is none."""
        self._since_s, self._saved_step = self._clock(), saved_step or None

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether a step that ends now is to be saved; `is_last`: no step follows."""
        if self._interval_s is None or step == self._saved_step:
            return False
        passed_s = self._clock() - self._since_s
        waits_s = max(self._interval_s, self._cost_s / MOST_SHARE)
        return passed_s >= waits_s or (is_last and self._saved_step is not None)

    def saved(self, step: int, seconds: float) -> None:
        """A checkpoint of a step was saved, for whatever reason, within so many seconds."""
        self._since_s, self._cost_s, self._saved_step = self._clock(), seconds, step

    def put_off(self) -> None:
        """There was no room for a checkpoint: try again when the minutes have passed."""
        self._since_s = self._clock()


def lack_of_room(num_bytes: int | None, free_disk: int, free_memory: int) -> str:
    """What stands in the way of a checkpoint of `num_bytes` (None: not known), in words; empty if nothing does.

    >>> lack_of_room(12 * GIB, 10 * GIB, 64 * GIB)
    'a checkpoint has about 12.0 GiB, and the disk has 10.0 GiB free'
    >>> lack_of_room(12 * GIB, 20 * GIB, 64 * GIB), lack_of_room(None, 0, 0)
    ('', '')
    """
    for place, free in (("the disk", free_disk), ("the node's memory, through which it goes,", free_memory)):
        if num_bytes is not None and free < num_bytes:
            return f"a checkpoint has about {num_bytes / GIB:.1f} GiB, and {place} has {free / GIB:.1f} GiB free"
    return ""
