"""`python -m partial_rollout.run.quickstart.verdict RUN --baseline-steps N -- COMMAND ...`: is the flag worth it, here?

Runs the command and shows it as `watch` does, then some steps of the same command without the flag, with the same seed,
in RUN/baseline. Then it prints both side by side, what can be said of them, and last the path of a page with charts.
A run that goes on from a checkpoint keeps the baseline that it has, if that has reached its end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from partial_rollout.errors import DataError
from partial_rollout.observability import stages
from partial_rollout.observability.comparison import SKIP, as_text, compare, table, verdict
from partial_rollout.observability.live import Screen
from partial_rollout.observability.record import events_folder_of, first_steps, load
from partial_rollout.observability.report import REPORT, write_report
from partial_rollout.observability.stages import usual_seconds
from partial_rollout.watch import METRICS_VARIABLE, follow

if TYPE_CHECKING:
    from collections.abc import Sequence

FLAG = "+async_training.partial_rollout=True"
STEPS = "trainer.total_training_steps"
FOLDERS = {"trainer.default_local_dir": "checkpoints", "partial_rollout.events": "events", "hydra.run.dir": "hydra"}
OPTIONAL_FOLDERS = {"trainer.rollout_data_dir": "rollouts", "trainer.validation_data_dir": "validation"}
"""Moved too, where the command has them: both runs would write the same files."""
FIRST_START_S = {
    stages.CONFIGURATION: (26.0, 109.0),
    stages.RAY: (26.0, 105.0),
    stages.TRAINING: (36.0, 76.0),
    stages.ENGINES: (79.0, 140.0),
    stages.FIRST_STEP: (12.0, 23.0),
}
"""Seconds of each stage, at least and at most, in three starts on 2 cores that did other work too. Quiet ones: less."""
SHARE, LEAST = 3, 4
"""A short run gets a baseline of a third of its steps; below 4 steps nothing is left without the first ones."""
WITHOUT = "without the flag"
WHOLE = "whole"
"""An empty file in the baseline's folder: the baseline has reached its end."""


def num_baseline_steps(command: Sequence[str], most: int) -> int:
    """Steps without the flag, at most `most`; a run of very few steps gets none.

    >>> num_baseline_steps(["trainer.total_training_steps=60"], 20)
    20
    >>> num_baseline_steps(["trainer.total_training_steps=8"], 20)
    4
    """
    steps = [word.partition("=")[2] for word in command if word.partition("=")[0] == STEPS]
    total = int(steps[-1]) if steps and steps[-1].isdigit() else None
    if total is None:
        return most
    return min(most, max(LEAST, total // SHARE)) if total >= LEAST else 0


def without_the_flag(command: Sequence[str], folder: Path, steps: int) -> list[str]:
    """The command without the flag, in another folder and for `steps` steps: same data, same seed."""
    words = [word for word in command if word != FLAG]
    # In quotes, as in the recipes: else a comma or an equals sign in a path would mean something to Hydra.
    given = {word.lstrip("+").partition("=")[0] for word in command}
    moved = FOLDERS | {key: name for key, name in OPTIONAL_FOLDERS.items() if key in given}
    paths = {key: str(folder / name).replace("'", "\\'") for key, name in moved.items()}
    return [*words, *(f"{key}='{path}'" for key, path in paths.items()), f"{STEPS}={steps}"]


def side_by_side(run: Path, baseline: Path, screen: Screen) -> None:
    """Print what both runs showed, and write the page."""
    base, ours = load(baseline), load(run)
    base.name, ours.name = WITHOUT, "with it"
    # Responses change their lengths as the model learns: only the steps that both have are the same work.
    common = min(max(base.steps, default=0), max(ours.steps, default=0))
    screen.line("")
    if common < LEAST:
        screen.line(f"not enough steps to tell what the flag changed: {common} are there, {LEAST} are needed at least")
        screen.line(str(run / REPORT))
        return
    found = compare([first_steps(record, common) for record in (base, ours)])
    screen.line(f"the first {common} steps with and without the flag, same seed; {SKIP} of each are not counted:")
    for line in as_text(table(found)).splitlines():
        screen.line(line)
    screen.line(verdict(found[1], found[0]))
    write_report(run / REPORT, [base, ours], first=common)
    screen.line(str(run / REPORT))


def main(words: list[str] | None = None) -> int:
    """Returns the exit code of the first command that failed."""
    given = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(prog="python -m partial_rollout.run.quickstart.verdict", description=__doc__)
    parser.usage = "%(prog)s RUN --baseline-steps N -- COMMAND ..."
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--baseline-steps", type=int, required=True, metavar="N", help="most steps without the flag")
    options = parser.parse_args(given[: given.index("--")])
    command, screen = given[given.index("--") + 1 :], Screen(sys.stdout)
    run, baseline = options.run, options.run / "baseline"
    try:
        code = follow(command, run, screen, FIRST_START_S)
        steps = num_baseline_steps(command, options.baseline_steps)
        if code == 0 and steps and not (baseline / WHOLE).exists():
            code = _run_baseline(command, baseline, steps, screen)
        if code == 0:
            side_by_side(run, baseline if steps else run, screen)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


def _run_baseline(command: Sequence[str], baseline: Path, steps: int, screen: Screen) -> int:
    if baseline.exists():
        screen.line("")
        screen.line(f"the run without the flag in {baseline} did not reach its end: it is removed, and starts again")
        shutil.rmtree(baseline)
    screen.line("")
    screen.line(f"now {steps} steps of the same job without the flag, to compare (BASELINE_STEPS=0 leaves them out)")
    os.environ[METRICS_VARIABLE] = str(baseline / "metrics.jsonl")
    first_s = usual_seconds(events_folder_of(baseline.parent), before_s=time.time())
    code = follow(without_the_flag(command, baseline, steps), baseline, screen, first_s)
    if code == 0:
        (baseline / WHOLE).touch()
    return code


if __name__ == "__main__":
    sys.exit(main())
