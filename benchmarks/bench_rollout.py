"""verl's trainer modes, and our tail policies with their interrupt modes, on the same prompts and response lengths.

Whole training jobs, interleaved (A B C A B C ...); response lengths are replayed from a trace, so the work is equal.
The first steps of a job are left out: engine warm-up, and for the asynchronous modes the filling of the queue.

    python -m benchmarks.bench_rollout [--task DIR] [--json benchmarks/results/bench_rollout.json]
    python -m benchmarks.bench_rollout --traces heavy_tail uniform --modes policy_sync partial_rollout partial_keep_kv

With `--most-jobs` a long comparison is made in pieces: a result file that exists is completed, if its options are the
same, and jobs that it has are not run again. Without, it is replaced. With `--at-once` jobs run side by side on two
cores each, in the same order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from benchmarks.cpu_profile import CpuProfile
from benchmarks.engine_gauges import RunningRequests
from benchmarks.lanes import Lane, make_lanes, side_by_side
from benchmarks.result import circumstances, store
from benchmarks.training_job import ROOT, read_steps, require_success, training_command, training_job, until_over
from partial_rollout.run.quickstart.make_task import TaskParameters, make_task
from partial_rollout.runtime.termination import heed_termination

if TYPE_CHECKING:
    import subprocess

JOB_TIMEOUT_S = 1800.0
TASK = TaskParameters(num_train=256, num_val=8, warm_start_steps=60)
"""Made when none is given. Lengths come from the trace and nothing is learned, so the checkpoint need not be good."""
FAST_POLL = "pkg://benchmarks.fast_poll"
BASELINES = ("sync", "sync_fast_poll", "policy_sync", "colocate_async", "colocate_async_fast_poll")
OWN_METRICS = (
    "slot_utilisation",
    "interruptions",
    "reprefilled_tokens",
    "resumed_share",
    "staleness_steps/mean",
    "stale_token_share",
    "old_kv_token_share",
)
EXPLAINING = ("drain_ms", "resume_ms", "slots/num", "staleness_steps/max")
"""Stored for each step, too."""
BLOCK_SIZE = 32
"""Of the prefix cache; with vLLM's own 128 on a CPU few of these responses would fill a block."""


@dataclass(frozen=True)
class Workload:
    """Size of the job and its response-length distribution (log-normal, with a share cut at the longest)."""

    batch: int = 8
    group: int = 4
    steps: int = 14
    skip: int = 4
    median: int = 48
    sigma: float = 0.9
    longest: int = 384
    long_share: float = 0.1
    huge: int = 0
    huge_share: float = 0.0
    seed: int = 0

    @property
    def limit(self) -> int:
        """Tokens of the longest response."""
        return max(self.longest, self.huge)


TRACES: dict[str, dict[str, float]] = {
    "long_tail": {},
    "heavy_tail": {"huge": 1536, "huge_share": 0.01},
    "uniform": {"median": 96, "sigma": 0.0, "long_share": 0.0},
}
"""Changes to the workload, whose median of 700, cut at 4,096, and 1 % at 32,768 are scaled by 1/15, 1/11 and 1/21,
as two cores allow; `uniform` has equal lengths, of which nothing can be gained."""
FLAG = "+async_training.partial_rollout=True"
FREE_OPTIONS = ("repeats", "modes", "traces", "most_jobs", "at_once")
"""Options in which the runs that complete a result may differ."""

ADAPTIVE = (
    "partial_rollout.slots.adaptive=True",
    "partial_rollout.slots.interval_s=1",
    "partial_rollout.num_slots={slots}",
    "actor_rollout_ref.rollout.max_num_seqs={twice_slots}",
)
"""From the slots of the other modes up to all prompts in flight."""

OFFLOADED = ("partial_rollout.tail.offload_gib=48", "actor_rollout_ref.rollout.free_cache_engine=True")
"""On a GPU only; engine memory is released between steps."""


def _ours(policy: str, interrupt_mode: str = "abort") -> list[str]:
    tail = "partial_rollout.tail"
    return [FLAG, f"{tail}.policy={policy}", f"{tail}.interrupt_mode={interrupt_mode}"]


def _sampler(name: str) -> list[str]:
    prefix = "trainer.v1.sampler.custom_sampler"
    return [f"{prefix}.path={FAST_POLL}", f"{prefix}.name={name}"]


MODES: dict[str, list[str]] = {
    "sync": [],
    "sync_fast_poll": _sampler("FastPollReplayBuffer"),
    "colocate_async": ["trainer.v1.trainer_mode=colocate_async"],
    "colocate_async_fast_poll": [
        "trainer.v1.trainer_mode=colocate_async",
        *_sampler("FastPollReplayBufferAsync"),
    ],
    "policy_sync": _ours("wait"),
    "partial_rollout": _ours("partial"),
    "partial_rollout_prefetch_3": [*_ours("partial"), "partial_rollout.prefetch_factor=3"],
    **{f"partial_{mode}": _ours("partial", mode) for mode in ("keep_kv", "reuse_kv")},
    "partial_reuse_kv_prefetch_3": [*_ours("partial", "reuse_kv"), "partial_rollout.prefetch_factor=3"],
    "partial_offload_kv": [*_ours("partial", "offload_kv"), *OFFLOADED],
    "partial_adaptive": [*_ours("partial"), *ADAPTIVE],
    "partial_adaptive_keep_kv": [*_ours("partial", "keep_kv"), *ADAPTIVE],
    "partial_adaptive_reuse_kv": [*_ours("partial", "reuse_kv"), *ADAPTIVE, "partial_rollout.prefetch_factor=4"],
    "partial_adaptive_reuse_kv_prefetch_5": [
        *_ours("partial", "reuse_kv"),
        *ADAPTIVE,
        "partial_rollout.prefetch_factor=5",
    ],
    "reorder": _ours("reorder"),
    "reorder_few": [*_ours("reorder"), "partial_rollout.tail.max_deferred_per_round=2"],
    "reorder_reuse_kv": _ours("reorder", "reuse_kv"),
}

CPU_MODES = [mode for mode in MODES if mode != "partial_offload_kv"]


def mode_options(mode: str, slots: int) -> list[str]:
    """Hydra overrides of a mode, for a job with so many slots."""
    return [option.format(slots=slots, twice_slots=2 * slots) for option in MODES[mode]]


def lengths(workload: Workload, num_prompts: int) -> np.ndarray:
    """Response lengths, shape (num_prompts, group)."""
    rng = np.random.default_rng(workload.seed)
    drawn = np.exp(rng.normal(np.log(workload.median), workload.sigma, size=(num_prompts, workload.group)))
    drawn[rng.random(drawn.shape) < workload.long_share] = workload.longest
    drawn = np.clip(drawn, 1, workload.longest)
    drawn[rng.random(drawn.shape) < workload.huge_share] = workload.huge
    return drawn.astype(int)


def num_prompts(workload: Workload) -> int:
    """Of a job: more than it trains, as some are in flight at its end."""
    return workload.batch * (workload.steps + 4)


def default_task(work: Path) -> Path:
    """A small quickstart task below `work`, reused by the next run."""
    make_task(work / "task", TASK)
    return work / "task"


def sync_utilisation(workload: Workload) -> float:
    """Share of slot-steps in which a batch that waits for its longest response generates, by the trace alone."""
    batches = lengths(workload, workload.batch * workload.steps).reshape(workload.steps, -1)
    return float((batches.mean(axis=1) / batches.max(axis=1)).mean())


def write_trace(task: Path, out: Path, workload: Workload) -> Path:
    """The task's prompts with a recorded length for each trajectory."""
    frame = pd.read_parquet(task / "train.parquet")
    number = num_prompts(workload)
    frame = pd.concat([frame] * (number // len(frame) + 1), ignore_index=True).head(number)
    traced = lengths(workload, number)
    frame["extra_info"] = [
        {**info, "index": row, "lengths": traced[row].tolist()} for row, info in enumerate(frame["extra_info"])
    ]
    frame["agent_name"] = "length_trace_agent"
    out.mkdir(parents=True, exist_ok=True)
    path = out / "trace.parquet"
    frame.to_parquet(path)
    return path


@dataclass(frozen=True)
class Bench:
    """What all jobs of a comparison share."""

    task: Path
    trace: Path
    work: Path
    workload: Workload
    overrides: list[str]

    def command(self, mode: str, folder: Path) -> list[str]:
        """The training job of one mode."""
        load, slots = self.workload, self.workload.batch * self.workload.group
        return training_command(self.task, folder, [
            f"data.train_files={self.trace}", f"data.train_batch_size={load.batch}",
            f"actor_rollout_ref.rollout.n={load.group}", f"actor_rollout_ref.actor.ppo_mini_batch_size={load.batch}",
            f"data.max_response_length={load.limit}", f"actor_rollout_ref.rollout.max_num_seqs={slots}",
            f"actor_rollout_ref.rollout.max_model_len={load.limit + 32}",
            f"+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size={BLOCK_SIZE}",
            "data.shuffle=False", "actor_rollout_ref.actor.optim.lr=0.0",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={ROOT / 'benchmarks' / 'trace_agent.yaml'}",
            f"trainer.total_training_steps={load.steps}", "actor_rollout_ref.rollout.disable_log_stats=False",
            *mode_options(mode, slots), *self.overrides,
        ])  # fmt: skip

    def run(self, mode: str, repeat: int, lane: Lane) -> dict[str, Any]:
        """Run one job; returns its per-step metrics after the warm-up."""
        load = os.getloadavg()[0]
        folder = self.work / f"{mode}-{repeat}"
        started = time.monotonic()
        with training_job(self.command(mode, folder), folder, lane) as job:
            profile, in_use = self._watch(job, folder, lane)
        require_success(job, mode, folder)
        kept = [_pick(step) for step in read_steps(folder)[self.workload.skip :]]
        job_s = time.monotonic() - started
        record = {"trace": self.trace.parent.name, "load_average_at_start": load, "mode": mode, "repeat": repeat}
        record |= {"job_s": job_s, "slots_in_use": in_use, "cores": lane.cores}
        return record | {"cpu_share": profile.shares(), "steps": kept}

    def _watch(self, job: subprocess.Popen[Any], folder: Path, lane: Lane) -> tuple[CpuProfile, float | None]:
        """Sample a job until it ends; its processor use and the share of engine slots in use."""
        profile, engines = CpuProfile(job.pid), RunningRequests()
        for _ in until_over(job, lane, JOB_TIMEOUT_S):
            measuring = len(read_steps(folder)) >= self.workload.skip
            profile.sample(measuring=measuring)
            if measuring:
                engines.find(profile.processes())
                engines.sample()
        return profile, engines.utilisation(self.workload.batch * self.workload.group)


def _pick(step: dict[str, Any]) -> dict[str, float]:
    names = ("timing_s/gen", "timing_s/step", "timing_s/update_weights", "perf/total_num_tokens")
    own = (f"partial_rollout/{name}" for name in (*OWN_METRICS, *EXPLAINING))
    return {name: step[name] for name in (*names, *own) if name in step}


def summarise(jobs: list[dict]) -> dict[str, dict[str, float]]:
    """Of one trace: median over all steps of a mode, with the quartiles of the generation time, and ratios to sync."""
    table = {mode: _mode_summary([job for job in jobs if job["mode"] == mode]) for mode in _modes(jobs)}
    for base in (mode for mode in BASELINES if mode in table):
        for row in table.values():
            row[f"gen_ratio_to_{base}"] = row["gen_s"] / table[base]["gen_s"]
            row[f"gen_median_ratio_to_{base}"] = row["gen_s_median"] / table[base]["gen_s_median"]
            row[f"token_rate_ratio_to_{base}"] = row["tokens_per_s"] / table[base]["tokens_per_s"]
    return table


def _modes(jobs: list[dict]) -> list[str]:
    return [mode for mode in MODES if any(job["mode"] == mode for job in jobs)]


def _mode_summary(jobs: list[dict]) -> dict[str, float]:
    steps = [step for job in jobs for step in job["steps"]]
    in_use = [job["slots_in_use"] for job in jobs if job["slots_in_use"] is not None]
    gen = [step["timing_s/gen"] for step in steps]
    quartiles = statistics.quantiles(gen, n=4)
    total_s = sum(step["timing_s/step"] for step in steps)
    row: dict[str, float] = {
        "num_steps": len(steps),
        "gen_s": statistics.fmean(gen),
        "gen_s_median": statistics.median(gen),
        "gen_s_q1": quartiles[0],
        "gen_s_q3": quartiles[2],
        "step_s": statistics.fmean(step["timing_s/step"] for step in steps),
        "tokens_per_s": sum(step["perf/total_num_tokens"] for step in steps) / total_s,
    }
    if in_use:
        row["slots_in_use"] = statistics.fmean(in_use)
    for name in OWN_METRICS:
        values = [step[f"partial_rollout/{name}"] for step in steps if f"partial_rollout/{name}" in step]
        if values:
            row[name] = statistics.fmean(values)
    return row


def _summaries(jobs: list[dict], workloads: dict[str, Workload]) -> dict[str, Any]:
    return {
        trace: {
            "workload": asdict(workload),
            "sync_utilisation_by_trace": sync_utilisation(workload),
            "summary": summarise([job for job in jobs if job["trace"] == trace]),
        }
        for trace, workload in workloads.items()
        if any(job["trace"] == trace for job in jobs)
    }


def _earlier_jobs(path: Path, about: dict[str, Any]) -> list[dict]:
    """Jobs of a result that this run completes.

    Raises:
        SystemExit: it was made with other options.
    """
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    before, now = _fixed(result.get("options", {})), _fixed(about["options"])
    if before != now:
        raise SystemExit(f"{path} was made with {before}, not with {now}: give another --json, or remove it")
    return result["jobs"]


def _fixed(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in FREE_OPTIONS}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", type=Path, help="folder made by run.quickstart.make_task; made when not given")
    parser.add_argument("--work", type=Path, default=Path("outputs/bench_rollout"), help="logs and traces")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/bench_rollout.json")
    parser.add_argument("--modes", nargs="+", default=CPU_MODES, choices=CPU_MODES)
    parser.add_argument("--traces", nargs="+", default=["long_tail"], choices=list(TRACES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--most-jobs", type=int, help="stop after so many; the same command goes on")
    parser.add_argument("--at-once", type=int, default=1, help="jobs side by side, each on two cores")
    for name, default in asdict(Workload()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("overrides", nargs="*", help="further Hydra overrides, for every mode")
    return parser


def main() -> None:
    """Run all jobs and store the result."""
    arguments = _parser().parse_args()
    heed_termination()
    about = circumstances(arguments)
    for folder in ("task", "work"):
        del about["options"][folder]
    base = Workload(**{name: getattr(arguments, name) for name in asdict(Workload())})
    workloads = {trace: replace(base, **changes) for trace, changes in TRACES.items()}
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    task = arguments.task.resolve() if arguments.task else default_task(work)
    benches = {
        trace: Bench(task, write_trace(task, work / trace, load), work / trace, load, arguments.overrides)
        for trace, load in ((trace, workloads[trace]) for trace in arguments.traces)
    }
    jobs = _earlier_jobs(arguments.json, about) if arguments.most_jobs else []
    done = {(job["trace"], job["mode"], job["repeat"]) for job in jobs}
    plan = [(t, mode, repeat) for repeat in range(arguments.repeats) for t in benches for mode in arguments.modes]
    missing = [each for each in plan if each not in done][: arguments.most_jobs]
    runs = [partial(benches[trace].run, mode, repeat) for trace, mode, repeat in missing]
    with closing(side_by_side(runs, make_lanes(arguments.at_once))) as ended:
        for job in tqdm(ended, desc="jobs", total=len(runs)):
            jobs.append(job)
            store({**about, "traces": _summaries(jobs, workloads), "jobs": jobs}, arguments.json)
    for trace, table in _summaries(jobs, workloads).items():
        print(trace, pd.DataFrame(table["summary"]).T.to_string(float_format=lambda value: f"{value:.3f}"), sep="\n")


if __name__ == "__main__":
    main()
