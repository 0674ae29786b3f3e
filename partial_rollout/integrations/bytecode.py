"""Packages that Python compiles anew in each process, because their bytecode is neither stored nor can be.

An image that was built with `PYTHONDONTWRITEBYTECODE=1` has none, and where the variable is still set none comes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGE = ("torch", "transformers", "vllm", "ray", "verl")
"""Packages with so many modules that it matters."""


def compiled_each_time(names: Sequence[str] = LARGE) -> dict[str, Path]:
    """Folders of those packages that are compiled anew in each process, by name; none of them is imported."""
    found = {}
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        stored = Path(importlib.util.cache_from_source(spec.origin))
        if not stored.exists() and not _will_be_stored(stored):
            found[name] = Path(spec.origin).parent
    return found


def remark() -> str:
    """What to say of them; empty: nothing."""
    found = compiled_each_time()
    if not found:
        return ""
    why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else "its folder cannot be written"
    return (
        f"each process compiles {', '.join(found)} anew, since the bytecode is not stored ({why}): a start, in which "
        "seven processes follow each other, takes a minute or two longer, and an engine comes back later. Once, by "
        f"who may write there: {sys.executable} -m compileall -q {' '.join(map(str, found.values()))}"
    )


def _will_be_stored(stored: Path) -> bool:
    folder = next(parent for parent in stored.parents if parent.exists())
    return not sys.dont_write_bytecode and os.access(folder, os.W_OK)
