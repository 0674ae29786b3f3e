"""`python -m partial_rollout.report RUN [RUN ...] [-o FILE]`: a run, or several side by side, as one HTML file.

Without `-o` the page of one run is written to `report.html` in its folder, as it is at the end of every run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from partial_rollout.errors import DataError
from partial_rollout.observability.comparison import SKIP
from partial_rollout.observability.record import load
from partial_rollout.observability.report import REPORT, write_report


def main(words: list[str] | None = None) -> int:
    """Write the page and print where it is; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m partial_rollout.report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics file")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="the page (report.html in the first folder)")
    parser.add_argument("--skip", type=int, default=SKIP, help="first steps of each that are left out (%(default)s)")
    options = parser.parse_args(words)
    first = options.runs[0]
    path = options.out or (first.parent if first.is_file() else first) / REPORT
    try:
        write_report(path, [load(run) for run in options.runs], options.skip)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
