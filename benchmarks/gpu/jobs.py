"""Whole training jobs on one GPU: verl's `sync` and `colocate_async`, and ours, with the same model, data and lengths.

    PYTHONPATH=$PWD:/tmp/site python3 -m benchmarks.gpu.jobs --shape qwen3-0.6b --budget-s 560 --out $OUT/jobs
    python -m benchmarks.gpu.jobs --shape tiny --modes partial_rollout --steps 4 --out /tmp/jobs     # on a CPU

Random weights on disk, since the training worker reads them; a learning rate of 0, so they stay. Jobs are interleaved
and stored one by one (`jobs.json`). A job that does not end within the budget is stored with the steps that it has.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench_rollout import MODES, mode_options, summarise
from benchmarks.gpu.all import SIZES, TINY, devices, versions
from benchmarks.gpu.inputs import SHAPES, TRACES, workload, write_model, write_prompts
from benchmarks.result import circumstances, store
from benchmarks.training_job import ROOT, TRAINING_ONLY, read_steps, training_command, training_job

if TYPE_CHECKING:
    from benchmarks.bench_rollout import Workload

COMPARED = ("sync", "partial_rollout", "colocate_async", "partial_reuse_kv")
SKIP = 2
"""Steps that are left out: the primer's and, of asynchronous modes, one in which contexts grow."""
PROMPT_TOKENS = 256
POLL_S = 0.5
KEPT = ("timing_s/gen", "timing_s/step", "timing_s/update_weights", "timing_s/update_actor", "perf/total_num_tokens")


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


def on_a_gpu(memory: float) -> list[str]:
    """Engine and trainer together in one GPU's memory; no flash-attention, so padded rows."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return [
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa", f"{actor}.strategy=fsdp2",
        f"{actor}.ppo_max_token_len_per_gpu=24576", f"{actor}.use_torch_compile=False",
        f"{rollout}.gpu_memory_utilization={memory}", f"{rollout}.free_cache_engine=False",
        f"{rollout}.agent.num_workers=1", "reward.num_workers=1", "ray_kwargs.ray_init.num_cpus=64",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1", "trainer.n_gpus_per_node=1",
        "trainer.logger=[console,file]", "trainer.total_epochs=1000", *TRAINING_ONLY,
    ]  # fmt: skip


def command(mode: str, folder: Path, load: Workload, shared: list[str], *, memory: float | None) -> list[str]:
    """The training job of one mode on a GPU, or on a CPU without a share of GPU `memory`."""
    slots = load.batch * load.group
    own = [*shared, *mode_options(mode, slots)]
    if memory is None:
        return training_command(folder, folder, own)
    main = [sys.executable, "-m", "partial_rollout.main_ppo", "--config-name", "partial_rollout", "+recipe=grpo"]
    places = [f"trainer.default_local_dir={folder / 'checkpoints'}", f"hydra.run.dir={folder / 'hydra'}"]
    return [*main, *on_a_gpu(memory), *places, *own]


def run_job(words: list[str], folder: Path, limit_s: float) -> dict[str, Any]:
    """Run one job for up to `limit_s`; its steps after the first ones."""
    started_s, first_step_s = time.monotonic(), None
    with training_job(words, folder) as job:
        while job.poll() is None and time.monotonic() - started_s < limit_s:
            time.sleep(POLL_S)
            if first_step_s is None and read_steps(folder):
                first_step_s = time.monotonic() - started_s
    steps = [{name: step[name] for name in step if _is_kept(name)} for step in read_steps(folder)[SKIP:]]
    return {"job_s": time.monotonic() - started_s, "first_step_s": first_step_s, "code": job.returncode, "steps": steps}


def _is_kept(name: str) -> bool:
    return name in KEPT or name.startswith("partial_rollout/")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    line.add_argument("--trace", choices=TRACES, default="long_tail")
    line.add_argument("--out", type=Path, required=True, help="folder for jobs.json and the jobs' logs")
    line.add_argument("--budget-s", type=float, default=560.0)
    line.add_argument("--modes", nargs="+", default=list(COMPARED), choices=list(MODES))
    line.add_argument("--repeats", type=int, default=1)
    line.add_argument("--steps", type=int, default=6, help=f"of a job, the first {SKIP} are left out (%(default)s)")
    line.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory for the engine")
    for name in ("batch", "group", "seed"):
        line.add_argument(f"--{name}", type=int, help=SIZES[name])
    return line


def main() -> None:
    """Run the jobs, and store what they measured."""
    options = parser().parse_args()
    ends_s = time.monotonic() + options.budget_s
    sizes = {name: getattr(options, name) for name in ("batch", "group", "seed") if getattr(options, name) is not None}
    load = replace(workload(options.shape, options.trace, **sizes), steps=options.steps, skip=SKIP)
    about = circumstances(options) | {"devices": devices(), "versions": versions(), "workload": asdict(load)}
    del about["options"]["out"]
    on_a_cpu = options.shape == "tiny"
    prompt_tokens, memory = (TINY["prompt_tokens"], None) if on_a_cpu else (PROMPT_TOKENS, options.memory)
    jobs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="pr-jobs-") as name:
        folder = Path(name)
        tokenizer = write_model(folder / "model", SHAPES[options.shape], prompt_tokens + load.limit)
        write_weights(folder / "model", options.shape, prompt_tokens + load.limit)
        write_prompts(folder / "prompts.parquet", load, tokenizer, prompt_tokens, load.batch * (load.steps + 4))
        for repeat, mode in ((repeat, mode) for repeat in range(options.repeats) for mode in options.modes):
            left_s = ends_s - time.monotonic()
            if left_s > 0:
                place = options.out.resolve() / f"{mode}-{repeat}"
                words = command(mode, place, load, settings(folder, load, prompt_tokens), memory=memory)
                jobs.append({"mode": mode, "repeat": repeat, "slots_in_use": None} | run_job(words, place, left_s))
                whole = [job for job in jobs if len(job["steps"]) > 1]
                store({**about, "summary": summarise(whole), "jobs": jobs}, options.out / "jobs.json")
                print(jobs[-1], flush=True)


if __name__ == "__main__":
    main()
