"""What two or more runs differ in: time for equal tokens with its spread, rewards, and where the seconds went.

The rate of a run is the number of tokens that it trained, divided by the seconds of the steps that trained them. The
time for equal tokens is the base's rate divided by the run's: 0.8 says that the run needs 0.8 of the base's time.

The spread comes from the steps: pairs of steps, as they followed one another, are drawn again with replacement
(a bootstrap), and the ratio is computed anew. Steps go in pairs because asynchronous modes have long and short ones in
turn. What machines and seeds differ in is not in it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from partial_rollout.errors import DataError
from partial_rollout.observability.gpu_seconds import CAUSES, LOST, UNDIVIDED, gpu_seconds, lost
from partial_rollout.observability.step_line import NUM_TOKENS, PREFIX, REWARD, STEP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from partial_rollout.observability.record import RunRecord

GENERATION_SECONDS = "timing_s/gen"
STALENESS = ("training/off_policy/trajectory_staleness_worst/mean", f"{PREFIX}/staleness_steps/mean")
"""Steps since a trajectory's oldest token: verl's metric, which all of its modes tell, or else ours."""
SKIP = 2
"""First steps of a run that are left out: engines and workers load what they need, and the queue fills."""
BLOCK = 2
"""Steps of a pair."""
MIN_BLOCKS = 5
"""Pairs of steps below which nothing is said: a spread of fewer says little."""
NUM_DRAWS = 1000
SPREAD = 0.9
"""Share of the draws that lie within the spread."""

Step = dict[str, float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its spread; both bounds are None where there are too few steps to tell."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """Text for tables."""
        return f"{self.value:.2f}" + (f" ({self.low:.2f} to {self.high:.2f})" if self.low is not None else "")

    def differs_from(self, other: float) -> bool | None:
        """Whether the whole spread lies on one side of `other`; None: too few steps to tell."""
        if self.low is None or self.high is None:
            return None
        return not self.low <= other <= self.high


@dataclass(frozen=True, slots=True)
class Compared:
    """One run beside the base."""

    name: str
    num_steps: int
    """Steps that were counted."""
    step_s: float
    """Mean."""
    tokens_per_s: float
    time: Estimate
    """For equal tokens, base = 1."""
    generation: Estimate
    """Time in which the trainer waited for its batch, for equal tokens, base = 1."""
    equal_steps: Estimate
    """Time for equal steps, of those that all runs have. It differs from `time` where responses have other lengths."""
    reward: float | None
    """Mean over the second half of the steps that all runs have."""
    reward_difference: Estimate | None
    """To the base's."""
    lost_s: dict[str, float]
    """GPU seconds for 10,000 tokens, by cause."""
    staleness: float | None


def counted_steps(record: RunRecord, skip: int = SKIP) -> list[Step]:
    """The steps of a run that count: without the first ones, an even number of them.

    Raises:
        DataError: there are none.
    """
    steps = record.series[skip:]
    steps = steps[: len(steps) - len(steps) % BLOCK]
    if not steps:
        raise DataError(
            f"{record.name} has {len(record.steps)} steps: at least {skip + BLOCK} are needed; the first "
            f"{skip} are left out (--skip)"
        )
    missing = [name for name in (STEP_SECONDS, NUM_TOKENS, GENERATION_SECONDS) if name not in steps[0]]
    if missing:
        raise DataError(f"the steps of {record.name} do not have {', '.join(missing)}: they are not of a verl trainer")
    return steps


def compare(records: Sequence[RunRecord], skip: int = SKIP) -> list[Compared]:
    """All runs beside the first one.

    Raises:
        DataError: a run has too few steps.
    """
    runs = [counted_steps(record, skip) for record in records]
    base = runs[0]
    common, shared = min(len(record.series) for record in records), min(map(len, runs))
    return [
        Compared(
            name=record.name,
            num_steps=len(steps),
            step_s=_step_s(steps),
            tokens_per_s=rate(steps, STEP_SECONDS),
            time=_estimate(base, steps, lambda a, b: rate(a, STEP_SECONDS) / rate(b, STEP_SECONDS)),
            generation=_estimate(base, steps, lambda a, b: rate(a, GENERATION_SECONDS) / rate(b, GENERATION_SECONDS)),
            equal_steps=_estimate(base[:shared], steps[:shared], lambda a, b: _step_s(b) / _step_s(a)),
            reward=_reward(_late(record, common)),
            reward_difference=_reward_difference(_late(records[0], common), _late(record, common)),
            lost_s=lost_seconds(steps),
            staleness=_staleness(steps),
        )
        for record, steps in zip(records, runs, strict=True)
    ]


def _staleness(steps: Sequence[Step]) -> float | None:
    of_names = ([step[name] for step in steps if name in step] for name in STALENESS)
    return next((fmean(values) for values in of_names if values), None)


def rate(steps: Sequence[Mapping[str, float]], seconds: str) -> float:
    """Trained tokens for each second of a timer."""
    return sum(step[NUM_TOKENS] for step in steps) / max(sum(step[seconds] for step in steps), 1e-9)


def _step_s(steps: Sequence[Mapping[str, float]]) -> float:
    return fmean(step[STEP_SECONDS] for step in steps)


def lost_seconds(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """GPU seconds for 10,000 trained tokens, by cause."""
    tokens = sum(step[NUM_TOKENS] for step in steps)
    return {cause: 1e4 * seconds / tokens for cause, seconds in gpu_seconds(steps).items()}


def _late(record: RunRecord, common: int) -> list[Step]:
    return [step for step in record.series[:common][common // 2 :] if REWARD in step]


def _reward(steps: Sequence[Step]) -> float | None:
    return fmean(step[REWARD] for step in steps) if steps else None


def _reward_difference(base: Sequence[Step], steps: Sequence[Step]) -> Estimate | None:
    if not base or not steps:
        return None
    return _estimate(base, steps, lambda a, b: (_reward(b) or 0.0) - (_reward(a) or 0.0))


def _estimate(
    base: Sequence[Step], steps: Sequence[Step], of: Callable[[Sequence[Step], Sequence[Step]], float]
) -> Estimate:
    """`of` both runs, with the spread that their steps give it; of a run and itself there is none."""
    value = of(base, steps)
    if steps is base or base == steps:
        return Estimate(value, value, value)
    blocks = [_blocks(base), _blocks(steps)]
    if min(map(len, blocks)) < MIN_BLOCKS:
        return Estimate(value)
    draw = random.Random(0)  # the same answer for the same runs
    drawn = sorted(of(*(_drawn(draw, each) for each in blocks)) for _ in range(NUM_DRAWS))
    outside = (1 - SPREAD) / 2
    return Estimate(value, drawn[int(outside * NUM_DRAWS)], drawn[int((1 - outside) * NUM_DRAWS) - 1])


def _blocks(steps: Sequence[Step]) -> list[Sequence[Step]]:
    return [steps[first : first + BLOCK] for first in range(0, len(steps) - BLOCK + 1, BLOCK)]


def _drawn(draw: random.Random, blocks: Sequence[Sequence[Step]]) -> list[Step]:
    return [step for block in draw.choices(blocks, k=len(blocks)) for step in block]


def verdict(run: Compared, base: Compared) -> str:
    """One sentence: faster, slower, or not told apart; and what the rewards say."""
    if run.time.low is None:
        return (
            f"{run.name}: not enough steps to tell ({run.num_steps} and {base.num_steps} counted, of each "
            f"{BLOCK * MIN_BLOCKS} are needed); so far equal tokens take {run.time.value:.2f} of {base.name}'s time"
        )
    if not run.time.differs_from(1.0):
        speed = f"{run.name} and {base.name} are not told apart in speed by these steps: {run.time} of the time"
    else:
        word = "faster" if run.time.value < 1 else "slower"
        speed = f"{run.name} is {word} than {base.name}: equal tokens take {run.time} of the time"
    return f"{speed}; {_learning(run, base)}"


def _learning(run: Compared, base: Compared) -> str:
    difference = run.reward_difference
    if difference is None:
        return "rewards are not in both runs"
    if difference.differs_from(0.0) is None:
        return "there are not enough steps to tell rewards apart"
    if not difference.differs_from(0.0):
        return f"rewards are not told apart (difference {difference})"
    return f"its reward is {'higher' if difference.value > 0 else 'lower'} by {difference} than that of {base.name}"


def table(runs: Sequence[Compared]) -> list[list[str]]:
    """Rows of text; the first one is the head, the first column names the row."""

    def row(label: str, cell: Callable[[Compared], str]) -> list[str]:
        return [label, *(cell(run) for run in runs)]

    rows = [
        row("", lambda run: run.name),
        row("steps counted", lambda run: str(run.num_steps)),
        row("seconds a step", lambda run: f"{run.step_s:.1f}"),
        row("tokens/s", lambda run: f"{run.tokens_per_s:,.0f}"),
        row("time for equal tokens", lambda run: _cell(run.time)),
        row("  of generation only", lambda run: _cell(run.generation)),
        row("time for equal steps", lambda run: _cell(run.equal_steps)),
    ]
    if any(run.reward is not None for run in runs):
        rows.append(row("reward, late steps", lambda run: "" if run.reward is None else f"{run.reward:.3f}"))
    if any(run.staleness is not None for run in runs):
        rows.append(row("staleness, steps", lambda run: "" if run.staleness is None else f"{run.staleness:.1f}"))
    rows.append(["GPU seconds for 10,000 tokens:", *("" for _ in runs)])
    causes = part_names(run.lost_s for run in runs)
    rows += [
        row(f"  {cause}{' (lost)' if cause in LOST else ''}", lambda run, cause=cause: _seconds(run.lost_s.get(cause)))
        for cause in causes
    ]
    rows.append(row("  lost in all", lambda run: lost_in_all(run.lost_s, ".2f")))
    return rows


def lost_in_all(causes: Mapping[str, float], form: str) -> str:
    """Seconds that are lost; where generation is not divided, those of waiting for the longest come on top."""
    return f"{'not known: at least ' if UNDIVIDED in causes else ''}{lost(causes):{form}}"


def part_names(runs: Iterable[Mapping[str, float]]) -> list[str]:
    """All causes of what `lost_seconds` says of some runs."""
    names = {name for parts in runs for name in parts}
    return [cause for cause in CAUSES if cause in names]


def _cell(estimate: Estimate) -> str:
    if estimate.low == estimate.high == estimate.value:
        return f"{estimate.value:.2f}"
    return str(estimate) if estimate.low is not None else f"{estimate} (too few steps)"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
