"""`python -m partial_rollout.compare BASE RUN [RUN ...]`: is a run faster than another one, and does it learn the same?

A run is its folder (the event stream, or `metrics*.jsonl` of verl's `file` logger for verl's own modes), or such a
file. The first one is the base. Runs of image jobs are refused: they have none of verl's metrics.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from partial_rollout.errors import DataError
from partial_rollout.observability.advice import change
from partial_rollout.observability.comparison import SKIP, as_text, compare, table, verdict
from partial_rollout.observability.pipe import reader_may_leave
from partial_rollout.observability.record import load
from partial_rollout.observability.report import write_report


def main(words: list[str] | None = None) -> int:
    """Print the comparison, and write it as a page if asked; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m partial_rollout.compare", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics file")
    parser.add_argument("--skip", type=int, default=SKIP, help="first steps of each that are left out (%(default)s)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write a page with charts")
    options = parser.parse_args(words)
    try:
        if len(options.runs) < 2:
            raise DataError("give at least two runs: the base, and what is compared with it")  # noqa: TRY301
        records = [load(path) for path in options.runs]
        runs = compare(records, options.skip)
        if options.report:
            write_report(options.report, records, options.skip)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with reader_may_leave():
        print(as_text(table(runs)))
        print()
        for run in runs[1:]:
            print(verdict(run, runs[0]))
        for record in records:
            if to_try := change(record):
                print(f"next to try with {record.name}: {to_try}")
        if options.report:
            print(f"charts: {options.report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
