"""Pictures of a result of `benchmarks.gpu.all` or `benchmarks.gpu.jobs`.

    python -m benchmarks.gpu.plots benchmarks/results/gpu/engine_8b_h200.json --out docs/img

`slots_*`: requests in the engine's batch over the time of each mode's first block or job, on one axis, with the ends of
its steps; `steps_*`: seconds of generation in every measured step; `rates_*`: useful tokens/s against the bound of full
slots, of whole jobs response tokens/s of generation, or tokens/s of whole steps if it has no others; `curve_*`: decode
step by concurrency, a line for each context length.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from benchmarks.gpu.summary import BOUND, ROW, TIME, in_pairs, measured_steps
from benchmarks.result import read_result

mpl.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

Result = dict[str, Any]
WIDTH, HEIGHT = 9.0, 3.6
COLUMN = 0.6
"""Width of a mode's steps, of 1 from mode to mode."""
SHOWN = 5
"""Modes in the picture of slots; more lines cannot be told apart."""


def draw_slots(axes: Axes, result: Result) -> None:
    """Share of a batch's slots that generate, over the time after the primer."""
    first = {block["mode"]: block for block in reversed(result["blocks"]) if block["steps"] and block["samples"]}
    for mode in [mode for mode in result["summary"] if mode in first][:SHOWN]:
        block = first[mode]
        begun_s = block["steps"][0]["ended_s"]
        samples = [sample for sample in block["samples"] if sample[TIME] >= begun_s]
        shares = [sample[ROW] / block["slots"] for sample in samples]
        (line,) = axes.plot([sample[TIME] - begun_s for sample in samples], shares, label=mode, linewidth=1.2)
        ends = [step["ended_s"] - begun_s for step in block["steps"][1:]]
        axes.plot(ends, [0.0] * len(ends), "|", color=line.get_color(), markersize=14)
    axes.set_xlabel("seconds (bars: a step ends)")
    axes.set_ylabel("running requests (1: a batch)")
    axes.set_ylim(bottom=-0.03)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_steps(axes: Axes, result: Result) -> None:
    """Seconds of each measured step, from left to right, and their mean, of whole jobs that of an even number.

    Steps of `colocate_async` alternate between long and short ones.
    """
    for place, mode in enumerate(result["summary"]):
        blocks = [block for block in result["blocks"] if block["mode"] == mode]
        steps = measured_steps(blocks)
        walls = [step["wall_s"] for step in steps]
        counted = [step["wall_s"] for step in steps if step.get("paired", True)]
        across = [place + COLUMN * ((number + 0.5) / len(walls) - 0.5) for number in range(len(walls))]
        axes.plot(across, walls, "o-", alpha=0.6, linewidth=0.8)
        axes.plot(place, statistics.fmean(counted or walls), "k_", markersize=22)
    _name_modes(axes, result)
    axes.set_ylabel("seconds of generation in a step")
    axes.set_ylim(bottom=0)


def draw_rates(axes: Axes, result: Result) -> None:
    """Useful tokens/s of each mode; the line is the bound."""
    rows = result["summary"]
    rates = [row["useful_tokens_per_s"] for row in rows.values()]
    bars = axes.bar(range(len(rates)), rates)
    labels = [f"{row['time_ratio']:.2f}" if "time_ratio" in row else "" for row in rows.values()]
    axes.bar_label(bars, labels, fontsize=8)
    if BOUND in rows:
        axes.axhline(rows[BOUND]["generated_tokens_per_s"], color="k", linestyle="--", label="slots always full")
        axes.legend(fontsize=8, loc="lower right")
    axes.margins(y=0.12)
    _name_modes(axes, result)
    axes.set_ylabel("tokens/s (number: time, sync = 1)")


def _name_modes(axes: Axes, result: Result) -> None:
    modes = list(result["summary"])
    axes.set_xticks(range(len(modes)), modes, rotation=20, ha="right", fontsize=8)


def draw_curve(axes: Axes, result: Result) -> None:
    """Decode step by concurrency."""
    cells = result["curve"]["cell"]
    for context in sorted({cell["context"] for cell in cells}):
        points = sorted((cell["concurrency"], cell["decode_ms"]) for cell in cells if cell["context"] == context)
        axes.plot(*zip(*points, strict=True), "o-", label=f"context {context:.0f}")
    axes.set_xscale("log", base=2)
    sizes = sorted({cell["concurrency"] for cell in cells})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(0, 1.1 * max(cell["decode_ms"] for cell in cells))
    axes.set_xlabel("requests in the batch")
    axes.set_ylabel("decode step, ms")
    axes.legend(fontsize=8)


PICTURES = {"slots": draw_slots, "steps": draw_steps, "rates": draw_rates}


def as_blocks(result: Result) -> Result:
    """A result of whole jobs as one of blocks: the first job of a mode is its block."""
    load, trace = result["workload"], result["options"]["trace"]
    slots, skip = load["batch"] * load["group"], load["skip"]
    blocks = []
    for job in result["jobs"]:
        walls = [step["timing_s/gen"] for step in job["steps"]]
        counted = range(skip, skip + len(in_pairs(walls)))
        steps = [
            {"ended_s": end_s, "warmup": number < skip, "paired": number in counted}
            for number, end_s in enumerate(job["ends_s"])
        ]
        steps = [{**step, "wall_s": wall_s} for step, wall_s in zip(steps, [0.0] * skip + walls, strict=False)]
        samples = [[at_s, running, running] for at_s, running in job["samples"]]
        blocks.append({"mode": job["mode"], "trace": trace, "slots": slots, "steps": steps, "samples": samples})
    rows = {}
    for mode, row in result["summary"].items():
        rows[mode] = {"useful_tokens_per_s": row["tokens_per_s"]}
        if "token_rate_ratio_to_sync" in row:
            rows[mode]["time_ratio"] = 1 / row["token_rate_ratio_to_sync"]
    for mode, row in result.get("generation", {}).items():
        rows[mode]["useful_tokens_per_s"] = row["tokens_per_s"]
        if "time_ratio_to_sync" in row:
            rows[mode]["time_ratio"] = row["time_ratio_to_sync"]
    each = max(len(job.get("gpus", ())) for job in result["jobs"])
    devices = result["devices"][: each or None]
    return {**result, "devices": devices, "blocks": blocks, "summary": {trace: rows}, "curve": {"cell": []}}


def place(result: Result) -> str:
    """The model's shape and the GPUs: of one engine, or of one of the whole jobs."""
    engine = result["engine"]
    counted = Counter(result["devices"][: engine.get("tensor_parallel")])
    machine = ", ".join(f"{number} x {name}" for name, number in counted.items())
    return f"{engine['shape']}, {machine or 'CPU'}"


def draw(result: Result, out: Path, name: str) -> list[Path]:
    """All pictures that the result has numbers for."""
    result = as_blocks(result) if "jobs" in result else result
    where = place(result)
    paths = []
    for trace, rows in result["summary"].items():
        blocks = [block for block in result["blocks"] if block["trace"] == trace]
        sampled = any(block["samples"] for block in blocks)
        for kind, picture in PICTURES.items() if rows else ():
            if picture is draw_slots and not sampled:
                continue
            path = out / f"{kind}_{trace}_{name}.png"
            paths.append(_save(path, f"{trace}, {where}", picture, {"blocks": blocks, "summary": rows}))
    if result["curve"]["cell"]:
        paths.append(_save(out / f"curve_{name}.png", where, draw_curve, result))
    return paths


def _save(path: Path, title: str, picture: Callable[[Axes, Result], None], result: Result) -> Path:
    figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    picture(axes, result)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def main() -> None:
    """Draw one result."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("result", type=Path)
    line.add_argument("--out", type=Path, required=True)
    options = line.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for path in draw(read_result(options.result), options.out, options.result.stem):
        print(path)


if __name__ == "__main__":
    main()
