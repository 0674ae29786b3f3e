"""`... | python -m partial_rollout.observability.progress`: turns a run's log into a progress bar and step lines.

Reads verl's console log from standard input. Shows a progress bar, one line for each training step, and the lines that
begin with `partial_rollout:` or `error:`. All other lines are for the log file.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, TextIO

from tqdm import tqdm

from partial_rollout.observability.step_line import step_line

if TYPE_CHECKING:
    from collections.abc import Iterable

STEP = re.compile(r"\bstep:(\d+) - (.*)")
TOTAL = re.compile(r"Training Progress:.*?\b(\d+)/(\d+)")
METRIC = re.compile(r"(?P<key>[\w/@.\-]+):(?:np\.\w+\()?(?P<value>-?[\d.]+(?:e[+-]?\d+)?)\)?$")
SHOWN = re.compile(r"(?:^|\) )(?P<text>(?:partial_rollout:|error:).*)")


def parse_metrics(text: str) -> dict[str, float]:
    """The numbers in a line `key:value - key:value` of verl's console log; parts that are no numbers are skipped.

    >>> parse_metrics("critic/score/mean:0.5 - timing_s/gen:np.float64(2.0) - note:none")
    {'critic/score/mean': 0.5, 'timing_s/gen': 2.0}
    """
    matches = (METRIC.match(part.strip()) for part in text.split(" - "))
    return {match["key"]: float(match["value"]) for match in matches if match}


class ProgressView:
    """The progress bar and the step lines of one run, from its log lines."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._total: int | None = None
        self._bar: tqdm | None = None

    def feed(self, line: str) -> None:
        """Show what `line` says, if anything."""
        if match := TOTAL.search(line):
            self._set_total(int(match[1]), int(match[2]))
        if match := STEP.search(line):
            self._show_step(int(match[1]), parse_metrics(match[2]))
        elif match := SHOWN.search(line):
            tqdm.write(match["text"], file=self._out)

    def close(self) -> None:
        """End the progress bar, which stays on the screen."""
        if self._bar is not None:
            self._bar.close()

    def _set_total(self, done: int, total: int) -> None:
        if self._bar is None:
            self._total = total
            self._bar = tqdm(total=total, initial=done, unit="step", file=self._out, dynamic_ncols=True)

    def _show_step(self, step: int, metrics: dict[str, float]) -> None:
        if "training/global_step" not in metrics:
            return
        tqdm.write(step_line(step, self._total, metrics), file=self._out)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)


def main(lines: Iterable[str] = sys.stdin, out: TextIO = sys.stdout) -> None:
    """Show progress until the input ends."""
    view = ProgressView(out)
    for line in lines:
        for part in line.rstrip("\n").split("\r"):
            view.feed(part)
    view.close()


if __name__ == "__main__":
    main()
