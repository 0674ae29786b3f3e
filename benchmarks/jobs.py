"""Whole training jobs of verl's trainer modes and of ours, on the same model, prompts and response lengths.

    python -m benchmarks.jobs --shape small --repeats 2 --out outputs/jobs                  # a CPU: minutes a job
    python -m benchmarks.jobs --shape small --at-once 8 --modes sync reorder --out ...      # side by side, 2 cores each
    python -m benchmarks.jobs --shape 4b --batch 16 --gpus 0 1 2 --modes sync colocate_async partial_reuse_kv ...
    python -m benchmarks.jobs --shape 8b --rollout-only --memory 0.78 --steps 40 --job-s 700 --gpus 0 1 ...

Random weights on disk, since the training worker reads them; a learning rate of 0, so they stay. Lengths are recorded
(`--trace`, `--seed`), so all modes have the same work. Jobs are interleaved (A B C A B C), or run side by side on the
GPUs that `--gpus` names. Each is stored as soon as it ends (`table.md`, `jobs.json`); one that does not end within the
budget, or its own seconds (`--job-s`), is stored with the steps that it has. With `--rollout-only` nothing is trained:
a model whose gradients and optimizer do not fit beside its engine can be measured, and a job of the same time has more
steps. Everything else is verl's trainer. `--dry-run` shows the jobs' commands.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lanes import Lane, make_lanes, run_all
from benchmarks.training_job import (
    ROOT,
    TRAINING_ONLY,
    of_workers,
    run_job,
    training_command,
)
from partial_rollout.advise.measured import SKIP, generation, kept, parts, rates_table, slots_in_use, summarise
from partial_rollout.advise.result import about_run, store, stored_jobs
from partial_rollout.advise.shapes import PROMPT_TOKENS, SHAPES, write_inputs
from partial_rollout.advise.workload import TRACES, workload
from partial_rollout.runtime.termination import heed_termination
from partial_rollout.settings.flag import PACKED_ATTENTION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from partial_rollout.advise.workload import Workload

COMPARED = ("sync", "partial_rollout", "colocate_async", "partial_reuse_kv")
ON_A_CPU = ("tiny", "small")
"""Shapes that are trained on a CPU, with the quickstart's configuration."""
CPU_PROMPT_TOKENS = 32
ROW_TOKENS = 12_288
"""Tokens of a training row: more logits over 151,936 tokens do not fit beside a 4B model and its engine."""
ROLLOUT_ONLY = ("trainer.critic_warmup=1000000", "algorithm.rollout_correction.bypass_mode=True")
"""Without an update of the actor, and with the engine's log-probs as old ones; weights are sent as ever."""
FLAG = "+async_training.partial_rollout=True"
ADAPTIVE = (
    "partial_rollout.slots.adaptive=True",
    "partial_rollout.slots.interval_s=1",
    "partial_rollout.num_slots={slots}",
    "actor_rollout_ref.rollout.max_num_seqs={twice_slots}",
)
"""From the slots of the other modes up to all prompts in flight."""
RELEASED = "actor_rollout_ref.rollout.free_cache_engine=True"
"""Engine memory is released between steps, verl's default; on a GPU only."""
OFFLOADED = ("partial_rollout.tail.offload_gib=48", RELEASED)


FIXED = ("partial_rollout.prefetch_factor=2", "partial_rollout.slots.adaptive=False")
"""Nothing is chosen by the run, unless a mode says another value."""


def _ours(policy: str, interrupt_mode: str = "abort", *more: str) -> list[str]:
    tail, named = "partial_rollout.tail", {option.partition("=")[0] for option in more}
    fixed = [option for option in FIXED if option.partition("=")[0] not in named]
    return [FLAG, f"{tail}.policy={policy}", f"{tail}.interrupt_mode={interrupt_mode}", *fixed, *more]


def _fast_poll(name: str) -> list[str]:
    prefix = "trainer.v1.sampler.custom_sampler"
    return [f"{prefix}.path=pkg://benchmarks.fast_poll", f"{prefix}.name={name}"]


COLOCATE = "trainer.v1.trainer_mode=colocate_async"
MODES: dict[str, list[str]] = {
    "sync": [],
    "sync_fast_poll": _fast_poll("FastPollReplayBuffer"),
    "colocate_async": [COLOCATE],
    "colocate_async_fast_poll": [COLOCATE, *_fast_poll("FastPollReplayBufferAsync")],
    "colocate_async_released": [COLOCATE, RELEASED],
    "flag": [FLAG],
    "flag_released": [FLAG, RELEASED],
    "wait": _ours("wait"),
    "partial_rollout": _ours("partial"),
    "partial_rollout_prefetch_3": _ours("partial", "abort", "partial_rollout.prefetch_factor=3"),
    "partial_keep_kv": _ours("partial", "keep_kv"),
    "partial_reuse_kv": _ours("partial", "reuse_kv"),
    "partial_reuse_kv_prefetch_3": _ours("partial", "reuse_kv", "partial_rollout.prefetch_factor=3"),
    "partial_offload_kv": _ours("partial", "offload_kv", *OFFLOADED),
    "partial_offload_kv_prefetch_3": _ours("partial", "offload_kv", *OFFLOADED, "partial_rollout.prefetch_factor=3"),
    "partial_adaptive": _ours("partial", "abort", *ADAPTIVE),
    "partial_adaptive_keep_kv": _ours("partial", "keep_kv", *ADAPTIVE),
    "partial_adaptive_reuse_kv": _ours("partial", "reuse_kv", *ADAPTIVE, "partial_rollout.prefetch_factor=4"),
    "partial_adaptive_reuse_kv_prefetch_5": _ours(
        "partial", "reuse_kv", *ADAPTIVE, "partial_rollout.prefetch_factor=5"
    ),
    "reorder": _ours("reorder"),
    "reorder_reuse_kv": _ours("reorder", "reuse_kv"),
}
CPU_MODES = [mode for mode in MODES if "offload" not in mode and "released" not in mode]


def mode_options(mode: str, slots: int) -> list[str]:
    """Hydra overrides of a mode, for a job with so many slots."""
    return [option.format(slots=slots, twice_slots=2 * slots) for option in MODES[mode]]


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


def command(
    mode: str, folder: Path, load: Workload, shared: list[str], gpu: list[str] | None, *, python: str = sys.executable
) -> list[str]:
    """The training job of one mode on a GPU, with settings `on_a_gpu`, or on a CPU without any."""
    own = [*shared, *mode_options(mode, load.batch * load.group)]
    if gpu is None:
        # verl's trainer cuts a batch into whole micro-batches only, and the quickstart's are larger than this batch.
        rows = ("actor.ppo_micro_batch_size_per_gpu", "rollout.log_prob_micro_batch_size_per_gpu")
        own += [f"actor_rollout_ref.{name}={load.group}" for name in rows]
        return training_command(folder, folder, own, python)
    main = [python, "-m", "partial_rollout.main_ppo", "--config-name", "partial_rollout", "+recipe=grpo"]
    places = [f"trainer.default_local_dir={folder / 'checkpoints'}", f"hydra.run.dir={folder / 'hydra'}"]
    return [*main, *gpu, *places, *of_workers(python), *own]


class Jobs:
    """The jobs of one load, and the file with what they measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Note under which circumstances."""
        self._options, self._ends_s = options, time.monotonic() + options.budget_s
        sizes = {name: getattr(options, name) for name in ("batch", "group", "seed") if getattr(options, name)}
        self._load = replace(workload(options.shape, options.trace, **sizes), steps=options.steps, skip=SKIP)
        self._prompt_tokens = CPU_PROMPT_TOKENS if options.shape in ON_A_CPU else PROMPT_TOKENS
        engine = {"shape": options.shape, "prompt_tokens": self._prompt_tokens}
        self._data = {**about_run(options), "engine": engine, "workload": asdict(self._load)}
        for name in ("python", "resume", "inputs"):
            del self._data["options"][name]
        self._jobs = stored_jobs(options.out / "jobs.json", resume=options.resume, about=self._data)
        self._storing = threading.Lock()

    def commands(self, folder: Path, repeat: int = 0) -> dict[str, list[str]]:
        """The command of each mode's job, with model and prompts in `folder`; each repeat has a folder of its own."""
        options, load = self._options, self._load
        shared = [*settings(folder, load, self._prompt_tokens), *(ROLLOUT_ONLY if options.rollout_only else ())]
        gpu = None if options.shape in ON_A_CPU else on_a_gpu(options.memory, options.shape)
        found = {}
        for mode in options.modes:
            place = options.out.resolve() / f"{mode}-{repeat}"
            words = command(mode, place, load, shared, gpu, python=options.python)
            found[mode] = [*words, *options.set]
        return found

    def run(self, folder: Path) -> None:
        """Run all of them, and store each as soon as it ends, also when that is because this process is to end."""
        options = self._options
        write_inputs(folder, options.shape, self._load, self._prompt_tokens)
        commands = [self.commands(folder, repeat) for repeat in range(options.repeats)]
        ended_before = {(job["mode"], job["repeat"]) for job in self._jobs}
        names = [(mode, repeat) for repeat in range(options.repeats) for mode in options.modes]
        names = [name for name in names if name not in ended_before]
        lanes = [Lane(gpus=(gpu,)) for gpu in options.gpus] or make_lanes(options.at_once)
        run_all([partial(self._run_one, commands[repeat][mode], mode, repeat) for mode, repeat in names], lanes)
        if not any(job["steps"] for job in self._jobs):
            raise SystemExit(f"no job got to a measured step; logs in {options.out}")

    def _run_one(self, words: list[str], mode: str, repeat: int, lane: Lane) -> None:
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            return
        limit_s = min(left_s, self._options.job_s or left_s)
        folder = self._options.out.resolve() / f"{mode}-{repeat}"
        job = run_job(words, folder, limit_s, lane, end_after=self._options.end_after)
        in_use = slots_in_use(job, self._load.batch * self._load.group)
        job |= {name: kept(job[name]) for name in ("first_steps", "steps")}
        with self._storing:
            self._store({"mode": mode, "repeat": repeat, "gpus": lane.gpus, "slots_in_use": in_use} | job)

    def _store(self, job: dict[str, Any]) -> None:
        self._jobs.append(job)
        whole = [each for each in self._jobs if len(each["steps"]) > 1]
        rates = generation(whole, self._load, self._prompt_tokens)
        found = {
            "summary": summarise(whole),
            "generation": rates,
            "parts": parts(whole, self._load),
            "jobs": self._jobs,
        }
        store({**self._data, **found}, self._options.out / "jobs.json", raw=["jobs"])
        (self._options.out / "table.md").write_text(rates_table(rates, self._jobs) + "\n")
        shown = ("mode", "repeat", "gpus", "job_s", "first_step_s", "code", "slots_in_use")
        print({name: job[name] for name in shown} | {"steps": len(job["steps"])}, flush=True)


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
    line.add_argument("--end-after", type=int, help="end a job after so many steps: lengths are drawn for --steps")
    line.add_argument("--rollout-only", action="store_true", help="compute no log-probs and no update")
    line.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory for the engine")
    line.add_argument("--gpus", nargs="+", type=int, default=[], help="jobs side by side, one on each of these")
    line.add_argument("--at-once", type=int, default=1, help="without GPUs: jobs side by side, each on two cores")
    for name, what in (("batch", "prompts of a step"), ("group", "responses to each"), ("seed", "of the lengths")):
        line.add_argument(f"--{name}", type=int, help=what)
    line.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="Hydra overrides, for every mode")
    line.add_argument("--resume", action="store_true", help="keep the jobs that --out has, and run the others")
    line.add_argument("--inputs", type=Path, help="folder for model and prompts, used again if it has them")
    line.add_argument("--python", default=sys.executable, help="interpreter of the jobs and of their Ray workers")
    line.add_argument("--dry-run", action="store_true", help="print the jobs' commands, and run nothing")
    return line


def main(words: Sequence[str] | None = None) -> None:
    """Run the jobs, and store what they measured."""
    options = parser().parse_args(words)
    if len(set(options.gpus)) < len(options.gpus):
        raise SystemExit(f"--gpus {options.gpus} is not allowed: name each GPU once")
    if options.job_s is not None and options.job_s <= 0:
        raise SystemExit(f"--job-s {options.job_s} is not allowed: must be above 0")
    if options.dry_run:
        for mode, job in Jobs(options).commands(Path("INPUTS")).items():
            print(f"{mode}: {shlex.join(job)}")
        return
    heed_termination()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pr-jobs-") as folder:
        Jobs(options).run(options.inputs.resolve() if options.inputs else Path(folder))


if __name__ == "__main__":
    main()
