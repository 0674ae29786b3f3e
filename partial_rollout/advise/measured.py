"""What whole jobs of several modes took, from the metrics of their steps: for equal steps, and for equal tokens.

Jobs are those of `benchmarks.jobs`: each has its mode, `first_steps` in which slots fill, and `steps`.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from partial_rollout.advise.jobs import in_pairs, response_tokens
from partial_rollout.advise.predict import markdown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from partial_rollout.advise.workload import Workload

SKIP = 2
"""Steps of a job that are left out: the primer's and, of asynchronous modes, one in which contexts grow."""
TIMES = ("gen", "step", "old_log_prob", "update_actor", "update_weights")
KEPT = (*(f"timing_s/{name}" for name in TIMES), "perf/total_num_tokens")
KEPT_GROUPS = ("partial_rollout/", "training/rollout_", "training/off_policy/")
"""Metrics of a job that are stored: these, and all whose names begin so."""
BASELINES = ("sync", "sync_fast_poll", "colocate_async", "colocate_async_fast_poll", "colocate_async_released")
OWN_METRICS = (
    "slot_utilisation",
    "depth",
    "interruptions",
    "reprefilled_tokens",
    "resumed_share",
    "staleness_steps/mean",
    "stale_token_share",
    "old_kv_token_share",
)
STALENESS = "training/off_policy/trajectory_staleness_worst"
"""verl's own count of the steps since a response was begun, which all modes have."""
DEPTH, RUNNING = "partial_rollout/depth", "partial_rollout/mean_running"
COUNTED = ("response_tokens", "reprefilled_tokens")
"""Token counts of a batch; how many were computed again is the engine's own count."""


def kept(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of steps that are stored."""
    return [{name: step[name] for name in step if name in KEPT or name.startswith(KEPT_GROUPS)} for step in steps]


def slots_in_use(job: dict[str, Any], num_slots: int) -> float | None:
    """Share of the slots that ran over the measured steps, while any did."""
    since_s = job["ends_s"][SKIP - 1] if len(job["ends_s"]) >= SKIP else float("inf")
    return utilisation([sample[1] for sample in job["samples"] if sample[0] >= since_s], num_slots)


def utilisation(samples: Iterable[float], num_slots: int) -> float | None:
    """Mean share of slots in use, over the samples in which any is."""
    busy = [running for running in samples if running > 0]
    return sum(busy) / (len(busy) * num_slots) if busy else None


def drafted(job: dict[str, Any]) -> dict[str, float]:
    """What drafts brought, by vLLM's counts between a job's first sample and its last; nothing without drafts.

    Tokens of a checked step of a request, that of the model itself included, and the share of tokens of such steps.
    """
    counts = [sample[2:] for sample in job.get("samples", ()) if len(sample) > 2]
    if not counts or counts[0][0] == counts[-1][0]:
        return {}
    drafts, accepted, tokens = (last - first for first, last in zip(counts[0], counts[-1], strict=True))
    return {"tokens_a_checked_step": 1 + accepted / drafts, "share_of_checked_tokens": (drafts + accepted) / tokens}


def summarise(jobs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By mode, whole steps: mean seconds, tokens/s, ratios of both to verl's modes, and means of our metrics."""
    modes = dict.fromkeys(job["mode"] for job in jobs)
    rows = {mode: _mode_summary([job for job in jobs if job["mode"] == mode]) for mode in modes}
    for base in (mode for mode in BASELINES if mode in rows):
        for row in rows.values():
            row[f"gen_ratio_to_{base}"] = row["gen_s"] / rows[base]["gen_s"]
            row[f"token_rate_ratio_to_{base}"] = row["tokens_per_s"] / rows[base]["tokens_per_s"]
    return rows


def _mode_summary(jobs: list[dict[str, Any]]) -> dict[str, float]:
    steps = [step for job in jobs for step in job["steps"]]
    in_use = [job["slots_in_use"] for job in jobs if job["slots_in_use"] is not None]
    gen = [step["timing_s/gen"] for step in steps]
    quartiles = statistics.quantiles(gen, n=4)
    total_s = sum(step["timing_s/step"] for step in steps)
    row: dict[str, float] = {
        "num_steps": len(steps),
        "gen_s": statistics.fmean(gen),
        **dict(zip(("gen_s_q1", "gen_s_median", "gen_s_q3"), quartiles, strict=True)),
        "step_s": statistics.fmean(step["timing_s/step"] for step in steps),
        "tokens_per_s": sum(step["perf/total_num_tokens"] for step in steps) / total_s,
    }
    if in_use:
        row["slots_in_use"] = statistics.fmean(in_use)
    named = ((name, f"partial_rollout/{name}") for name in OWN_METRICS)
    values = {name: [step[key] for step in steps if key in step] for name, key in named}
    return row | {name: statistics.fmean(found) for name, found in values.items() if found}


def generation(jobs: list[dict[str, Any]], load: Workload, prompt_tokens: int) -> dict[str, dict[str, float]]:
    """By mode, response tokens of the batches for each second of generation, and the time for equal ones to verl's.

    Of each job an even number of steps is counted.
    """
    rows: dict[str, dict[str, float]] = {}
    for mode in dict.fromkeys(job["mode"] for job in jobs):
        steps = [step for job in jobs if job["mode"] == mode for step in in_pairs(job["steps"])]
        tokens = sum(response_tokens(step, load, prompt_tokens) for step in steps)
        seconds = sum(step["timing_s/gen"] for step in steps)
        rows[mode] = {"num_steps": len(steps), "seconds": seconds, "tokens_per_s": tokens / seconds}
    for base in (mode for mode in BASELINES if mode in rows):
        for row in rows.values():
            row[f"time_ratio_to_{base}"] = rows[base]["tokens_per_s"] / row["tokens_per_s"]
    return rows


def filling_steps(job: dict[str, Any]) -> int:
    """Steps in which slots fill: the first ones of each job, and with a depth that moves those up to its last move.

    In the step after a move the prompts that it let in begin.
    """
    depths = [step.get(DEPTH) for step in job["first_steps"] + job["steps"]]
    last = next((place for place in range(len(depths) - 1, 0, -1) if depths[place] != depths[place - 1]), 0)
    return max(len(job["first_steps"]), last + 1 if last else 0)


def parts(jobs: list[dict[str, Any]], load: Workload) -> dict[str, dict[str, dict[str, float]]]:
    """By mode, the steps in which slots fill and the others, each counted for itself."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for mode in dict.fromkeys(job["mode"] for job in jobs):
        pairs = [(job["first_steps"] + job["steps"], filling_steps(job)) for job in jobs if job["mode"] == mode]
        filling = [step for steps, number in pairs for step in steps[:number]]
        full = [step for steps, number in pairs for step in steps[number:]]
        named = (("filling", filling), ("full", full))
        found[mode] = {name: _part(steps, load) for name, steps in named if steps}
        for name, row in found[mode].items():
            row |= _by_gauge([job for job in jobs if job["mode"] == mode], load, is_full=name == "full")
    return found


def _by_gauge(jobs: list[dict[str, Any]], load: Workload, *, is_full: bool) -> dict[str, float]:
    """Slots in use by vLLM's own gauge, which is the same for all modes, before or after the slots have filled."""
    running = []
    for job in jobs:
        number = filling_steps(job)
        since_s = job["ends_s"][number - 1] if number and "samples" in job else 0.0
        running += [sample[1] for sample in job.get("samples", ()) if (sample[0] >= since_s) == is_full]
    share = utilisation(running, load.batch * load.group)
    return {} if share is None else {"slots_by_gauge": share}


def apart(jobs: list[dict[str, Any]], load: Workload) -> dict[str, Any]:
    """What is counted apart: the steps in which slots fill, and times of each repeat beside verl's modes."""
    bases = [base for base in BASELINES if base in {job["mode"] for job in jobs}]
    return {"parts": parts(jobs, load), "ratios_by_repeat": {base: ratios_by_repeat(jobs, base) for base in bases}}


def ratios_by_repeat(jobs: list[dict[str, Any]], base: str) -> dict[str, list[float]]:
    """By mode, the mean seconds of generation of each repeat as a share of those of `base` in the same repeat."""
    mean_s = {
        (job["mode"], job["repeat"]): statistics.fmean(step["timing_s/gen"] for step in job["steps"]) for job in jobs
    }
    found: dict[str, list[float]] = {}
    for (mode, repeat), seconds in mean_s.items():
        if (base, repeat) in mean_s:
            found.setdefault(mode, []).append(seconds / mean_s[base, repeat])
    return found


def _part(steps: list[dict[str, Any]], load: Workload) -> dict[str, float]:
    """Means over `steps`: seconds of generation and, where metrics say them, slots in use and tokens computed again.

    A slot counts as one that the job starts with, also where their number moves; each step weighs as long as it takes.
    """
    seconds = sum(step["timing_s/gen"] for step in steps)
    row: dict[str, float] = {"num_steps": len(steps), "gen_s": seconds / len(steps)}
    if all(RUNNING in step for step in steps):
        running = sum(step[RUNNING] * step["timing_s/gen"] for step in steps) / seconds
        row["slots_in_use"] = running / (load.batch * load.group)
    tokens, again = (sum(step.get(f"partial_rollout/{name}", 0) for step in steps) for name in COUNTED)
    return row | ({"reprefilled_per_1000_tokens": 1000 * again / tokens} if tokens else {})


def rates_table(rates: dict[str, dict[str, float]], jobs: list[dict[str, Any]]) -> str:
    """Markdown: of each mode its rate, the time for equal tokens to verl's modes, and how old what it trained was."""
    bases = [base for base in BASELINES if base in rates]
    head = ["mode", "steps", "generation, s a step", "tokens/s", *(f"time, {base} = 1" for base in bases)]
    lines = [[*head, "staleness mean", "max"], ["---"] * (len(head) + 2)]
    for mode, row in rates.items():
        steps = [step for job in jobs if job["mode"] == mode for step in job["steps"] if f"{STALENESS}/max" in step]
        shown = [f"{row['num_steps']:.0f}", f"{row['seconds'] / row['num_steps']:.1f}", f"{row['tokens_per_s']:,.0f}"]
        shown += [f"{row[f'time_ratio_to_{base}']:.2f}" for base in bases]
        mean = f"{statistics.fmean(step[f'{STALENESS}/mean'] for step in steps):.1f}" if steps else ""
        most = f"{max(step[f'{STALENESS}/max'] for step in steps):.0f}" if steps else ""
        lines.append([mode, *shown, mean, most])
    return markdown(lines)
