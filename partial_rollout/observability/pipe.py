"""The reader of a command's output may go away: `compare BASE RUN | head` has seen enough, and that is no fault."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO


def mute(out: TextIO) -> None:
    """Send nowhere what is written to `out` from now on; Python's own flush at the end would fail otherwise."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, out.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the block, without an error, when the reader of standard output goes away."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        mute(sys.stdout)
