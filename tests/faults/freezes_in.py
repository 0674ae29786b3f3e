"""Steps in which `freezing_scheduler` stops an engine core; apart from it, since it needs vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FREEZES = {"pause": 2, "release its memory": 4, "take its memory back": 6, "go on": 8}
"""By what the engine core is asked to do, in the order in which a step asks for it."""
AFTER_TRAINING = ("take its memory back", "go on")
"""What a step asks for when it has been trained."""


def frozen(folder: Path, asked: str) -> Path:
    """The file that a core makes before it stops itself; its time is that of the blow."""
    return folder / f"frozen: {asked}"
