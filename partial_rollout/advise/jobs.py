"""Steps of whole jobs, predicted from an engine's latency curve and the jobs' own prompts, beside what they took.

Jobs are those of `benchmarks.jobs`. Rates and ratios are those of generation, for response tokens, and of an even
number of steps.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from partial_rollout.advise.predict import COLOCATED, POLLING, markdown, modes
from partial_rollout.advise.scheduler import Group, Mode, Rollout, Speed
from partial_rollout.advise.shapes import PROMPT_TOKENS
from partial_rollout.advise.workload import Workload, primed_lengths

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


def in_pairs(steps: Sequence[T]) -> Sequence[T]:
    """Without an odd last one: every other step of `colocate_async` is a long one."""
    return steps[: len(steps) // 2 * 2]


def response_tokens(step: dict[str, Any], load: Workload, prompt_tokens: int) -> float:
    """Response tokens of a step's batch, whose prompts have `prompt_tokens` each."""
    return step["perf/total_num_tokens"] - load.batch * load.group * prompt_tokens


def job_modes(slots: int, group: int) -> dict[str, Mode]:
    """Modes of whole jobs that can be predicted, by their names in `benchmarks.jobs.MODES`."""
    named = {mode.name: mode for mode in modes(slots, group)}
    # An adaptive number rises to what the engine of such a job runs at most, and beyond.
    adaptive = replace(named["KV retained, prefetch 4"], slots=2 * slots)
    return {
        "sync": named[POLLING],
        "sync_fast_poll": named["sync"],
        COLOCATED: named[COLOCATED],
        f"{COLOCATED}_fast_poll": replace(named[COLOCATED], poll_s=0.0),
        f"{COLOCATED}_released": named[COLOCATED],
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
    drawn = primed_lengths(load, load.num_prompts)
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
