"""`python -m partial_rollout.trace RUN [-o FILE]`: a run as a trace that https://ui.perfetto.dev opens.

Perfetto's page draws the file in the browser; nothing of it is sent anywhere.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from partial_rollout.errors import DataError
from partial_rollout.observability.events import EventReader
from partial_rollout.observability.record import events_folder_of, load
from partial_rollout.observability.trace import make_tracks, write

TRACE = "run.pftrace"
"""In a run's folder."""


def main(words: list[str] | None = None) -> int:
    """Write the trace and print where it is; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m partial_rollout.trace", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or its metrics file")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="the trace (run.pftrace in the run's folder)")
    options = parser.parse_args(words)
    run = options.run
    path = options.out or (run.parent if run.is_file() else run) / TRACE
    try:
        write_trace(run, path)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


def write_trace(run: Path, path: Path) -> None:
    """Write the trace, whole or not at all.

    Raises:
        DataError: there is no run at `run`, or the package that writes traces is missing.
    """
    record = load(run)
    events = [] if run.is_file() else EventReader(events_folder_of(run)).read()
    tracks = make_tracks(record, events)
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            write(file, tracks)
    except ImportError as error:
        new.unlink()
        raise DataError(f"{error}; `pip install perfetto` brings what writes a trace") from error
    os.replace(new, path)


if __name__ == "__main__":
    sys.exit(main())
