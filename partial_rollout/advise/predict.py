"""What each mode would take for a distribution of response lengths: seconds of computing on any machine.

The time of a decode step is fitted to a latency curve as a constant, a part for each request and a part for each token
in the KV cache, where a group has its prompt once. Predicted is a long run: the first steps are left out, so what a
batch of short responses leaves for later is counted.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from partial_rollout.advise.scheduler import Group, Mode, Rollout, Speed
from partial_rollout.advise.workload import Workload, lengths, workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WARMUP, MEASURED = 15, 40
"""Steps that are left out, and counted."""
BASE = "sync"
"""What times are compared with: verl's trainer, if it were told at once when a batch is done."""
COLOCATED = "colocate_async"
POLLING = "sync, 2 s poll"
"""verl's trainer as it is."""
BOUND = "nothing interrupted, always prompts"
"""No mode can be faster with these slots; nobody can set it."""
SPLIT_DEPTH = 2.0
"""Batches in flight of a split, the number with which a run begins."""
POLL_S = 2.0
"""Seconds between two looks of verl's trainers whether a batch is complete."""


def fit(curve: dict[str, Any]) -> Speed:
    """The speed whose relative errors over the curve's cells have the least squares; no part of it is below 0."""
    cells = curve["cell"]
    seconds = np.array([cell["decode_ms"] for cell in cells]) / 1000
    sizes = [(1.0, cell["concurrency"], cell["concurrency"] * cell["context"]) for cell in cells]
    base, request, token = non_negative_fit(np.array(sizes) / seconds[:, None], np.ones(len(cells)))
    costs = [(row["drain_ms"] + row["resume_ms"]) / 1000 for row in curve["interruption"]]
    prefill = statistics.median(cell["prefill_tokens_per_s"] for cell in cells)
    cost_s = statistics.median(costs) if costs else 0.0
    return Speed(base, request, token, prefill, cost_s)


def non_negative_fit(rows: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Coefficients of at least 0 for the columns of `rows`, with the least squares of `rows @ coefficients - wanted`.

    A curve of few cells would otherwise give an engine that gets faster with every request.

    >>> [round(value, 3) for value in non_negative_fit(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([2.0, 1.0]))]
    [1.5, 0.0]
    """
    columns = range(rows.shape[1])
    best, least = np.zeros(len(columns)), np.inf
    # The coefficients above 0 are those of a fit without the other columns; of three columns there are seven choices.
    for chosen in (list(some) for size in columns for some in itertools.combinations(columns, size + 1)):
        found = np.zeros(len(columns))
        found[chosen] = np.linalg.lstsq(rows[:, chosen], wanted, rcond=None)[0]
        error = float(np.sum((rows @ found - wanted) ** 2))
        if found.min() >= 0 and error < least:
            best, least = found, error
    return [float(value) for value in best]


def predict(mode: Mode, speed: Speed, load: Workload, prompt_tokens: int) -> dict[str, float]:
    """Means over the measured steps, rates and shares over all of their time."""
    drawn = lengths(load, int(load.batch * (WARMUP + MEASURED + mode.prefetch + 1)))
    prompts = (Group(row.tolist()) for row in drawn)
    rollout = Rollout(mode, speed, load, prompt_tokens, prompts)
    steps = [rollout.step() for _ in range(WARMUP + MEASURED)][WARMUP:]
    row = {name: statistics.fmean(step[name] for step in steps) for name in steps[0]}
    row |= {"staleness_max": max(step["staleness_max"] for step in steps), "kv_tokens": rollout.most_kv}
    in_use = row.pop("slot_s") / (row["seconds"] * mode.slots)
    return row | {"slots_in_use": in_use, "tokens_per_s": row["tokens"] / row["seconds"]}


def modes(slots: int, group: int) -> list[Mode]:
    """The modes that are compared, for a batch's trajectories as slots: `sync` first."""
    wide = (3 * slots // 2) // group * group
    # verl's sends all prompts to the engine: here it has room for the two batches that are in flight.
    colocated = Mode(COLOCATED, 2 * slots, 2, retains_kv=False, oldest_first=True, poll_s=POLL_S)
    found = [Mode(BASE, slots, 1), Mode(POLLING, slots, 1, poll_s=POLL_S), colocated]
    for prefetch in (2, 3, 4, 6):
        found.append(Mode(f"abort, prefetch {prefetch}", slots, prefetch, retains_kv=False))
        found.append(Mode(f"KV retained, prefetch {prefetch}", slots, prefetch))
    found += [Mode(f"KV retained, prefetch {prefetch}, 1.5 x the slots", wide, prefetch) for prefetch in (3, 6, 8)]
    return [*found, Mode(BOUND, slots, 12, interrupts=False)]


@dataclass(frozen=True)
class Training:
    """Seconds of a step on all GPUs, without the wait for its batch."""

    scaling_s: float
    """Take in proportion longer on fewer GPUs: log-probs and update."""
    fixed_s: float = 0.0
    """Take as long on any number of GPUs: advantages, weights, what no timer counts."""

    def on_share(self, share: float) -> float:
        """Seconds on this share of the GPUs.

        >>> Training(scaling_s=7.0, fixed_s=0.5).on_share(0.5)
        14.5
        """
        return self.scaling_s / share + self.fixed_s


def splits(speed: Speed, load: Workload, prompt_tokens: int, gpus: int, training: Training) -> list[dict[str, float]]:
    """Whole steps of each split of `gpus` into engines and training, one engine a GPU; first of all: shared.

    `speed` is that of one engine.
    """
    slots = load.batch * load.group
    row = predict(Mode("shared", slots, SPLIT_DEPTH), speed.of_replicas(gpus), load, prompt_tokens)
    train_s = training.on_share(1.0)
    rows = [row | {"rollout_gpus": 0, "train_s": train_s, "seconds": row["seconds"] + train_s}]
    for engines in range(1, gpus):
        alone_s = training.on_share((gpus - engines) / gpus)
        mode = Mode("separate", slots, SPLIT_DEPTH, train_s=alone_s)
        row = predict(mode, speed.of_replicas(engines), load, prompt_tokens)
        rows.append(row | {"rollout_gpus": engines, "train_s": alone_s})
    return [row | {"tokens_per_s": row["tokens"] / row["seconds"]} for row in rows]


def splits_table(rows: Sequence[dict[str, float]], gpus: int) -> str:
    """A Markdown table of `splits`, and which one is balanced."""
    head = ["GPUs of engines", "of training", "seconds a step", "of them training", "tokens/s", "slots in use"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        engines = row["rollout_gpus"]
        shares = [f"{engines:g}", f"{gpus - engines:g}"] if engines else ["all", "all"]
        numbers = (f"{row['seconds']:.1f}", f"{row['train_s']:.1f}", f"{row['tokens_per_s']:,.0f}")
        lines.append([*shares, *numbers, f"{row['slots_in_use']:.2f}"])
    best = max(rows, key=lambda row: row["tokens_per_s"])
    gain = best["tokens_per_s"] / rows[0]["tokens_per_s"]
    words = (
        f"balanced: {best['rollout_gpus']:g} GPUs of engines and {gpus - best['rollout_gpus']:g} of training, "
        f"{gain:.2f} x the tokens/s of shared GPUs (partial_rollout.placement=separate)"
        if best["rollout_gpus"]
        else "no split is faster than sharing all GPUs"
    )
    return f"{markdown(lines)}\n\n{words}"


def settings_of(name: str, load: Workload) -> str:
    """What sets a mode on the command line, beside the flag; empty for verl's own modes and for the bound."""
    slots = load.batch * load.group
    mode = next(mode for mode in modes(slots, load.group) if mode.name == name)
    if name in (BASE, POLLING, COLOCATED, BOUND):
        return ""
    kept = "actor_rollout_ref.rollout.free_cache_engine=False partial_rollout.tail.interrupt_mode=reuse_kv"
    words = [kept if mode.retains_kv else "partial_rollout.tail.interrupt_mode=abort"]
    words += [f"partial_rollout.prefetch_factor={mode.prefetch:g}"]
    words += ["partial_rollout.slots.adaptive=true"] if mode.slots > slots else []
    return " ".join(words)


def table(rows: dict[str, dict[str, float]]) -> str:
    """A Markdown table with a row for each mode."""
    columns = {
        "time_ratio": ("time, sync = 1", "{:.2f}"),
        "tokens_per_s": ("tokens/s", "{:,.0f}"),
        "slots_in_use": ("slots in use", "{:.2f}"),
        "reprefilled": ("re-prefilled a step", "{:,.0f}"),
        "staleness_mean": ("staleness mean", "{:.1f}"),
        "staleness_max": ("max", "{:.0f}"),
        "kv_share": ("KV cache, most", "{:.2f}"),
    }
    lines = [["mode", *(title for title, _ in columns.values())], ["---"] * (len(columns) + 1)]
    lines += [[mode, *(form.format(row[name]) for name, (_, form) in columns.items())] for mode, row in rows.items()]
    return markdown(lines)


def predict_all(
    result: dict[str, Any], speed: Speed, trace: str, batch: int | None = None
) -> dict[str, dict[str, float]]:
    """A row for each mode, for a trace on the engine of a stored curve; `batch` prompts a step instead of its own."""
    engine, stored = result["engine"], result.get("workloads", {}).get(trace)
    load = Workload(**stored) if stored else workload(engine["shape"], trace)
    return predict_load(result, speed, replace(load, batch=batch or load.batch))


def predict_load(result: dict[str, Any], speed: Speed, load: Workload) -> dict[str, dict[str, float]]:
    """A row for each mode, for a workload on the engine of a stored curve."""
    engine = result["engine"]
    compared = modes(load.batch * load.group, load.group)
    rows = {mode.name: predict(mode, speed, load, engine["prompt_tokens"]) for mode in compared}
    for row in rows.values():
        row["time_ratio"] = rows[BASE]["tokens_per_s"] / row["tokens_per_s"]
        row["kv_share"] = row["kv_tokens"] / engine["kv_tokens"]
    return rows


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """Rows of cells as a Markdown table; the second is the rule below the head."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
