"""Pictures of stored runs: whole jobs (`benchmarks.jobs`) and latency curves (`partial_rollout.advise.measure`).

    python -m benchmarks.plots benchmarks/results/gpu/jobs_8b_h200.json --out docs/img

`slots_*`: how full the engine was over the time of each mode's first job, and when its steps ended; `steps_*`: seconds
of generation in every step; `curve_*`: milliseconds of a decode step by the number of requests.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from partial_rollout.advise.result import read_result

mpl.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

Result = dict[str, Any]
WIDTH, HEIGHT = 9.0, 3.6
LABELS = {
    "sync": "verl sync",
    "sync_fast_poll": "verl sync, polls every 50 ms",
    "colocate_async": "verl colocate_async",
    "colocate_async_fast_poll": "verl colocate_async, polls every 50 ms",
    "partial_rollout": "abort, 2 batches in flight (default)",
    "partial_reuse_kv": "reuse_kv, 2 batches in flight",
    "partial_offload_kv": "offload_kv, 2 batches in flight",
    "partial_reuse_kv_prefetch_3": "reuse_kv, 3 batches in flight",
    "partial_adaptive_reuse_kv": "reuse_kv, 4 batches, adaptive slots",
    "partial_adaptive_reuse_kv_prefetch_5": "reuse_kv, 5 batches, adaptive slots",
}
"""Modes in words; another mode is shown by its name."""


def first_jobs(result: Result) -> dict[str, Result]:
    """The first job of each mode that got to a measured step, by the words for the mode."""
    jobs = [job for job in reversed(result["jobs"]) if job["steps"]]
    found = {job["mode"]: job for job in jobs}
    return {LABELS.get(mode, mode): found[mode] for mode in dict.fromkeys(job["mode"] for job in reversed(jobs))}


def all_steps(job: Result) -> list[Result]:
    """Steps of a job, the first ones too."""
    return job.get("first_steps", []) + job["steps"]


def draw_slots(axes: Axes, result: Result) -> None:
    """Requests that run, as a share of a batch's responses, from the end of the first step on."""
    size = result["workload"]["batch"] * result["workload"]["group"]
    for label, job in first_jobs(result).items():
        begun_s = job["ends_s"][0]
        samples = [(at_s - begun_s, running / size) for at_s, running in job["samples"] if at_s >= begun_s]
        if samples:
            (line,) = axes.plot(*zip(*samples, strict=True), label=label, linewidth=1.2)
            ends = [end_s - begun_s for end_s in job["ends_s"][1:]]
            axes.plot(ends, [0.0] * len(ends), "|", color=line.get_color(), markersize=14)
    axes.set_xlabel("seconds since the first step (a bar below: a training step ends)")
    axes.set_ylabel("requests that generate\n(1 = one batch of responses)")
    axes.set_ylim(bottom=-0.03)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_steps(axes: Axes, result: Result) -> None:
    """Seconds of generation of each step after the first, which only loads what is loaded at first use."""
    for label, job in first_jobs(result).items():
        seconds = [step["timing_s/gen"] for step in all_steps(job)][1:]
        axes.plot(range(2, 2 + len(seconds)), seconds, "o-", label=label, linewidth=1.0, markersize=4)
    axes.set_xlabel("training step")
    axes.set_ylabel("seconds of generation")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_curve(axes: Axes, result: Result) -> None:
    """A decode step by the number of requests, a line for each length of their contexts."""
    cells = result["curve"]["cell"]
    for context in sorted({cell["context"] for cell in cells}):
        points = sorted((cell["concurrency"], cell["decode_ms"]) for cell in cells if cell["context"] == context)
        axes.plot(*zip(*points, strict=True), "o-", label=f"{context:.0f} tokens of context each")
    axes.set_xscale("log", base=2)
    sizes = sorted({cell["concurrency"] for cell in cells})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(0, 1.1 * max(cell["decode_ms"] for cell in cells))
    axes.set_xlabel("requests in the engine")
    axes.set_ylabel("milliseconds of a decode step")
    axes.legend(fontsize=8)


def draw(result: Result, out: Path, name: str) -> list[Path]:
    """All pictures that the result has numbers for."""
    shape, gpu = result["engine"]["shape"], (result["devices"] or ["CPU"])[0].split(",")[0]
    pictures: dict[str, tuple[str, Callable[[Axes, Result], None]]] = {}
    if result.get("jobs"):
        if any(job["samples"] for job in result["jobs"]):
            pictures["slots"] = ("how full the engine is", draw_slots)
        pictures["steps"] = ("generation of each step", draw_steps)
    if result.get("curve", {}).get("cell"):
        pictures["curve"] = ("what a decode step takes", draw_curve)
    paths = []
    for kind, (title, picture) in pictures.items():
        figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
        picture(axes, result)
        axes.set_title(f"{shape} on {gpu}: {title}", fontsize=10)
        paths.append(out / f"{kind}_{name}.png")
        figure.savefig(paths[-1], dpi=110)
        plt.close(figure)
    return paths


def main(words: list[str] | None = None) -> None:
    """Draw the results that are named."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("results", type=Path, nargs="+")
    line.add_argument("--out", type=Path, required=True)
    options = line.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.results:
        print(*draw(read_result(path), options.out, path.stem), sep="\n")


if __name__ == "__main__":
    main()
