"""Do the modes learn the same? Whole runs on equal seeds: rewards against steps and minutes.

    python -m benchmarks.learning --modes sync flag --seeds 0 1 2 --out OUT --json FILE                  # on a CPU
    python -m benchmarks.learning --task smollm2 --gpus 0 1 1 0 --job-s 1200 --json FILE.json --out OUT  # a real model

One job for each mode and seed: the quickstart in the modes of `benchmarks.jobs`, each job on cores of its own, or the
SmolLM2 recipe on the first of `--gpus` that is free; a GPU named twice has two jobs side by side. All have the same
data, learning rate, correction and starting model. A job that does not end within `--job-s` counts as far as it came.
Its rows in the summary are compared with the job of the same seed in mode `sync`, or in the first mode.

Make the recipe's task first, in OUT/smollm2_task (its `make_task`), for jobs side by side; `--digest` checks its model.
Jobs of earlier results count and are not run again: `--modes --add ONE.json TWO.json` makes one result of both.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.jobs import CPU_MODES, mode_options
from benchmarks.lanes import Lane, make_lanes
from benchmarks.training_job import ROOT, run_jobs, training_command
from partial_rollout.advise.measured import drafted
from partial_rollout.advise.result import about_run, read_result, store
from partial_rollout.run.quickstart.make_task import TaskParameters, make_task
from partial_rollout.run.task_files import TaskFiles
from partial_rollout.runtime.termination import heed_termination
from partial_rollout.settings.drafts import SUFFIX_DRAFTS
from partial_rollout.settings.flag import CORRECTION_BLOCK, SPECULATION

if TYPE_CHECKING:
    from collections.abc import Sequence

Job = dict[str, Any]
RECIPE = ROOT / "partial_rollout/run/run_smollm2_reasoning_gym.sh"
KEPT = "actor_rollout_ref.rollout.free_cache_engine=False"
DEEP = ("tail.interrupt_mode=reuse_kv", "prefetch_factor=5", "num_slots=1024", "slots.adaptive=False")
"""All prompts in flight begin at once, so most are old."""
DRAFTS = f"+{SPECULATION}={{method:custom_class,model:{SUFFIX_DRAFTS},num_speculative_tokens:3}}"
VERLS = {"PARTIAL_ROLLOUT": "0"}
RECIPE_MODES: dict[str, tuple[dict[str, str], list[str]]] = {
    "sync": (VERLS, []),
    "colocate_async": (VERLS, ["trainer.v1.trainer_mode=colocate_async"]),
    "flag_alone": ({}, []),
    "sync_drafts": (VERLS, [DRAFTS]),
    "flag_drafts": ({}, [DRAFTS]),
    "flag_bypass": ({}, [f"{CORRECTION_BLOCK}.bypass_mode=True"]),
    "flag_reinforce": ({}, [f"{CORRECTION_BLOCK}.bypass_mode=True", f"{CORRECTION_BLOCK}.loss_type=reinforce"]),
    "flag_uncorrected": ({}, [f"{CORRECTION_BLOCK}.rollout_is=null"]),
    "flag_released": ({}, ["actor_rollout_ref.rollout.free_cache_engine=True"]),
    "flag_reorder": ({}, ["partial_rollout.tail.policy=reorder"]),
    "flag_fp8_weights": ({}, ["actor_rollout_ref.rollout.quantization=fp8"]),
    "flag_fp8_kv": ({}, ["+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8"]),
    "reuse_kv_5_deep": ({}, [f"partial_rollout.{setting}" for setting in DEEP]),
}
"""The recipe's variables and overrides of each mode."""
COMPARED = ("sync", "wait", "partial_rollout", "reorder")
MODES = {"quickstart": list(CPU_MODES), "smollm2": list(RECIPE_MODES)}  # by task
STEPS = {"quickstart": 60, "smollm2": 200}
QUICKSTART_SLOTS = 64  # 16 prompts x 4
WARMUP_STEPS = 5  # in which the quickstart's learning rate rises, so that a schedule can go wrong
BASE = "sync"
WINDOW = 10  # steps of a mean: the reward of one batch of 256 responses varies by 0.06
LEVELS = (0.5, 0.52, 0.54, 0.56, 0.6, 0.64)  # told is when each is reached; near the top, chance decides that
REWARD, RATE, STEP_S, VALIDATION = "critic/score/mean", "actor/lr", "timing_s/step", "val-core/"
PANELS = {
    "reward": REWARD,
    "response length, tokens": "response_length/mean",
    "entropy, nats": "actor/entropy",
    "staleness, steps": "training/off_policy/trajectory_staleness_worst/mean",
    "step, s": STEP_S,
    "generation, s a step": "timing_s/gen",
    "validation, s": "timing_s/testing",
    "log-probs, s a step": "timing_s/old_log_prob",
    "update, s a step": "timing_s/update_actor",
    "TIS weight, standard deviation": "rollout_corr/rollout_is_std",
    "tokens cut to weight 2": "rollout_corr/rollout_is_ratio_fraction_high",
    "resumed share": "partial_rollout/resumed_share",
    "tokens on older KV": "partial_rollout/old_kv_token_share",
    "batches in flight": "partial_rollout/depth",
}
"""What is summarised and drawn against steps, and its name in the metrics."""


def command(options: argparse.Namespace, mode: str, seed: int) -> list[str]:
    """The job of one mode and seed."""
    steps, folder = options.steps or STEPS[options.task], options.out.resolve() / f"{mode}-{seed}"
    if options.task == "quickstart":
        own = [f"data.seed={seed}", f"trainer.total_training_steps={steps}"]
        own += [f"actor_rollout_ref.actor.optim.lr_warmup_steps={WARMUP_STEPS}", *mode_options(mode, QUICKSTART_SLOTS)]
        return training_command(task_folder(options), folder, [*own, *options.set])
    variables, overrides = RECIPE_MODES[mode]
    own = {"OUTPUT_DIR": options.out.resolve(), "EXPERIMENT": folder.name, "EXPECT_DIGEST": options.digest}
    shared = own | {"TOTAL_STEPS": steps, "SAVE_FREQ": -1} | dict(pair.split("=", 1) for pair in options.env)
    pairs = [f"{name}={value}" for name, value in (shared | variables).items()]
    fixed = [KEPT, "trainer.resume_mode=disable", f"data.seed={seed}"]
    return ["env", *pairs, "bash", str(RECIPE), *fixed, *overrides, *options.set]


def task_folder(options: argparse.Namespace) -> Path:
    """Where model and data of the task are."""
    return (options.inputs or options.out / f"{options.task}_task").resolve()


def seconds(job: Job, number: int) -> float:
    """Seconds of a job's first steps; verl does not count validation in them."""
    return sum(step[STEP_S] for step in job["steps"][:number])


def rewards(job: Job, window: int = WINDOW) -> list[float]:
    """Mean reward of each step and the steps before it."""
    found = [step[REWARD] for step in job["steps"]]
    return [statistics.fmean(found[max(0, end - window) : end]) for end in range(1, len(found) + 1)]


def steps_to(job: Job, level: float, window: int) -> int | None:
    """Steps until the mean reward of `window` steps is at a level; None: never."""
    return next((end for end, mean in enumerate(rewards(job, window), 1) if end >= window and mean >= level), None)


def held_out(job: Job) -> dict[str, float]:
    """Accuracy on held-out problems, the mean of the tasks, by the number of the step."""
    names = [name for name in set().union(*job["steps"]) if name.startswith(VALIDATION) and name.endswith("mean@1")]
    values = [[step[name] for name in names if name in step] for step in job["steps"]]
    return {str(number): round(statistics.fmean(each), 3) for number, each in enumerate(values, 1) if each}


def compared_with(job: Job, base: Job | None, common: int, window: int) -> Job:
    """A job's first steps beside those of the job with the same seed; None where there is no such job."""
    if base is None:
        return dict.fromkeys(("time_ratio", "steps_to_level", "s_to_level", "same_learning_rate"))
    reached = steps_to(job, rewards(base, window)[-1], window)
    rates = [[step.get(RATE) for step in each["steps"][:common]] for each in (job, base)]
    return {
        "time_ratio": seconds(job, common) / seconds(base, common),
        "steps_to_level": reached,
        "s_to_level": seconds(job, reached) if reached else None,
        "same_learning_rate": rates[0] == rates[1],
    }


def summarise(jobs: Sequence[Job], window: int = WINDOW) -> dict[str, Any]:
    """How far each job came, and the time for equal steps, and to the last reward of `sync` in each seed."""
    common = min(len(job["steps"]) for job in jobs)
    first = BASE if any(job["mode"] == BASE for job in jobs) else jobs[0]["mode"]
    bases = {job["seed"]: job for job in jobs if job["mode"] == first}
    rows = []
    for job in jobs:
        row: Job = {"mode": job["mode"], "seed": job["seed"], "steps": len(job["steps"]), "held_out": held_out(job)}
        row |= {"reward_first": (means := rewards(job, window))[min(window, common) - 1], "reward_last": means[-1]}
        row |= {"reward_common": statistics.fmean(step[REWARD] for step in job["steps"][:common])}
        row |= {"reward_common_last_half": statistics.fmean(s[REWARD] for s in job["steps"][common // 2 : common])}
        row |= {"common_steps_s": seconds(job, common)} | compared_with(job, bases.get(job["seed"]), common, window)
        reached = ((level, steps_to(job, level, window)) for level in LEVELS)
        row["s_to_reward"] = {f"{level:.2f}": number and round(seconds(job, number), 1) for level, number in reached}
        for title, name in PANELS.items():
            # The second name is verl's where no old log-probs are computed.
            found = (step.get(name, step.get(f"actor/{name}")) for step in job["steps"][WINDOW:common])
            row[title] = statistics.fmean(values) if (values := [each for each in found if each is not None]) else None
        row |= drafted(job)
        rows.append({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})
    return {"common_steps": common, "window": window, "summary": rows}


def earlier(results: Sequence[Path]) -> tuple[dict[str, Any], list[Job]]:
    """Jobs of stored results, each with its devices, and what the first of them says of its run beside them."""
    found = [read_result(path) for path in results]
    about = {name: value for name, value in found[0].items() if name not in ("common_steps", "summary", "jobs")}
    return about, [{"devices": result.get("devices"), **job} for result in found for job in result["jobs"]]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--task", choices=list(MODES), default="quickstart", help="%(default)s")
    line.add_argument("--out", type=Path, default=Path("outputs/learning"), help="of the task and the logs")
    line.add_argument("--inputs", type=Path, help="folder of a task that is made; else it is in --out")
    line.add_argument("--modes", nargs="*", metavar="MODE", help="of the task")
    line.add_argument("--add", nargs="+", type=Path, default=[], metavar="FILE", help="results whose jobs count too")
    line.add_argument("--seeds", nargs="+", type=int, default=[0])
    line.add_argument("--gpus", nargs="+", type=int, default=[], help="places of jobs; name a GPU twice for two")
    line.add_argument("--at-once", type=int, default=1, help="without GPUs: jobs side by side, each on two cores")
    line.add_argument("--steps", type=int, help=f"{STEPS}")
    line.add_argument("--job-s", type=float, default=3600.0, help="seconds for each job (%(default)s)")
    line.add_argument("--window", type=int, default=WINDOW, help="steps of a mean reward, in whole rounds of prompts")
    line.add_argument("--digest", default="", help="that the recipe's starting model must have; empty: any")
    line.add_argument("--env", nargs="+", default=[], metavar="NAME=VALUE", help="the recipe's variables for all jobs")
    line.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="Hydra overrides for all jobs")
    line.add_argument("--json", type=Path, help="file for the result")
    line.add_argument("--dry-run", action="store_true", help="print the jobs' commands, and run nothing")
    return line


def main(words: list[str] | None = None) -> None:
    """Run the jobs; what has ended is stored. `scripts.draw_results` draws it."""
    line = parser()
    options = line.parse_args(words)
    if options.modes is None:
        options.modes = list(COMPARED) if options.task == "quickstart" else MODES["smollm2"]
    if unknown := set(options.modes) - set(MODES[options.task]):
        line.error(f"--modes {sorted(unknown)}: choose from {MODES[options.task]}")
    about, jobs = earlier(options.add) if options.add else ({}, [])
    there = {(job["mode"], job["seed"]) for job in jobs}
    runs = [(mode, seed) for seed in options.seeds for mode in options.modes if (mode, seed) not in there]
    if options.dry_run:
        print("\n".join(shlex.join(command(options, *run)) for run in runs))
        return
    heed_termination()
    if runs and options.task == "quickstart" and not options.inputs:
        make_task(task_folder(options), TaskParameters())
    now = about_run(options) | {"starting_model": TaskFiles(task_folder(options)).read_manifest() or None}
    failed: list[str] = []

    def keep(run: tuple[str, int], job: Job) -> None:
        print(*run, "steps:", len(job["steps"]), "code:", job["code"], flush=True)
        if not job["steps"]:
            failed.append(f"{run[0]}-{run[1]}")
            return
        jobs.append({"mode": run[0], "seed": run[1], "devices": now["devices"]} | job)
        store({**(about or now), **summarise(jobs, options.window), "jobs": jobs}, options.json, raw=["jobs"])

    lanes = [Lane(gpus=(gpu,)) for gpu in options.gpus] or make_lanes(options.at_once)
    places = {run: (command(options, *run), options.out.resolve() / f"{run[0]}-{run[1]}") for run in runs}
    run_jobs(places, keep, lanes, job_s=options.job_s, skip=0)
    if not runs and jobs:
        store({**about, **summarise(jobs, options.window), "jobs": jobs}, options.json, raw=["jobs"])
    if failed:
        raise SystemExit(f"without a single step: {failed}; logs in {options.out}")


if __name__ == "__main__":
    main()
