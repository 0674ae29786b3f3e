"""Whole training jobs on one GPU: verl's `sync` and `colocate_async`, and ours, with the same model, data and lengths.

    python -m benchmarks.gpu.jobs --shape qwen3-0.6b --budget-s 560 --out $OUT/jobs
    python -m benchmarks.gpu.jobs --shape 4b --batch 16 --gpus 0 1 2 --modes sync colocate_async partial_reuse_kv ...
    python -m benchmarks.gpu.jobs --shape 8b --rollout-only --memory 0.78 --steps 40 --job-s 700 --gpus 0 1 ...
    python -m benchmarks.gpu.jobs --shape tiny --modes partial_rollout --steps 4 --out /tmp/jobs     # on a CPU

Random weights on disk, since the training worker reads them; a learning rate of 0, so they stay. Jobs are interleaved,
or run side by side on the GPUs that `--gpus` names, and are stored one by one (`table.md` and `jobs.json`, for
`python -m benchmarks.gpu.plots`). A job that does not end within the budget, or its own seconds (`--job-s`), is stored
with the steps that it has. With `--rollout-only` nothing is trained: a model whose gradients and optimizer do not fit
beside its engine can be measured, and a job of the same time has more steps. Everything else is verl's trainer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.bench_rollout import BASELINES, MODES, mode_options, num_prompts, summarise
from benchmarks.engine_gauges import RunningRequests, utilisation
from benchmarks.gpu.all import SIZES, TINY, given_options
from benchmarks.gpu.inputs import PROMPT_TOKENS, SHAPES, TRACES, workload, write_model, write_prompts
from benchmarks.gpu.summary import in_pairs, markdown
from benchmarks.lanes import Lane, run_all
from benchmarks.result import about_run, store
from benchmarks.training_job import ROOT, TRAINING_ONLY, read_steps, training_command, training_job, until_over
from partial_rollout.runtime.termination import heed_termination
from partial_rollout.settings.mode import PACKED_ATTENTION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.bench_rollout import Workload

COMPARED = ("sync", "partial_rollout", "colocate_async", "partial_reuse_kv")
SKIP = 2
"""Steps that are left out: the primer's and, of asynchronous modes, one in which contexts grow."""
ROW_TOKENS = 12_288
"""Of a training row: more logits over 151,936 tokens do not fit beside a 4B model and its engine."""
TIMES = ("gen", "step", "old_log_prob", "update_actor", "update_weights")
KEPT = (*(f"timing_s/{name}" for name in TIMES), "perf/total_num_tokens")
KEPT_GROUPS = ("partial_rollout/", "training/rollout_", "training/off_policy/")
"""Metrics of a job that are stored: these, and all whose names begin so."""
STALENESS = "training/off_policy/trajectory_staleness_worst"
"""verl's own count of the steps since a response was begun, which all modes have."""
ROLLOUT_ONLY = ("trainer.critic_warmup=1000000", "algorithm.rollout_correction.bypass_mode=True")
"""Without an update of the actor, and with the engine's log-probs as old ones; weights are sent as ever."""


def write_weights(path: Path, shape: str, max_positions: int) -> None:
    """Random bf16 weights beside the configuration, made in a process that gives the GPU's memory back."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(_write_weights, path, shape, max_positions).result()


def _write_weights(path: Path, shape: str, max_positions: int) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(SHAPES[shape].config(max_positions))
    model.save_pretrained(path)


def settings(folder: Path, load: Workload, prompt_tokens: int) -> list[str]:
    """The load: what all jobs share."""
    rollout = "actor_rollout_ref.rollout"
    return [
        f"data.train_files={folder / 'prompts.parquet'}", f"data.val_files={folder / 'prompts.parquet'}",
        "data.shuffle=False", "data.filter_overlong_prompts=False", f"data.train_batch_size={load.batch}",
        f"data.max_prompt_length={prompt_tokens}", f"data.max_response_length={load.limit}",
        f"actor_rollout_ref.model.path={folder / 'model'}", "actor_rollout_ref.actor.optim.lr=0.0",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={load.batch}",
        f"{rollout}.n={load.group}", f"{rollout}.max_num_seqs={2 * load.batch * load.group}",
        f"{rollout}.max_model_len={prompt_tokens + load.limit}", f"{rollout}.disable_log_stats=False",
        f"{rollout}.agent.agent_loop_config_path={ROOT / 'benchmarks' / 'trace_agent.yaml'}",
        f"trainer.total_training_steps={load.steps}",
    ]  # fmt: skip


def without_flash_attention(shape: str) -> list[str]:
    """Packed rows where it is not installed: attention, and log-probs, which verl would compute token by token.

    verl 0.9.1 has fused log-probs with `fsdp2` only where the head is tied to the embeddings.
    """
    attention = f"+actor_rollout_ref.model.override_config.attn_implementation={PACKED_ATTENTION}"
    return [attention, f"actor_rollout_ref.model.use_fused_kernels={SHAPES[shape].tied}"]


def on_a_gpu(memory: float, shape: str) -> list[str]:
    """Engine and trainer together in one GPU's memory; rows are packed."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return [
        "actor_rollout_ref.model.use_remove_padding=True", *without_flash_attention(shape), f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.model_dtype=bfloat16",
        f"{actor}.ppo_max_token_len_per_gpu={ROW_TOKENS}", f"{actor}.use_torch_compile=False",
        f"{rollout}.gpu_memory_utilization={memory}", f"{rollout}.free_cache_engine=False",
        f"{rollout}.agent.num_workers=1", "reward.num_workers=1", "ray_kwargs.ray_init.num_cpus=64",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1", "trainer.n_gpus_per_node=1",
        "trainer.logger=[console,file]", "trainer.total_epochs=1000", *TRAINING_ONLY,
    ]  # fmt: skip


def command(mode: str, folder: Path, load: Workload, shared: list[str], gpu: list[str] | None) -> list[str]:
    """The training job of one mode on a GPU, with settings `on_a_gpu`, or on a CPU without any."""
    slots = load.batch * load.group
    own = [*shared, *mode_options(mode, slots)]
    if gpu is None:
        # verl's trainer cuts a batch into whole micro-batches only, and the quickstart's are larger than this batch.
        rows = ("actor.ppo_micro_batch_size_per_gpu", "rollout.log_prob_micro_batch_size_per_gpu")
        return training_command(folder, folder, [*own, *(f"actor_rollout_ref.{name}={load.group}" for name in rows)])
    main = [sys.executable, "-m", "partial_rollout.main_ppo", "--config-name", "partial_rollout", "+recipe=grpo"]
    places = [f"trainer.default_local_dir={folder / 'checkpoints'}", f"hydra.run.dir={folder / 'hydra'}"]
    return [*main, *gpu, *places, *own]


def run_job(
    words: list[str], folder: Path, limit_s: float, lane: Lane | None = None, skip: int = SKIP
) -> dict[str, Any]:
    """Run one job for up to `limit_s`; its steps, `skip` of them apart, the ends of all, and how many requests ran.

    Times are seconds from its start; samples are [time, requests in the engines' batches], from the first step on.
    """
    started_s = time.monotonic()
    ends_s: list[float] = []
    samples: list[list[float]] = []
    engines = RunningRequests()
    lane = lane or Lane()
    with training_job(words, folder, lane) as job:
        for now_s in until_over(job, lane, limit_s):
            ends_s += [round(now_s, 1)] * (len(read_steps(folder)) - len(ends_s))
            if ends_s:
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    engines.find(psutil.Process(job.pid).children(recursive=True))
                running = engines.sample()
                samples += [] if running is None else [[round(now_s, 1), running]]
    ended_s, steps = time.monotonic() - started_s, read_steps(folder)
    ends_s += [round(ended_s, 1)] * (len(steps) - len(ends_s))
    times = {"job_s": ended_s, "first_step_s": ends_s[0] if ends_s else None, "ends_s": ends_s}
    first = {"first_steps": steps[:skip]} if skip else {}
    return {**times, "code": job.returncode, **first, "steps": steps[skip:], "samples": samples}


def slots_in_use(job: dict[str, Any], num_slots: int) -> float | None:
    """Share of the slots that ran over the measured steps, while any did."""
    since_s = job["ends_s"][SKIP - 1] if len(job["ends_s"]) >= SKIP else float("inf")
    return utilisation([running for at_s, running in job["samples"] if at_s >= since_s], num_slots)


def kept(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of steps that are stored."""
    return [{name: step[name] for name in step if name in KEPT or name.startswith(KEPT_GROUPS)} for step in steps]


def response_tokens(step: dict[str, Any], load: Workload, prompt_tokens: int) -> float:
    """Of a step's batch, whose prompts have so many tokens each."""
    return step["perf/total_num_tokens"] - load.batch * load.group * prompt_tokens


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


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b", help="of the model (%(default)s)")
    line.add_argument("--trace", choices=TRACES, default="long_tail", help="of response lengths (%(default)s)")
    line.add_argument("--out", type=Path, required=True, help="folder for jobs.json and the jobs' logs")
    line.add_argument("--budget-s", type=float, default=560.0, help="for all jobs (%(default)s)")
    line.add_argument("--modes", nargs="+", default=list(COMPARED), choices=list(MODES), help="%(default)s")
    line.add_argument("--repeats", type=int, default=1, help="jobs of each mode, interleaved (%(default)s)")
    line.add_argument("--steps", type=int, default=6, help=f"of a job, the first {SKIP} are left out (%(default)s)")
    line.add_argument("--job-s", type=float, help="at most, for each job with its start, which takes minutes")
    line.add_argument("--rollout-only", action="store_true", help="compute no log-probs and no update")
    line.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory for the engine")
    line.add_argument("--gpus", nargs="+", type=int, default=[], help="jobs side by side, one on each of these")
    for name in ("batch", "group", "seed"):
        line.add_argument(f"--{name}", type=int, help=SIZES[name])
    return line


class Jobs:
    """The jobs of one load, and the file with what they measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Note under which circumstances."""
        self._options, self._ends_s = options, time.monotonic() + options.budget_s
        sizes = given_options(options, ("batch", "group", "seed"))
        self._load = replace(workload(options.shape, options.trace, **sizes), steps=options.steps, skip=SKIP)
        self._prompt_tokens = TINY["prompt_tokens"] if options.shape == "tiny" else PROMPT_TOKENS
        engine = {"shape": options.shape, "prompt_tokens": self._prompt_tokens}
        self._data = {**about_run(options), "engine": engine, "workload": asdict(self._load)}
        self._jobs: list[dict[str, Any]] = []
        self._storing = threading.Lock()

    def run(self, folder: Path) -> None:
        """All of them, with model and prompts in `folder`.

        Each is stored as soon as it ends, also when that is because this process is to end.
        """
        options, load = self._options, self._load
        prompt_tokens = self._prompt_tokens
        tokenizer = write_model(folder / "model", SHAPES[options.shape], prompt_tokens + load.limit)
        write_weights(folder / "model", options.shape, prompt_tokens + load.limit)
        write_prompts(folder / "prompts.parquet", load, tokenizer, prompt_tokens, num_prompts(load))
        shared = [*settings(folder, load, prompt_tokens), *(ROLLOUT_ONLY if options.rollout_only else ())]
        names = [(mode, repeat) for repeat in range(options.repeats) for mode in options.modes]
        lanes = [Lane(gpus=(gpu,)) for gpu in options.gpus] or [Lane()]
        run_all([partial(self._run_one, shared, *name) for name in names], lanes)
        if not any(job["steps"] for job in self._jobs):
            raise SystemExit(f"no job got to a measured step; logs in {options.out}")

    def _run_one(self, shared: list[str], mode: str, repeat: int, lane: Lane) -> None:
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            return
        options = self._options
        limit_s = min(left_s, options.job_s or left_s)
        place = options.out.resolve() / f"{mode}-{repeat}"
        gpu = None if options.shape == "tiny" else on_a_gpu(options.memory, options.shape)
        job = run_job(command(mode, place, self._load, shared, gpu), place, limit_s, lane)
        in_use = slots_in_use(job, self._load.batch * self._load.group)
        job |= {name: kept(job[name]) for name in ("first_steps", "steps")}
        with self._storing:
            self._store({"mode": mode, "repeat": repeat, "gpus": lane.gpus, "slots_in_use": in_use} | job)

    def _store(self, job: dict[str, Any]) -> None:
        self._jobs.append(job)
        whole = [each for each in self._jobs if len(each["steps"]) > 1]
        rates = generation(whole, self._load, self._prompt_tokens)
        found = {"summary": summarise(whole), "generation": rates, "jobs": self._jobs}
        store({**self._data, **found}, self._options.out / "jobs.json")
        (self._options.out / "table.md").write_text(rates_table(rates, self._jobs) + "\n")
        shown = ("mode", "repeat", "gpus", "job_s", "first_step_s", "code", "slots_in_use")
        print({name: job[name] for name in shown} | {"steps": len(job["steps"])}, flush=True)


def checked(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line.

    Raises:
        SystemExit: one is not allowed.
    """
    options = parser().parse_args(words)
    if len(set(options.gpus)) < len(options.gpus):
        raise SystemExit(f"--gpus {options.gpus} is not allowed: name each GPU once")
    if options.job_s is not None and options.job_s <= 0:
        raise SystemExit(f"--job-s {options.job_s} is not allowed: must be above 0")
    return options


def run(options: argparse.Namespace) -> None:
    """Run the jobs, and store what they measured."""
    heed_termination()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pr-jobs-") as folder:
        Jobs(options).run(Path(folder))


if __name__ == "__main__":
    run(checked())
