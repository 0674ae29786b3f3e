"""Does a real model learn in the fast modes? The SmolLM2 recipe in several modes: rewards against steps and minutes.

    python -m benchmarks.smollm2 --gpus 0 1 1 0 --job-s 1200 --json FILE.json --out OUT

One job for each mode and seed, on the first of `--gpus` that is free; a GPU named twice has two jobs side by side. A
job that does not end within `--job-s` counts as far as it came. All have the same data, learning rate, correction and
starting model, whose digest is checked; engine memory is kept. Make the task first, in OUT/smollm2_task (the recipe's
`make_task`), so that jobs side by side find it. Jobs that were stored one by one become one result with

    python -m benchmarks.smollm2 --modes --add ONE.json TWO.json --json FILE.json --out OUT
"""

from __future__ import annotations

import argparse
import shlex
import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lanes import Lane, run_all
from benchmarks.training_job import ROOT, run_job
from partial_rollout.advise.result import about_run, read_result, store
from partial_rollout.run.task_files import TaskFiles
from partial_rollout.runtime.termination import heed_termination

if TYPE_CHECKING:
    from collections.abc import Sequence

Job = dict[str, Any]
RECIPE = ROOT / "partial_rollout/run/run_smollm2_reasoning_gym.sh"
REUSE_KV = ("actor_rollout_ref.rollout.free_cache_engine=False", "partial_rollout.tail.interrupt_mode=reuse_kv")
DEPTH = "partial_rollout.prefetch_factor"
MODES: dict[str, tuple[dict[str, str], list[str]]] = {
    "sync": ({"PARTIAL_ROLLOUT": "0"}, []),
    "colocate_async": ({"PARTIAL_ROLLOUT": "0"}, ["trainer.v1.trainer_mode=colocate_async"]),
    "reuse_kv_3": ({}, [*REUSE_KV, f"{DEPTH}=3"]),
    "reuse_kv_5_adaptive": ({}, [*REUSE_KV, f"{DEPTH}=5", "partial_rollout.slots.adaptive=True"]),
    "flag_alone": ({}, []),
    "reuse_kv_5_deep": (
        {},
        [*REUSE_KV, f"{DEPTH}=5", "partial_rollout.num_slots=1024", "partial_rollout.slots.adaptive=False"],
    ),
}
"""The recipe's variables and overrides of each mode. `deep` begins all prompts in flight at once, so most are old."""
BASE, FASTEST_OF_VERL = "sync", "colocate_async"
WINDOW = 10
"""Steps of a mean: the reward of one batch of 256 responses varies by 0.06."""
REWARD, STEP_S, VALIDATION = "critic/score/mean", "timing_s/step", "val-core/"
PANELS = {
    "reward": REWARD,
    "response length, tokens": "response_length/mean",
    "entropy, nats": "actor/entropy",
    "staleness, steps": "training/off_policy/trajectory_staleness_worst/mean",
    "step, s": STEP_S,
    "generation, s a step": "timing_s/gen",
    "log-probs, s a step": "timing_s/old_log_prob",
    "update, s a step": "timing_s/update_actor",
    "TIS weight, standard deviation": "rollout_corr/rollout_is_std",
    "tokens cut to weight 2": "rollout_corr/rollout_is_ratio_fraction_high",
}
"""What is summarised and drawn against steps, and its name in the metrics."""


def command(options: argparse.Namespace, mode: str, seed: int) -> list[str]:
    """The recipe in one mode."""
    variables, overrides = MODES[mode]
    own = {"OUTPUT_DIR": options.out.resolve(), "EXPERIMENT": f"{mode}-{seed}", "EXPECT_DIGEST": options.digest}
    shared = own | {"TOTAL_STEPS": options.steps, "SAVE_FREQ": -1} | dict(pair.split("=", 1) for pair in options.env)
    kept = ["actor_rollout_ref.rollout.free_cache_engine=False", "trainer.resume_mode=disable", f"data.seed={seed}"]
    pairs = [f"{name}={value}" for name, value in (shared | variables).items()]
    return ["env", *pairs, "bash", str(RECIPE), *kept, *overrides, *options.set]


def seconds(job: Job, number: int) -> float:
    """Seconds of a job's first steps; verl does not count validation in them."""
    return sum(step[STEP_S] for step in job["steps"][:number])


def rewards(job: Job, window: int = WINDOW) -> list[float]:
    """For each step, the mean of its reward and of those before it."""
    found = [step[REWARD] for step in job["steps"]]
    return [statistics.fmean(found[max(0, end - window) : end]) for end in range(1, len(found) + 1)]


def steps_to(job: Job, level: float) -> int | None:
    """Steps until the mean reward of WINDOW steps is at a level; None: never."""
    return next((number for number, mean in enumerate(rewards(job), 1) if number >= WINDOW and mean >= level), None)


def held_out(job: Job) -> dict[str, float]:
    """Accuracy on held-out problems, the mean of the tasks, by the number of the step."""
    found = {}
    for number, step in enumerate(job["steps"], 1):
        values = [value for name, value in step.items() if name.startswith(VALIDATION) and name.endswith("mean@1")]
        found |= {str(number): round(statistics.fmean(values), 3)} if values else {}
    return found


def summarise(jobs: Sequence[Job]) -> dict[str, Any]:
    """For each job, how far it came, and the time for equal steps, and to the last reward of `sync` in each seed."""
    common = min(len(job["steps"]) for job in jobs)
    rows = []
    for job in jobs:
        base = next((each for each in jobs if (each["mode"], each["seed"]) == (BASE, job["seed"])), job)
        reached = steps_to(job, rewards(base)[-1])
        row: Job = {"mode": job["mode"], "seed": job["seed"], "steps": len(job["steps"]), "held_out": held_out(job)}
        row |= {"reward_first": rewards(job)[min(WINDOW, common) - 1], "reward_last": rewards(job)[-1]}
        row |= {"reward_common_last_half": statistics.fmean(s[REWARD] for s in job["steps"][common // 2 : common])}
        row |= {"common_steps_s": seconds(job, common), "time_ratio": seconds(job, common) / seconds(base, common)}
        row |= {"steps_to_level": reached, "s_to_level": seconds(job, reached) if reached else None}
        for title, name in PANELS.items():
            values = [step[name] for step in job["steps"][WINDOW:common] if name in step]
            row[title] = statistics.fmean(values) if values else None
        rows.append({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})
    return {"common_steps": common, "summary": rows}


def earlier(results: Sequence[Path]) -> tuple[dict[str, Any], list[Job]]:
    """Jobs of stored results, and what the first of them says of its run beside them."""
    found = [read_result(path) for path in results]
    first = found[0] if found else {}
    about = {name: value for name, value in first.items() if name not in ("common_steps", "summary", "jobs")}
    return about, [job for result in found for job in result["jobs"]]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--out", type=Path, required=True, help="folder of the task and of the jobs' logs")
    line.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    line.add_argument("--add", nargs="+", type=Path, default=[], metavar="FILE", help="results whose jobs count too")
    line.add_argument("--seeds", nargs="+", type=int, default=[0])
    line.add_argument("--gpus", nargs="+", type=int, default=[0], help="places of jobs; name a GPU twice for two")
    line.add_argument("--steps", type=int, default=200)
    line.add_argument("--job-s", type=float, default=3600.0, help="seconds for each job (%(default)s)")
    line.add_argument("--digest", default="", help="that the starting model must have; empty: any")
    line.add_argument("--env", nargs="+", default=[], metavar="NAME=VALUE", help="the recipe's variables for all jobs")
    line.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="Hydra overrides for all jobs")
    line.add_argument("--json", type=Path, help="file for the result")
    line.add_argument("--dry-run", action="store_true", help="print the jobs' commands, and run nothing")
    return line


def main(words: list[str] | None = None) -> None:
    """Run the jobs; what has ended is stored. `scripts.draw_results` draws it."""
    options = parser().parse_args(words)
    runs = [(mode, seed) for seed in options.seeds for mode in options.modes]
    if options.dry_run:
        print("\n".join(shlex.join(command(options, *run)) for run in runs))
        return
    heed_termination()
    about, jobs = earlier(options.add)
    if not jobs:
        starting_model = TaskFiles(options.out / "smollm2_task").read_manifest() or None
        about = about_run(options) | {"starting_model": starting_model}

    def run(mode: str, seed: int, lane: Lane) -> None:
        job = run_job(command(options, mode, seed), options.out.resolve() / f"{mode}-{seed}", options.job_s, lane, 0)
        print(mode, seed, "steps:", len(job["steps"]), "code:", job["code"], flush=True)
        if job["steps"]:
            jobs.append({"mode": mode, "seed": seed, "gpus": lane.gpus} | job)
            store({**about, **summarise(jobs), "jobs": jobs}, options.json, raw=["jobs"])

    run_all([partial(run, *each) for each in runs], [Lane(gpus=(gpu,)) for gpu in options.gpus])
    if not runs and jobs:
        store({**about, **summarise(jobs), "jobs": jobs}, options.json, raw=["jobs"])


if __name__ == "__main__":
    main()
