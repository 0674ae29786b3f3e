"""What each mode is predicted to gain on an engine whose latency curve is stored.

    python -m partial_rollout.advise benchmarks/results/gpu/engine_8b_h200.json              # three traces of lengths
    python -m partial_rollout.advise CURVE --jobs benchmarks/results/gpu/jobs_8b_h200.json # beside measured jobs

`python -m partial_rollout.advise.measure` takes the curve of an engine.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partial_rollout.advise.jobs import jobs_table, predict_jobs, rates
from partial_rollout.advise.predict import fit, predict_all, table
from partial_rollout.advise.result import read_result, store
from partial_rollout.advise.workload import TRACES

if TYPE_CHECKING:
    from partial_rollout.advise.scheduler import Speed


def of_traces(curve: dict[str, Any], speed: Speed, options: argparse.Namespace) -> dict[str, Any]:
    """Predict all modes for each trace, and print a table of each."""
    found = {}
    for trace in options.traces:
        found[trace] = predict_all(curve, speed, trace, options.batch)
        print(f"{trace}, {curve['engine']['shape']}\n\n{table(found[trace])}\n")
    return {"traces": found}


def of_jobs(line: argparse.ArgumentParser, speed: Speed, options: argparse.Namespace) -> dict[str, Any]:
    """Predict jobs that were measured, and print both."""
    results, first = [read_result(path) for path in options.jobs], options.from_step
    if any(result["workload"] != results[0]["workload"] for result in results):
        line.error("the jobs are of different workloads, so their tokens cannot be compared")
    jobs = [job for result in results for job in predict_jobs(result, speed)]
    most = min((len(job["seconds"]) for job in jobs), default=0)
    if not 2 <= first <= most:
        allowed = f"2 to {most}, as two steps are needed of every job" if most > 1 else "no job has two steps"
        line.error(f"--from-step {first} is not allowed: {allowed}")
    print(jobs_table(jobs, first))
    return {"from_step": first, "jobs": [{**job, "rates": rates(job, first)} for job in jobs]}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(
        "partial_rollout.advise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    line.add_argument("curve", type=Path, help="result of partial_rollout.advise.measure")
    line.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES), help="(all)")
    line.add_argument("--batch", type=int, help="prompts of a step; those of the curve's workload unless given")
    line.add_argument("--jobs", type=Path, nargs="+", help="results of benchmarks.jobs, of one workload")
    line.add_argument("--from-step", type=int, default=3, help="first step of rates and ratios of jobs (%(default)s)")
    line.add_argument("--json", type=Path, help="also write what is predicted here")
    return line


def main(words: list[str] | None = None) -> None:
    """Predict, print tables, and store them if asked to."""
    line = parser()
    options = line.parse_args(words)
    if options.batch is not None and options.batch < 1:
        line.error(f"--batch {options.batch} is not allowed: at least 1")
    curve = read_result(options.curve)
    if not curve.get("curve", {}).get("cell"):
        line.error(f"{options.curve} has no latency curve: make one with python -m partial_rollout.advise.measure")
    speed = fit(curve["curve"])
    found = of_jobs(line, speed, options) if options.jobs else of_traces(curve, speed, options)
    store({"from": options.curve.name, "speed": asdict(speed), **found}, options.json)


if __name__ == "__main__":
    main()
