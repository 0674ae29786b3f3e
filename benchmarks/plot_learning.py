"""Reward and generation time of the quickstart with and without partial rollout, same seed and task.

    bash partial_rollout/run/run_quickstart_cpu.sh            # writes metrics.jsonl, says where
    bash partial_rollout/run/run_quickstart_cpu_baseline.sh
    python -m benchmarks.plot_learning --partial .../metrics.jsonl --sync .../metrics.jsonl

Several files of one mode (several seeds) are averaged. Writes the picture and a small JSON with the numbers in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
REWARD, GEN_SECONDS = "critic/score/mean", "timing_s/gen"
WINDOW = 5
"""Steps averaged at each end for the from/to numbers, and in the drawn curves."""


def read(path: Path) -> list[dict[str, float]]:
    """Training steps of one run."""
    lines = [json.loads(line)["data"] for line in path.read_text().splitlines()]
    return [line for line in lines if REWARD in line]


def smooth(values: list[float]) -> list[float]:
    """Trailing mean over WINDOW steps."""
    return [statistics.fmean(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]


def summary(runs: list[list[dict[str, float]]]) -> dict[str, Any]:
    """From/to of the reward (means of the first and last WINDOW steps) and the mean generation time."""
    return {
        "num_runs": len(runs),
        "num_steps": [len(run) for run in runs],
        "reward_from": [round(statistics.fmean(step[REWARD] for step in run[:WINDOW]), 3) for run in runs],
        "reward_to": [round(statistics.fmean(step[REWARD] for step in run[-WINDOW:]), 3) for run in runs],
        "gen_s_median": [round(statistics.median(step[GEN_SECONDS] for step in run), 3) for run in runs],
        "reward": [[round(step[REWARD], 4) for step in run] for run in runs],
        "resumed_share": [
            round(statistics.fmean(step.get("partial_rollout/resumed_share", 0.0) for step in run), 3) for run in runs
        ],
    }


def draw(modes: dict[str, list[list[dict[str, float]]]], out: Path) -> None:
    """One panel for the reward, one for generation seconds."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
    for (name, runs), colour in zip(modes.items(), ("tab:blue", "tab:orange"), strict=True):
        for index, run in enumerate(runs):
            steps = range(1, len(run) + 1)
            label = name if index == 0 else None
            top.plot(steps, [step[REWARD] for step in run], color=colour, alpha=0.25, linewidth=0.8)
            top.plot(steps, smooth([step[REWARD] for step in run]), color=colour, label=label)
            bottom.plot(steps, [step[GEN_SECONDS] for step in run], color=colour, label=label, linewidth=1)
    top.set_ylabel(f"mean reward (bold: mean of {WINDOW} steps)")
    bottom.set(xlabel="training step", ylabel="generation, seconds a step", ylim=(0, None))
    top.legend()
    figure.savefig(out, dpi=120)


def main() -> None:
    """Draw and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partial", type=Path, nargs="+", required=True, help="metrics.jsonl of partial rollout runs")
    parser.add_argument("--sync", type=Path, nargs="+", required=True, help="metrics.jsonl of verl sync runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/img/learning_curves.png")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/learning_curves.json")
    arguments = parser.parse_args()
    modes = {
        "partial rollout": [read(path) for path in arguments.partial],
        "verl sync": [read(path) for path in arguments.sync],
    }
    draw(modes, arguments.out)
    numbers = {name: summary(runs) for name, runs in modes.items()}
    arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")
    for name, row in numbers.items():
        print(name, {key: value for key, value in row.items() if key != "reward"})


if __name__ == "__main__":
    main()
