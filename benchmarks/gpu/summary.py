"""From stored blocks to one row for each mode, and the rows as a table."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

T = TypeVar("T")
BASE = "sync"
BOUND = "uninterrupted"
FULL = 0.95
"""Slots count as full from this share on."""
PIECE = 10
"""Samples between two of which a rate is taken."""
Step = dict[str, float]
Row = dict[str, Any]
MEANS = (
    "interrupted",
    "reprefilled_in_engine",
    "drain_ms",
    "update_ms",
    "resume_ms",
    "staleness_steps/mean",
    "stale_token_share",
    "old_kv_token_share",
    "slots/num",
)
TIME, ROW, RUNNING, WAITING, KV_USAGE, TOKENS = range(6)
"""Columns of a block's samples."""


def in_pairs(steps: Sequence[T]) -> Sequence[T]:
    """Without an odd last one: every other step of `colocate_async` is a long one."""
    return steps[: len(steps) // 2 * 2]


def measured_steps(blocks: Iterable[Mapping[str, Any]]) -> list[Step]:
    """Steps of all blocks after those that only fill the slots."""
    return [step for block in blocks for step in block["steps"] if not step["warmup"]]


def by_trace(blocks: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Row]]:
    """`summarise` for each trace."""
    traces = dict.fromkeys(block["trace"] for block in blocks)
    return {trace: summarise([block for block in blocks if block["trace"] == trace]) for trace in traces}


def summarise(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Row]:
    """A row for each mode that has measured steps, in the order of their first blocks; ratios to `sync` and the bound.

    `time_ratio` is the time for equal useful tokens: those of the batches that were taken. A batch of short responses
    leaves the long ones for later, so few steps flatter a mode that interrupts; `generated_time_ratio` counts what the
    engine generated instead, and blames it for what is never taken. The truth of a long run lies between them.
    """
    modes = dict.fromkeys(block["mode"] for block in blocks)
    rows = {mode: _row([block for block in blocks if block["mode"] == mode]) for mode in modes}
    rows = {mode: row for mode, row in rows.items() if row}
    for row in rows.values():
        if BASE in rows:
            row["time_ratio"] = rows[BASE]["useful_tokens_per_s"] / row["useful_tokens_per_s"]
            row["generated_time_ratio"] = rows[BASE]["generated_tokens_per_s"] / row["generated_tokens_per_s"]
        if BOUND in rows:
            row["share_of_bound"] = row["useful_tokens_per_s"] / rows[BOUND]["generated_tokens_per_s"]
    return rows


def _row(blocks: Sequence[Mapping[str, Any]]) -> Row:
    steps = measured_steps(blocks)
    if not steps:
        return {}
    walls = [step["wall_s"] for step in steps]
    quartiles = statistics.quantiles(walls, n=4, method="inclusive") if len(walls) > 1 else [walls[0]] * 3
    overhead_s = sum(step["drain_ms"] + step["resume_ms"] for step in steps) / 1000
    row: Row = {
        "num_steps": len(steps),
        "num_blocks": len(blocks),
        "wall_s": statistics.fmean(walls),
        "wall_s_median": quartiles[1],
        "wall_s_q1": quartiles[0],
        "wall_s_q3": quartiles[2],
        "useful_tokens": statistics.fmean(step["useful_tokens"] for step in steps),
        "useful_tokens_per_s": sum(step["useful_tokens"] for step in steps) / sum(walls),
        "generated_tokens_per_s": sum(step["generated_tokens"] for step in steps) / sum(walls),
        "overhead_share": overhead_s / sum(walls),
    }
    stalest = [step["staleness_steps/max"] for step in steps if "staleness_steps/max" in step]
    if stalest:
        row["staleness_max"] = max(stalest)
    row |= {name: _mean(steps, name) for name in MEANS if any(name in step for step in steps)}
    return row | _slots(blocks)


def _mean(steps: Iterable[Step], name: str) -> float:
    return statistics.fmean(step[name] for step in steps if name in step)


def _slots(blocks: Iterable[Mapping[str, Any]]) -> Row:
    """Share of a batch's slots in which the engine generated, and tokens/s while they were full, by the samples."""
    measured = [(block["slots"], measured_samples(block)) for block in blocks]
    samples = [(slots, sample) for slots, of_block in measured for sample in of_block]
    rates = [rate for slots, of_block in measured for rate in full_rates(of_block, slots)]
    row: Row = {}
    if samples:
        row["slots_in_use"] = statistics.fmean(sample[ROW] / slots for slots, sample in samples)
        row["kv_usage_max"] = max(sample[KV_USAGE] for _, sample in samples)
    if rates:
        row["full_slot_tokens_per_s"] = statistics.median(rates)
    return row


def measured_samples(block: Mapping[str, Any]) -> list[list[float]]:
    """Those of the measured steps."""
    ends = [step["ended_s"] for step in measured_steps([block])]
    begun_s = max((step["ended_s"] for step in block["steps"] if step["warmup"]), default=0.0)
    return [sample for sample in block["samples"] if ends and begun_s <= sample[TIME] <= ends[-1]]


def full_rates(samples: Iterable[list[float]], slots: int) -> list[float]:
    """Tokens/s between samples with full slots, over several hand-overs each, since tokens come in pieces."""
    rates, full = [], []
    for sample in samples:
        full = [*full, sample] if sample[RUNNING] >= FULL * slots else []
        if len(full) > PIECE:
            seconds = full[-1][TIME] - full[0][TIME]
            rates.append((full[-1][TOKENS] - full[0][TOKENS]) / seconds)
            full = full[-1:]
    return rates


COLUMNS: dict[str, tuple[str, str]] = {
    "num_steps": ("steps", "{:.0f}"),
    "wall_s": ("s a step", "{:.2f}"),
    "wall_s_q1": ("q1", "{:.2f}"),
    "wall_s_q3": ("q3", "{:.2f}"),
    "useful_tokens_per_s": ("useful tokens/s", "{:,.0f}"),
    "time_ratio": ("time, sync = 1", "{:.2f}"),
    "generated_time_ratio": ("by generated tokens", "{:.2f}"),
    "share_of_bound": ("of the bound", "{:.2f}"),
    "slots_in_use": ("slots in use", "{:.2f}"),
    "reprefilled_in_engine": ("re-prefilled a step", "{:,.0f}"),
    "drain_ms": ("drain ms", "{:.0f}"),
    "resume_ms": ("resume ms", "{:.0f}"),
    "overhead_share": ("drain + resume share", "{:.3f}"),
    "staleness_steps/mean": ("staleness mean", "{:.2f}"),
    "staleness_max": ("max", "{:.0f}"),
    "stale_token_share": ("stale tokens", "{:.2f}"),
    "slots/num": ("slots", "{:.0f}"),
}


def table(rows: Mapping[str, Row]) -> str:
    """Markdown."""
    shown = {name: column for name, column in COLUMNS.items() if any(name in row for row in rows.values())}
    head = ["mode", *(title for title, _ in shown.values())]
    lines = [head, ["---"] * len(head)]
    for mode, row in rows.items():
        lines.append([mode, *(form.format(row[name]) if name in row else "" for name, (_, form) in shown.items())])
    return markdown(lines)


def curve_tables(curve: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown: decode steps by concurrency and context, and interruptions by mode."""
    return "\n\n".join(_plain(rows) for rows in curve.values() if rows)


def _plain(rows: Sequence[Mapping[str, Any]]) -> str:
    head = list(rows[0])
    cells = [[_short(row[name]) for name in head] for row in rows]
    return markdown([head, ["---"] * len(head), *cells])


def _short(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,.2f}".removesuffix(".00")


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """Rows of cells as a Markdown table; the second is the rule below the head."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
