"""Do the ways to roll out learn the same? Reward, learning rate and steps of whole quickstart runs on equal seeds.

    python -m benchmarks.learning_curves --seeds 0 1 2 [--at-once 6] [--task DIR] [--resume]
    python -m benchmarks.learning_curves --modes sync flag --seeds 0 1 2 --json FILE

The first mode given is what the others are compared with: by the reward of all steps and of the last ones, beside the
spread over that mode's own seeds. The learning rate rises over the first steps, so that a schedule can go wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.jobs import CPU_MODES, mode_options
from benchmarks.lanes import Lane, make_lanes, run_all
from benchmarks.training_job import (
    ROOT,
    read_steps,
    require_success,
    training_command,
    training_job,
    until_over,
)
from partial_rollout.advise.result import circumstances, store, stored_jobs
from partial_rollout.run.quickstart.make_task import TaskParameters, make_task
from partial_rollout.runtime.termination import heed_termination

REWARD, GEN_SECONDS = "critic/score/mean", "timing_s/gen"
WINDOW = 10
"""Steps of the from/to numbers at each end."""
WARMUP_STEPS = 5
SLOTS = 64
"""Slots of the quickstart: 16 prompts x 4."""
JOB_TIMEOUT_S = 1800.0
LONG_ROUNDS = ("partial_rollout/round/long/", "partial_rollout/round/mixed/")
OF_THE_BATCH = ("resumed_share", "staleness_steps/mean", "old_kv_token_share", "depth")
"""Metrics of each step's batch, without `partial_rollout/`; 0 in verl's own modes."""
COMPARED = ("sync", "wait", "partial_rollout", "reorder")


def run(task: Path, options: argparse.Namespace, mode: str, seed: int, lane: Lane) -> dict[str, Any]:
    """One training job; its curves."""
    folder = options.work.resolve() / f"{mode}-{seed}"
    command = training_command(task, folder, [
        f"data.seed={seed}", f"trainer.total_training_steps={options.steps}",
        f"actor_rollout_ref.actor.optim.lr_warmup_steps={WARMUP_STEPS}", *mode_options(mode, SLOTS), *options.overrides,
    ], options.python)  # fmt: skip
    with training_job(command, folder, lane) as job:
        for _ in until_over(job, lane, JOB_TIMEOUT_S):
            pass
    require_success(job, mode, folder)
    return curves(mode, seed, read_steps(folder))


def curves(mode: str, seed: int, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """What is stored of a job's steps."""
    return {
        "mode": mode,
        "seed": seed,
        "global_steps": [step["training/global_step"] for step in steps],
        "learning_rate": [step["actor/lr"] for step in steps],
        "reward": [round(step[REWARD], 4) for step in steps],
        "response_length": [round(step["response_length/mean"], 2) for step in steps],
        "gen_s": [round(step[GEN_SECONDS], 3) for step in steps],
        **{name: [round(step.get(f"partial_rollout/{name}", 0.0), 4) for step in steps] for name in OF_THE_BATCH},
        "long_rounds": sum(any(key.startswith(LONG_ROUNDS) for key in step) for step in steps),
    }


def summarise(jobs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per mode, over its seeds; differences of the reward are to the first mode, seed by seed."""
    rows: dict[str, dict[str, Any]] = {}
    modes = list(dict.fromkeys(job["mode"] for job in jobs))
    base = {job["seed"]: job for job in jobs if job["mode"] == modes[0]}
    for mode in modes:
        own = [job for job in jobs if job["mode"] == mode]
        pairs = [(job, base[job["seed"]]) for job in own if job["seed"] in base]
        ends = [statistics.fmean(job["reward"][-WINDOW:]) for job in own]
        rows[mode] = {
            "seeds": [job["seed"] for job in own],
            "reward_from": round(statistics.fmean(statistics.fmean(job["reward"][:WINDOW]) for job in own), 3),
            "reward_to": [round(end, 3) for end in ends],
            "reward_to_mean": round(statistics.fmean(ends), 3),
            "reward_to_spread": round(max(ends) - min(ends), 3),
            "reward_all_steps": round(statistics.fmean(statistics.fmean(job["reward"]) for job in own), 3),
            "difference_all_steps": [
                round(statistics.fmean(job["reward"]) - statistics.fmean(other["reward"]), 3) for job, other in pairs
            ],
            "same_steps_and_learning_rate": all(
                job["global_steps"] == other["global_steps"] and job["learning_rate"] == other["learning_rate"]
                for job, other in pairs
            ),
            "gen_s_median": round(statistics.median(value for job in own for value in job["gen_s"]), 3),
            **{name: round(statistics.fmean(value for job in own for value in job[name]), 3) for name in OF_THE_BATCH},
            "long_rounds": [job["long_rounds"] for job in own],
        }
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(COMPARED), choices=CPU_MODES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--at-once", type=int, default=1, help="jobs side by side, each on two cores")
    parser.add_argument("--task", type=Path, help="folder made by run.quickstart.make_task; made when not given")
    parser.add_argument("--work", type=Path, default=Path("outputs/learning_curves"), help="logs and metrics")
    parser.add_argument("--json", type=Path, default=ROOT / "outputs/learning_curves/learning_curves.json")
    parser.add_argument("--resume", action="store_true", help="keep the jobs that --json has, and run the others")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the jobs and of their Ray workers")
    parser.add_argument("overrides", nargs="*", help="further Hydra overrides, for every mode")
    return parser


def main(words: list[str] | None = None) -> None:
    """Run all jobs, and store them."""
    options = _parser().parse_args(words)
    heed_termination()
    about = circumstances(options)
    for name in ("task", "work", "python", "resume"):
        del about["options"][name]
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    task = options.task.resolve() if options.task else work / "task"
    if not options.task:
        make_task(task, TaskParameters())
    jobs = stored_jobs(options.json, resume=options.resume, about={})
    ended_before = {(job["mode"], job["seed"]) for job in jobs}
    wanted = [(mode, seed) for seed in options.seeds for mode in options.modes if (mode, seed) not in ended_before]
    storing = threading.Lock()

    def run_one(mode: str, seed: int, lane: Lane) -> None:
        job = run(task, options, mode, seed, lane)
        with storing:
            jobs.append(job)
            jobs.sort(key=lambda each: (options.modes.index(each["mode"]), each["seed"]))
            store({**about, "summary": summarise(jobs), "jobs": jobs}, options.json, raw=["jobs"])
            print(f"{mode}, seed {seed}: job {len(jobs)} of {len(ended_before) + len(wanted)}", flush=True)

    run_all([partial(run_one, *each) for each in wanted], make_lanes(options.at_once))
    for mode, row in summarise(jobs).items():
        print(mode, row)


if __name__ == "__main__":
    main()
