"""What every benchmark stores beside its numbers, and how."""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """Machine, its load and the options of a run; call it before the load is the benchmark's own."""
    return {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load_average_at_start": os.getloadavg()[0],
        "options": {key: value for key, value in vars(options).items() if key != "json"},
    }


def store(result: dict[str, Any], path: Path | None) -> None:
    """Write `result` to `path`, whose folder is made if it is missing; without a path do nothing.

    A reader, or a copy that is made meanwhile, finds what was there before or all of it.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        new.replace(path)
