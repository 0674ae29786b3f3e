"""Steps of whole jobs, predicted from an engine's latency curve and the jobs' own prompts, beside what they took.

    python -m benchmarks.gpu.predict_jobs benchmarks/results/gpu/{engine_8b,jobs_8b,jobs_8b_second_round}_h200.json

The curve is one of `benchmarks.gpu.all`, the jobs are those of `benchmarks.gpu.jobs`; of one load, if there are several
files. Rates and ratios are those of generation, for response tokens, and of an even number of steps.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_rollout import Workload, num_prompts
from benchmarks.gpu.inputs import PROMPT_TOKENS, primed_lengths
from benchmarks.gpu.jobs import response_tokens
from benchmarks.gpu.predict import COLOCATED, POLLING, Group, Mode, Rollout, Speed, fitted, modes
from benchmarks.gpu.summary import in_pairs, markdown
from benchmarks.result import read_result, store


def job_modes(slots: int, group: int) -> dict[str, Mode]:
    """Those of whole jobs that can be predicted, by their names in `bench_rollout.MODES`."""
    named = {mode.name: mode for mode in modes(slots, group)}
    # An adaptive number rises to what the engine of such a job runs at most, and beyond.
    adaptive = replace(named["KV retained, prefetch 4"], slots=2 * slots)
    return {
        "sync": named[POLLING],
        "sync_fast_poll": named["sync"],
        COLOCATED: named[COLOCATED],
        f"{COLOCATED}_fast_poll": replace(named[COLOCATED], poll_s=0.0),
        "partial_rollout": named["abort, prefetch 2"],
        "partial_rollout_prefetch_3": named["abort, prefetch 3"],
        "partial_reuse_kv": named["KV retained, prefetch 2"],
        "partial_offload_kv": named["KV retained, prefetch 2"],
        "partial_reuse_kv_prefetch_3": named["KV retained, prefetch 3"],
        "partial_adaptive_reuse_kv": adaptive,
        "partial_adaptive_reuse_kv_prefetch_5": replace(adaptive, prefetch=5),
    }


def predict_jobs(result: dict[str, Any], speed: Speed) -> list[dict[str, Any]]:
    """Seconds of generation and response tokens of each step of jobs, `[predicted, measured]`, from their own prompts.

    The step of the primer is left out, as engine and workers load at their first use what they need. So are jobs
    without another step, and those in modes that are not predicted.
    """
    load = Workload(**result["workload"])
    prompt = result["engine"].get("prompt_tokens", PROMPT_TOKENS)
    drawn = primed_lengths(load, num_prompts(load))
    known, found = job_modes(load.batch * load.group, load.group), []
    for job in result["jobs"]:
        measured = job.get("first_steps", []) + job["steps"]
        if job["mode"] not in known or len(measured) < 2:
            print(f"left out: {job['mode']}, a job of {len(measured)} steps", file=sys.stderr)
            continue
        prompts = (Group(row.tolist()) for row in itertools.cycle(drawn))
        rollout = Rollout(known[job["mode"]], speed, load, prompt, prompts)
        steps = [(rollout.step(), step) for step in measured][1:]
        found.append({
            "mode": job["mode"],
            "seconds": [[step["seconds"], now["timing_s/gen"]] for step, now in steps],
            "tokens": [[step["tokens"], response_tokens(now, load, prompt)] for step, now in steps],
        })  # fmt: skip
    return found


def rates(job: dict[str, Any], first: int) -> tuple[float, float]:
    """Response tokens for each second of generation, predicted and measured, from step `first` on (1: the primer's)."""
    tokens, seconds = (np.array(in_pairs(job[name][first - 2 :])) for name in ("tokens", "seconds"))
    predicted, measured = tokens.sum(axis=0) / seconds.sum(axis=0)
    return float(predicted), float(measured)


def jobs_table(jobs: list[dict[str, Any]], first: int) -> str:
    """Markdown, predicted / measured: all steps, and from the step `first` on what equal tokens took to `sync`."""
    of_sync = next((rates(job, first) for job in jobs if job["mode"] == "sync"), None)
    lines = [["mode", "seconds of each step", f"tokens/s from step {first} on", "time, sync = 1"], ["---"] * 4]
    for job in jobs:
        found = rates(job, first)
        ratios = [base / rate for base, rate in zip(of_sync, found, strict=True)] if of_sync else []
        steps = ", ".join(f"{predicted:.1f} / {measured:.1f}" for predicted, measured in job["seconds"])
        columns = [" / ".join(f"{rate:,.0f}" for rate in found), " / ".join(f"{ratio:.2f}" for ratio in ratios)]
        lines.append([job["mode"], steps, *columns])
    return markdown(lines)


def main() -> None:
    """Predict, and print a table."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("curve", type=Path, help="result.json of benchmarks.gpu.all, with a curve")
    line.add_argument("jobs", type=Path, nargs="+", help="jobs.json of benchmarks.gpu.jobs")
    line.add_argument("--from-step", type=int, default=3, help="first step of rates and ratios (%(default)s)")
    line.add_argument("--json", type=Path, help="also write them here")
    options = line.parse_args()
    speed = fitted(line, options.curve, read_result(options.curve))
    results = [read_result(path) for path in options.jobs]
    if any(result["workload"] != results[0]["workload"] for result in results):
        line.error("the jobs are of different workloads, so their tokens cannot be compared")
    jobs = [job for result in results for job in predict_jobs(result, speed)]
    most = min((len(job["seconds"]) for job in jobs), default=0)
    if not 2 <= options.from_step <= most:
        allowed = f"2 to {most}, as two steps are needed of every job" if most > 1 else "no job has two steps"
        line.error(f"--from-step {options.from_step} is not allowed: {allowed}")
    print(jobs_table(jobs, options.from_step))
    found = [{**job, "rates": rates(job, options.from_step)} for job in jobs]
    stored = {"from": options.curve.name, "speed": asdict(speed), "from_step": options.from_step, "jobs": found}
    store(stored, options.json)


if __name__ == "__main__":
    main()
