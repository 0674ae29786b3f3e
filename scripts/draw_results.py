"""Draw the pictures of the results pages from the stored results.

    python -m scripts.draw_results          # writes docs/img/*.png

One message a picture; its title says it. Where training steps are drawn, they are the axis or are numbered.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from benchmarks.learning import PANELS, WINDOW, held_out, rewards, seconds
from partial_rollout.advise.result import read_result

mpl.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS, OUT = ROOT / "benchmarks/results", ROOT / "docs/img"
COLOURS = ("#e45756", "#f58518", "#4c78a8", "#54a24b", "#b279a2")
COMPARED = "#bbbbbb"
FULL_RATE = "uninterrupted"
NUMBER_WIDTH = 0.025
"""Share of a picture's width: closer step numbers would be drawn over each other."""


@dataclass(frozen=True)
class Load:
    """Requests in one engine over time: its mode, the ends of its steps, and (seconds, share of a batch's slots)."""

    label: str
    ends_s: Sequence[float]
    points: Sequence[tuple[float, float]]


def job_loads(name: str, labels: dict[str, str]) -> list[Load]:
    """Loads of whole jobs; time begins with the first step's end, as that step loads everything."""
    result = read_result(RESULTS / "gpu" / name)
    slots = result["workload"]["batch"] * result["workload"]["group"]
    loads = []
    for mode, label in labels.items():
        job = next(job for job in result["jobs"] if job["mode"] == mode)
        begun = job["ends_s"][0]
        ends = [end - begun for end in job["ends_s"][1:]]
        points = [(row[0] - begun, row[1] / slots) for row in job["samples"] if row[0] >= begun]
        loads.append(Load(label, ends, points))
    return loads


def engine_loads(name: str, labels: dict[str, str]) -> list[Load]:
    """Loads of one engine, on the long-tailed trace; samples are (seconds, requests, ...)."""
    result = read_result(RESULTS / "gpu" / name)
    loads = []
    for mode, label in labels.items():
        block = next(each for each in result["blocks"] if (each["mode"], each["trace"]) == (mode, "long_tail"))
        begun = block["steps"][0]["ended_s"]
        ends = [step["ended_s"] - begun for step in block["steps"][1:]]
        points = [(row[0] - begun, row[1] / block["slots"]) for row in block["samples"] if row[0] >= begun]
        loads.append(Load(label, ends, points))
    return loads


def draw_loads(loads: Sequence[Load], title: str) -> Figure:
    """A panel for each job, one below the other on one time axis; grey lines and numbers are the ends of steps."""
    figure, panels = plt.subplots(
        len(loads), 1, figsize=(9, 1.75 * len(loads) + 0.7), sharex=True, sharey=True, layout="constrained"
    )
    longest = max(load.points[-1][0] for load in loads)
    for load, panel, colour in zip(loads, panels, COLOURS, strict=False):
        panel.fill_between(*zip(*load.points, strict=True), color=colour, alpha=0.55, linewidth=0)
        panel.axhline(1.0, color="#888888", linewidth=0.8, linestyle="--")
        numbered_s = float("-inf")
        for number, end in enumerate(load.ends_s, start=2):
            panel.axvline(end, color="#bbbbbb", linewidth=0.8)
            many = len(load.ends_s) > 20
            if end - numbered_s > NUMBER_WIDTH * longest and (not many or number % 5 == 0):
                numbered_s = end
                panel.text(
                    end, 1.0, f"{number} ", ha="right", va="top", fontsize=7, transform=panel.get_xaxis_transform()
                )
        panel.set_title(load.label, fontsize=9, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds (grey lines: a training step ends; its number stands left of its line)", fontsize=9)
    figure.supylabel("requests that generate\n(dashed, 1: as many as a batch has responses)", fontsize=8)
    panels[0].set_ylim(bottom=0)
    panels[0].set_xlim(left=0, right=longest)
    figure.suptitle(title, fontsize=11)
    return figure


def draw_steps(name: str, labels: dict[str, str], title: str) -> Figure:
    """Seconds of generation by training step."""
    result = read_result(RESULTS / "gpu" / name)
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    for (mode, label), colour in zip(labels.items(), COLOURS, strict=False):
        job = next(job for job in result["jobs"] if job["mode"] == mode)
        seconds = [step["timing_s/gen"] for step in (job["first_steps"] + job["steps"])[1:]]
        axes.plot(range(2, 2 + len(seconds)), seconds, "o-", color=colour, label=label, linewidth=1.2, markersize=4)
    axes.set_xlabel("training step")
    axes.set_ylabel("seconds of generation")
    axes.set_ylim(bottom=0)
    return _finished(figure, title)


def draw_learning(what: str, ylabel: str, title: str) -> Figure:
    """Mean over seeds by training step; the band is from the lowest to the highest seed."""
    jobs = read_result(RESULTS / "learning_curves.json")["jobs"]
    labels = {"policy_sync": "wait", "partial_rollout": "partial", "reorder": "reorder"}
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    for (mode, label), colour in zip(labels.items(), COLOURS, strict=False):
        seeds = [_trailing(job[what]) for job in jobs if job["mode"] == mode]
        steps = range(1, len(seeds[0]) + 1)
        columns = list(zip(*seeds, strict=True))
        axes.plot(steps, [statistics.fmean(column) for column in columns], color=colour, label=label)
        axes.fill_between(
            steps, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.15, linewidth=0
        )
    axes.set_xlabel("training step (lines: mean of three seeds; bands: lowest to highest seed)")
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    return _finished(figure, title)


def draw_rates(name: str, labels: dict[str, str], title: str) -> Figure:
    """Useful tokens a second of one engine's modes, the last of `labels` in grey, since it is no mode to train with.

    The dashed line is the rate of slots that are always full.
    """
    rows = read_result(RESULTS / "gpu" / name)["summary"]["long_tail"]
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    rates = [rows[mode]["useful_tokens_per_s"] for mode in labels]
    axes.barh(range(len(rates)), rates, color=[COLOURS[2]] * (len(rates) - 1) + [COMPARED])
    axes.set_yticks(range(len(rates)), labels.values(), fontsize=9)
    axes.invert_yaxis()
    bound = rows[FULL_RATE]["generated_tokens_per_s"]
    axes.axvline(bound, color="k", linestyle="--")
    axes.text(bound, 0, "slots that are always full ", fontsize=8, ha="right", va="center")
    axes.set_xlabel("tokens of complete responses a second")
    return _finished(figure, title)


def _trailing(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values[max(0, end - WINDOW) : end]) for end in range(1, len(values) + 1)]


def _finished(figure: Figure, title: str, place: str = "best") -> Figure:
    [axes] = figure.axes
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc=place)
    axes.set_title(title, fontsize=11, loc="left")
    return figure


MOST_BANDS = 4
"""Bands of more jobs hide the curves."""


def draw_real_model(name: str, title: str) -> Figure:
    """The reward of each job against its minutes of training."""
    figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
    jobs = _real_jobs(name)
    for job, style in zip(jobs, _real_styles(jobs), strict=True):
        minutes = [seconds(job, number) / 60 for number in range(1, len(job["steps"]) + 1)]
        raw = rewards(job, 1)
        axes.plot(minutes, _trailing(raw), label=f"{_real_name(job)}: {len(raw)} steps", **style)
        if len(jobs) <= MOST_BANDS:
            _band(axes, minutes, raw, style["color"])
    axes.set_xlabel("minutes of training, without validation")
    band = f"\n(band: standard deviation of the {WINDOW})" if len(jobs) <= MOST_BANDS else ""
    axes.set_ylabel(f"reward, mean of {WINDOW} steps{band}")
    return _finished(figure, title, "lower right")


def draw_real_steps(name: str, title: str) -> Figure:
    """Means over the last steps, against the step: a panel for each of `REAL_PANELS`; the reward has a band."""
    figure, grid = plt.subplots(3, 3, figsize=(11, 8.5), sharex=True, layout="constrained")
    jobs, lines = _real_jobs(name), []
    for (panel, heading), axes in zip(REAL_PANELS.items(), grid.flat, strict=True):
        has_band = panel == "reward" and len(jobs) <= MOST_BANDS
        for job, style in zip(jobs, _real_styles(jobs), strict=True):
            numbers, values = _real_points(job, panel)
            smooth = values if panel == HELD_OUT else _trailing(values)
            lines += axes.plot(numbers, smooth, label=_real_name(job), linewidth=1.2, **style)
            if has_band:
                _band(axes, numbers, values, style["color"])
        told = f" (band: standard deviation of {WINDOW} steps)" if has_band else ""
        axes.set_title(heading + told, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        if panel not in ("reward", HELD_OUT):
            axes.set_ylim(bottom=0)
    for axes in grid[-1]:
        axes.set_xlabel(f"training step (means of up to {WINDOW} steps)", fontsize=8)
    figure.legend(handles=lines[: len(jobs)], loc="outside lower center", ncol=2, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def _real_points(job: dict[str, Any], panel: str) -> tuple[list[int], list[float]]:
    """Numbers of the steps that have what a panel shows, and its values.

    The first step is left out, as it loads everything. Without old log-probs some names begin with `actor/`, and the
    entropy is missing.
    """
    if panel == HELD_OUT:
        accuracy = held_out(job)
        return [int(number) for number in accuracy], list(accuracy.values())
    metric = PANELS[panel]
    values = [step.get(metric, step.get(f"actor/{metric}")) for step in job["steps"]]
    found = [(number, value) for number, value in enumerate(values, 1) if value is not None and number > 1]
    return [number for number, _ in found], [value for _, value in found]


def _band(axes: Axes, at: Sequence[float], values: Sequence[float], colour: str) -> None:
    """Standard deviation of the last steps around their mean."""
    spread = [statistics.pstdev(values[max(0, end - WINDOW) : end]) for end in range(1, len(values) + 1)]
    edges = ([mean + sign * each for mean, each in zip(_trailing(values), spread, strict=True)] for sign in (-1, 1))
    axes.fill_between(at, *edges, alpha=0.08, color=colour, linewidth=0)


def _real_styles(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A colour for each mode; a mode's second job is dashed."""
    modes = list(dict.fromkeys(job["mode"] for job in jobs))
    places = [
        (modes.index(job["mode"]), [each["mode"] for each in jobs[:n]].count(job["mode"])) for n, job in enumerate(jobs)
    ]
    return [{"color": COLOURS[mode], "linestyle": ("-", "--")[repeat]} for mode, repeat in places]


def _real_name(job: dict[str, Any]) -> str:
    return MODE_NAMES[job["mode"]] + (f" (seed {job['seed']})" if job["seed"] else "")


def _real_jobs(name: str) -> list[dict[str, Any]]:
    return read_result(RESULTS / "gpu" / name)["jobs"]


SYNC, COLOCATED = "verl's sync", "verl's colocate_async"


MODE_NAMES = {
    "sync": SYNC,
    "colocate_async": COLOCATED,
    "reuse_kv_3": "ours: KV retained, 3 batches",
    "reuse_kv_5_adaptive": "ours: KV retained, 5 batches, adaptive number of slots",
    "sync_drafts": "verl's sync with drafts",
    "flag_alone": "ours: the flag alone",
    "flag_drafts": "ours: the flag alone with drafts",
    "flag_bypass": "ours: the flag alone with rollout log-probs as old ones",
    "flag_reinforce": "ours: the flag alone without old log-probs",
    "flag_reorder": "ours: the flag with reorder",
    "flag_released": "ours: the flag alone, engine memory released",
    "flag_uncorrected": "ours: the flag without correction",
    "flag_fp8_weights": "ours: the flag alone, fp8 weights in the engine",
    "flag_fp8_kv": "ours: the flag alone, fp8 KV cache",
    "reuse_kv_5_deep": "ours: KV retained, 5 batches, all of which generate at once",
}


HELD_OUT = "held out"
REAL_PANELS = {
    "reward": "reward",
    HELD_OUT: "accuracy on held-out problems (0.03 more or less is chance)",
    "response length, tokens": "tokens of a response",
    "entropy, nats": "entropy, nats a token",
    "generation, s a step": "seconds of generation",
    "step, s": "seconds of a training step",
    "staleness, steps": "updates since the oldest token",
    "tokens cut to weight 2": "share of tokens whose weight is cut to 2",
    "TIS weight, standard deviation": "standard deviation of the tokens' weights",
}
"""Panels of the real model's jobs: names in `PANELS`, but for the held-out problems, and their titles."""


def pictures() -> dict[str, Figure]:
    """All of them, by file name."""
    retained = {
        "sync": SYNC,
        "colocate_async": COLOCATED,
        "partial_reuse_kv_prefetch_3": "ours: KV retained, 3 batches",
    }
    return {
        "learning_reward": draw_learning("reward", "reward, mean of 10 steps", "All three policies learn alike"),
        "learning_time": draw_learning(
            "gen_s",
            "seconds of generation, mean of 10 steps",
            "Steps that do not wait for the longest response are shorter",
        ),
        "jobs_8b_load": draw_loads(
            job_loads("jobs_8b_h200.json", retained),
            "verl's modes empty their slots in every step; ours keeps most of them full",
        ),
        "jobs_8b_steps": draw_steps(
            "jobs_8b_h200.json", retained, "colocate_async alternates between long and short steps; ours evens them out"
        ),
        "jobs_8b_long_load": draw_loads(
            job_loads(
                "jobs_8b_long_h200.json",
                {
                    "partial_rollout": "abort: everything computed again, 2 batches",
                    "partial_adaptive_reuse_kv_prefetch_5": "KV retained, 5 batches, adaptive number of slots",
                },
            ),
            "Five batches in flight keep more slots busy than a batch has; with two, slots run empty in every step",
        ),
        "jobs_4b_load": draw_loads(
            job_loads("jobs_4b_h200.json", retained), "With training between the steps: KV retained keeps slots full"
        ),
        "engine_8b_load": draw_loads(
            engine_loads(
                "engine_8b_h200.json",
                {
                    "sync": "wait: nothing is interrupted",
                    "partial_reuse_kv_adaptive": "KV retained, 3 batches, adaptive slots",
                },
            ),
            "With three batches in flight prompts run out before the step ends",
        ),
        "engine_8b_deep_load": draw_loads(
            engine_loads(
                "engine_8b_deep_h200.json",
                {
                    "partial_reuse_kv_deep": "KV retained, 6 batches, adaptive slots",
                    "partial_abort": "abort: everything computed again, 2 batches",
                },
            ),
            "Six batches fill all slots, after 133 seconds in which few responses end",
        ),
        "engine_8b_rates": draw_rates(
            "engine_8b_modes_h200.json",
            {
                "sync": "wait: the step waits for its batch",
                "reorder": "reorder: long responses together",
                "partial_abort_cost": "abort: contexts computed again, 2 batches",
                "partial_keep_kv": "keep_kv: contexts kept, 2 batches",
                "uninterrupted": "for comparison: no training step interrupts,\nand prompts never run out",
            },
            "Of the four modes keep_kv comes nearest to an engine without interruptions",
        ),
        "smollm2_h200": draw_real_model("smollm2_h200.json", "A real model of 135M learns alike in all four modes"),
        "smollm2_steps_h200": draw_real_steps(
            "smollm2_h200.json",
            "With KV retained steps are shorter; tokens are about one update old, and responses are shorter",
        ),
        "smollm2_long_h200": draw_real_model(
            "smollm2_long_h200.json",
            "Rewards rise alike; with the flag alone and with deep queues about as soon as in colocate_async",
        ),
        "smollm2_seed_1_h200": draw_real_model(
            "smollm2_seed_1_h200.json",
            "Side by side on one GPU the flag alone learns first, verl's sync last",
        ),
        "smollm2_seed_1_more_h200": draw_real_model(
            "smollm2_seed_1_more_h200.json",
            "Reordered, with released memory and uncorrected the flag learns alike in one seed",
        ),
        "smollm2_seed_2_h100": draw_real_model(
            "smollm2_seed_2_h100.json",
            "A third seed: without old log-probs the flag learns as much in each step, in shorter steps",
        ),
        "smollm2_bypass_h200": draw_real_model(
            "smollm2_bypass_h200.json",
            "With rollout log-probs as old ones the flag alone learns as much in each step, in shorter steps",
        ),
        "smollm2_fp8_h200": draw_real_model(
            "smollm2_fp8_h200.json",
            "With fp8 weights in its engine no difference is seen; an fp8 KV cache lies below",
        ),
        "smollm2_drafts_h100": draw_real_model(
            "smollm2_drafts_h100.json",
            "With drafts a model of 135M learns as without, and no sooner",
        ),
        "smollm2_drafts_h200": draw_real_model(
            "smollm2_drafts_h200.json",
            "The flag alone with drafts in nearly all steps: rewards rise as without",
        ),
        "smollm2_long_steps_h200": draw_real_steps(
            "smollm2_long_h200.json",
            "Modes with old tokens have shorter steps and shorter responses, verl's colocate_async too",
        ),
        "smollm2_seed_1_steps_h200": draw_real_steps(
            "smollm2_seed_1_h200.json", "For equal steps the three modes learn alike; the flag alone waits least"
        ),
        "smollm2_seed_2_steps_h100": draw_real_steps(
            "smollm2_seed_2_h100.json",
            "The third seed: rewards rise alike; tokens' weights spread most with five batches in flight",
        ),
    }


def main() -> None:
    """Draw and save."""
    mpl.rcParams["figure.max_open_warning"] = 0  # all are kept until they are saved
    for name, figure in pictures().items():
        figure.savefig(OUT / f"{name}.png", dpi=100)
        plt.close(figure)


if __name__ == "__main__":
    main()
