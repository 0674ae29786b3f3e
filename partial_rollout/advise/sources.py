"""Response lengths of a user's own job: from its events, a dump of its rollouts, a parquet column, or its metrics."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from partial_rollout.advise.measured import SKIP
from partial_rollout.advise.predict import Training
from partial_rollout.advise.workload import Workload
from partial_rollout.errors import DataError
from partial_rollout.observability.events import BatchTaken, EventReader, TrajectoryEnded
from partial_rollout.observability.record import dump_lines, events_folder_of, load, metrics_steps
from partial_rollout.observability.step_line import PARTS, ROLLOUT_GPUS, STEP_SECONDS, seconds_by_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

SIGMA = 0.9
"""Spread that is assumed where only the mean is known: that of the log-normal trace that GPUs were measured with."""
FEW = 200
"""Responses below which the tail is a guess: its share of the longest 1 % would be one or two of them."""
SCALING = tuple(name for part in ("log-probs", "update") for name in PARTS[part] if name != "timing_s/adv")
"""verl's timers of what is divided among the training GPUs: not the advantages, which the trainer computes alone."""
MEAN, LONGEST, CUT = "response_length/mean", "response_length/max", "response_length/clip_ratio"


@dataclass(frozen=True)
class Lengths:
    """What a source says of response lengths."""

    groups: tuple[tuple[int, ...], ...]
    """Tokens of each response, by prompt; a prompt whose group is not known has one response."""
    what: str
    """Where the lengths come from, and what they do not say."""

    @property
    def num_responses(self) -> int:
        """Responses of all prompts."""
        return sum(map(len, self.groups))

    def workload(self, batch: int, group: int | None) -> Workload:
        """Batches that draw their prompts from these; a group's responses come from one prompt where it has several."""
        size = group or max(map(len, self.groups))
        longest = max(map(max, self.groups))
        return Workload(batch=batch, group=max(2, size), longest=longest, observed=self.groups)


def read_lengths(path: Path, column: str | None = None, count: Callable[[str], int] | None = None) -> Lengths:
    """Read a source; `count` counts the tokens of a text, where a dump has texts only.

    Raises:
        DataError: there is nothing to read, or it says no lengths.
    """
    if path.suffix == ".parquet":
        return _of_parquet(path, column)
    if path.is_file():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        return _of_metrics(path) if '"data"' in first else _of_dumps([path], count)
    if dumps := sorted(each for each in path.glob("*.jsonl") if each.stem.isdigit()):
        return _of_dumps(dumps, count)
    if path.is_dir() and (found := _of_events(path)) is not None:
        return found
    if metrics := sorted(path.glob("metrics*.jsonl")):
        return _of_metrics(metrics[-1])
    raise DataError(
        f"{path} says no response lengths: give a run's folder, the folder of a dump (trainer.rollout_data_dir), a "
        "metrics.jsonl, or a parquet file with --column"
    )


def read_training(run: Path) -> Training:
    """Seconds that a run's step trains: means over its steps after the first ones, in which slots fill.

    Raises:
        DataError: the run tells no seconds of such steps, or its engines had GPUs of their own.
    """
    steps = [step for step in load(run).series[SKIP:] if STEP_SECONDS in step]
    if not any(step.get(name) for step in steps for name in SCALING):
        raise DataError(f"{run} tells no seconds of log-probs and update of a step after the second one")
    if any(step.get(ROLLOUT_GPUS) for step in steps):
        raise DataError(f"in {run} engines had GPUs of their own; what is needed is a run with shared GPUs")
    scaling_s = [sum(step.get(name, 0.0) for name in SCALING) for step in steps]
    whole_s = [step[STEP_SECONDS] - seconds_by_part(step).get("generation", 0.0) for step in steps]
    mean_s = float(np.mean(scaling_s))
    return Training(mean_s, max(0.0, float(np.mean(whole_s)) - mean_s))


def _of_events(run: Path) -> Lengths | None:
    """Responses of the prompts that were trained; those still in flight at the end would lack their longest ones."""
    taken, lengths = set[str](), dict[str, list[int]]()
    for event in EventReader(events_folder_of(run)).read():
        if isinstance(event, BatchTaken):
            taken |= set(event.uids)
        elif isinstance(event, TrajectoryEnded):
            lengths.setdefault(event.uid, []).append(event.tokens)
    groups = tuple(tuple(each) for uid, each in lengths.items() if uid in taken)
    return Lengths(groups, f"{len(groups)} trained prompts in the events of {run}") if groups else None


def _of_dumps(paths: Iterable[Path], count: Callable[[str], int] | None) -> Lengths:
    groups: dict[str, list[int]] = {}
    number = 0
    for path in paths:
        for line in dump_lines(path):
            try:
                row, number = json.loads(line), number + 1
                uid = str(row.get("uid", f"{path.name}:{number}")).rsplit("_", 2)[0]
                groups.setdefault(uid, []).append(_tokens(row, path, count))
            except (ValueError, AttributeError, TypeError, KeyError) as error:
                raise DataError(f"{path} is no dump of verl's rollouts: {error!r}") from error
    if not groups:
        raise DataError(f"the dump has no response: {', '.join(map(str, paths))}")
    return Lengths(tuple(map(tuple, groups.values())), f"{number} responses of a dump of rollouts")


def _tokens(row: dict[str, object], path: Path, count: Callable[[str], int] | None) -> int:
    versions = row.get("weight_versions")
    if isinstance(versions, list) and versions:
        return max(1, sum(int(number) for _, number in versions))
    if count is None:
        raise DataError(f"{path} has texts without their numbers of tokens: give the model's folder with --tokenizer")
    return max(1, count(str(row["output"])))


def _of_parquet(path: Path, column: str | None) -> Lengths:
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no parquet file: {error}") from error
    if column not in frame:
        raise DataError(
            f"{path} has no column {column!r}: give one of {', '.join(map(str, frame.columns))} with --column"
        )
    try:
        groups = tuple(tuple(int(each) for each in np.atleast_1d(value)) for value in frame[column])
    except (ValueError, TypeError) as error:
        raise DataError(f"column {column} of {path} must hold numbers of tokens, or lists of them: {error}") from error
    if not groups or min(map(min, groups)) < 1:
        raise DataError(f"column {column} of {path} must hold numbers of tokens of at least 1")
    return Lengths(groups, f"{len(groups)} rows of column {column} in {path}")


def _of_metrics(path: Path) -> Lengths:
    """Responses as many as needed, of the log-normal distribution that has the mean, with the cut ones at the limit."""
    steps = [step.metrics for step in metrics_steps(path) if step.metrics.get(MEAN) and step.metrics.get(LONGEST)]
    if not steps:
        raise DataError(f"{path} has no {MEAN}: it is no metrics file of a verl trainer")
    mean = float(np.mean([step[MEAN] or 0.0 for step in steps]))
    longest = int(max(step[LONGEST] or 0.0 for step in steps))
    cut = float(np.mean([step.get(CUT) or 0.0 for step in steps]))
    others = max(1.0, (mean - cut * longest) / (1 - cut)) if cut < 1 else 1.0
    drawn = np.random.default_rng(0).lognormal(np.log(others) - SIGMA**2 / 2, SIGMA, size=4000)
    drawn[: round(cut * len(drawn))] = longest
    drawn = np.clip(drawn, 1, longest).astype(int)
    what = f"{len(steps)} steps of {path}, which say mean and longest only: a log-normal distribution is assumed"
    return Lengths(tuple((int(each),) for each in drawn), what)
