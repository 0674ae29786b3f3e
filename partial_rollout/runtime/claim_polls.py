"""Long polls of workers that wait for a prompt: an event wakes one of them, however many there are."""

from __future__ import annotations

import asyncio
from collections import OrderedDict


class ClaimPolls:
    """Polls that wait, the oldest first. One that is woken looks whether it may claim, and wakes the next at its end.

    ```
    wait -> parked -> woken by `wake_one` -> claims, or finds nothing -> `wake_one` again, by the poll itself
                   -> woken by `wake_all`, or at its time-out
    ```
    So a prompt for one worker costs one wake, and a batch of prompts as many as workers take part. A poll that is
    cancelled after it was woken wakes the next one too: no prompt waits for a poll that is gone.
    """

    def __init__(self) -> None:
        # An OrderedDict finds its oldest item in O(1); a dict would scan the holes that earlier ones left.
        self._parked: OrderedDict[asyncio.Future[None], int] = OrderedDict()

    async def wait(self, free_slots: int, timeout_s: float) -> None:
        """Return when woken, or after `timeout_s`."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        self._parked[woken] = free_slots
        # Not `asyncio.wait_for`: before Python 3.12 a poll that is cancelled just after it was woken would go on.
        timer = loop.call_later(timeout_s, _end, woken)
        try:
            await woken
        finally:
            timer.cancel()
            self._parked.pop(woken, None)

    def wake_one(self, num_slots: int) -> None:
        """Wake the oldest poll that has `num_slots` free; those before it, with fewer, are passed over."""
        fitting = (woken for woken, free_slots in self._parked.items() if free_slots >= num_slots)
        if (woken := next(fitting, None)) is not None:
            self._wake(woken)

    def wake_all(self) -> None:
        """Wake every poll: what some of them wait for cannot be told by slots."""
        for woken in list(self._parked):
            self._wake(woken)

    def _wake(self, woken: asyncio.Future[None]) -> None:
        del self._parked[woken]
        _end(woken)


def _end(woken: asyncio.Future[None]) -> None:
    if not woken.done():  # its poll was cancelled, or its time is over
        woken.set_result(None)
