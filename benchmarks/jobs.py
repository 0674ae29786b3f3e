"""Whole training jobs of verl's trainer modes and of ours, on the same model, prompts and response lengths.

    python -m benchmarks.jobs --shape small --repeats 2 --out outputs/jobs                  # a CPU: minutes a job
    python -m benchmarks.jobs --shape small --at-once 8 --modes sync reorder --out ...      # side by side, 2 cores each
    python -m benchmarks.jobs --shape 8b --rollout-only --memory 0.78 --steps 40 --job-s 700 --gpus 0 1 ...
    python -m benchmarks.jobs --recipes qwen3-0.6b_gsm8k_grpo --gpus 0 1 --tensor-parallel 2 --out ...    # do they run?

Random weights on disk, since the training worker reads them; a learning rate of 0, so they stay. Lengths are recorded
(`--trace`, `--seed`), so all modes have the same work. Jobs are interleaved (A B C A B C), or run side by side on the
GPUs that `--gpus` names. Each is stored when it ends (`table.md`, `jobs.json`), also when the budget or `--job-s` ends
it. With `--rollout-only` nothing is trained, for models that do not fit beside their optimizer, and for more steps.

With `--recipes` each job is the script of a text recipe, one after the other on all of `--gpus`, unchanged but for
paths and sizes, with made-up weights and problems; stored in `recipes.json` with every step. There need be no
flash-attention: attention is `varlen_sdpa` and log-probs are fused, which `--set` may change.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lanes import Lane, make_lanes
from benchmarks.training_job import ROOT, TRAINING_ONLY, of_workers, run_jobs, training_command
from partial_rollout.advise.measured import SKIP, apart, generation, kept, rates_table, slots_in_use, summarise
from partial_rollout.advise.result import about_run, store, stored_jobs
from partial_rollout.advise.shapes import PROMPT_TOKENS, SHAPES, write_inputs, write_model, write_weights
from partial_rollout.advise.workload import TRACES, workload
from partial_rollout.run.data import dapo_math, gsm8k
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
    "partial_rollout.slots.adaptive=True", "partial_rollout.slots.interval_s=1",
    "partial_rollout.num_slots={slots}", "actor_rollout_ref.rollout.max_num_seqs={twice_slots}",
)  # fmt: skip
"""From the slots of the other modes up to all prompts in flight."""
RELEASED = "actor_rollout_ref.rollout.free_cache_engine=True"
"""Engine memory is released between steps, verl's default; on a GPU only."""
OFFLOADED = ("partial_rollout.tail.offload_gib=48", RELEASED)
SPLIT = [f"{place}.n_gpus_per_node=1" for place in ("trainer", "actor_rollout_ref.rollout")]
"""Overrides for two GPUs, of which one trains, and the other is an engine's."""
RECIPES = {
    "qwen3-0.6b_gsm8k_grpo": "qwen3-0.6b",
    "qwen3-0.6b_gsm8k_tool": "qwen3-0.6b",
    "qwen3-4b_gsm8k_grpo": "4b",
    "qwen3-4b_dapo_math": "4b",
    "qwen3-0.6b_dapo_math": "qwen3-0.6b",
    "qwen3-0.6b_two_small_gpus": "qwen3-0.6b",
    "qwen3-8b_reorder": "8b",
}
"""Recipes, and the shape of the model of each."""
RECIPE_POSITIONS, RECIPE_PROMPT_TOKENS, RECIPE_RESPONSE_TOKENS = 4096, 768, 512
RECIPE_BATCH, RECIPE_GROUP = 16, 8
STEPS, RECIPE_STEPS = 6, 4
OF_THE_WORKLOAD = {
    "batch": "prompts of a step", "group": "responses to each", "seed": "of the lengths",
    "median": "tokens of the median response", "longest": "tokens of the longest responses",
}  # fmt: skip
"""Sizes that the command line may replace, and what they are."""
SHOWN = ("recipe", "tensor_parallel", "gpus", "set", "code", "job_s", "first_step_s")
"""Columns of the summary of recipes; the steps of each are beside it."""
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
SEPARATE_ASYNC = ("trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=1")
DETACHED = ("hybrid_engine=False", "rollout.nnodes=1", "rollout.checkpoint_engine.backend=nccl")
MODES: dict[str, list[str]] = {
    "sync": [],
    "sync_fast_poll": _fast_poll("FastPollReplayBuffer"),
    "colocate_async": [COLOCATE],
    "colocate_async_fast_poll": [COLOCATE, *_fast_poll("FastPollReplayBufferAsync")],
    "colocate_async_released": [COLOCATE, RELEASED],
    "flag": [FLAG],
    "flag_released": [FLAG, RELEASED],
    "separate": [FLAG, "partial_rollout.placement=separate", *SPLIT],
    "separate_async": [*SEPARATE_ASYNC, *(f"actor_rollout_ref.{key}" for key in DETACHED), *SPLIT],
    "wait": _ours("wait"),
    "partial_rollout": _ours("partial"),
    "partial_rollout_prefetch_3": _ours("partial", "abort", "partial_rollout.prefetch_factor=3"),
    "partial_reuse_kv": _ours("partial", "reuse_kv"),
    "partial_reuse_kv_prefetch_3": _ours("partial", "reuse_kv", "partial_rollout.prefetch_factor=3"),
    "partial_offload_kv": _ours("partial", "offload_kv", *OFFLOADED),
    "partial_adaptive": _ours("partial", "abort", *ADAPTIVE),
    "partial_adaptive_reuse_kv": _ours("partial", "reuse_kv", *ADAPTIVE, "partial_rollout.prefetch_factor=4"),
    "partial_adaptive_reuse_kv_prefetch_5": _ours(
        "partial", "reuse_kv", *ADAPTIVE, "partial_rollout.prefetch_factor=5"
    ),
    "reorder": _ours("reorder"),
}
CPU_MODES = [mode for mode in MODES if not any(word in mode for word in ("offload", "released", "separate"))]


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


def on_gpus(number: int, memory: float, shape: str) -> list[str]:
    """Engine and trainer together in the memory of each GPU; rows are packed."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return [
        "actor_rollout_ref.model.use_remove_padding=True", *without_flash_attention(shape), f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.model_dtype=bfloat16",
        f"{actor}.ppo_max_token_len_per_gpu={ROW_TOKENS}", f"{actor}.use_torch_compile=False",
        f"{rollout}.gpu_memory_utilization={memory}", f"{rollout}.free_cache_engine=False",
        f"{rollout}.agent.num_workers=1", "reward.num_workers=1", "ray_kwargs.ray_init.num_cpus=64",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1", f"trainer.n_gpus_per_node={number}",
        "trainer.logger=[console,file]", "trainer.total_epochs=1000", *TRAINING_ONLY,
    ]  # fmt: skip


def command(
    mode: str, folder: Path, load: Workload, shared: list[str], gpu: list[str] | None, *, python: str = sys.executable
) -> list[str]:
    """The training job of one mode on GPUs, with settings `on_gpus`, or on a CPU without any."""
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
        self._options = options
        sizes = {name: getattr(options, name) for name in OF_THE_WORKLOAD if getattr(options, name)}
        self._load = replace(workload(options.shape, options.trace, **sizes), steps=options.steps, skip=SKIP)
        self._prompt_tokens = CPU_PROMPT_TOKENS if options.shape in ON_A_CPU else PROMPT_TOKENS
        engine = {"shape": options.shape, "prompt_tokens": self._prompt_tokens}
        self._data = {**about_run(options), "engine": engine, "workload": asdict(self._load)}
        for name in ("python", "resume", "inputs"):
            del self._data["options"][name]
        self._jobs = stored_jobs(options.out / "jobs.json", resume=options.resume, about=self._data)

    def commands(self, folder: Path, repeat: int = 0) -> dict[str, list[str]]:
        """The command of each mode's job, with model and prompts in `folder`; each repeat has a folder of its own."""
        options, load = self._options, self._load
        shared = [*settings(folder, load, self._prompt_tokens), *(ROLLOUT_ONLY if options.rollout_only else ())]
        gpu = None if options.shape in ON_A_CPU else on_gpus(options.gpus_each, options.memory, options.shape)
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
        there = {(job["mode"], job["repeat"]) for job in self._jobs}
        runs = {
            (mode, repeat): (commands[repeat][mode], options.out.resolve() / f"{mode}-{repeat}")
            for repeat in range(options.repeats) for mode in options.modes if (mode, repeat) not in there
        }  # fmt: skip
        gpus, each = options.gpus, options.gpus_each
        on_gpu = [Lane(gpus=tuple(gpus[first : first + each])) for first in range(0, len(gpus), each)]
        limits = {"budget_s": options.budget_s, "job_s": options.job_s, "end_after": options.end_after}
        run_jobs(runs, self._keep, on_gpu or make_lanes(options.at_once), **limits)
        if not any(job["steps"] for job in self._jobs):
            raise SystemExit(f"no job got to a measured step; logs in {options.out}")

    def _keep(self, run: tuple[str, int], job: dict[str, Any]) -> None:
        in_use = slots_in_use(job, self._load.batch * self._load.group)
        job |= {name: kept(job[name]) for name in ("first_steps", "steps")}
        self._store({"mode": run[0], "repeat": run[1], "slots_in_use": in_use} | job)

    def _store(self, job: dict[str, Any]) -> None:
        self._jobs.append(job)
        whole = [each for each in self._jobs if len(each["steps"]) > 1]
        rates = generation(whole, self._load, self._prompt_tokens)
        found = {"summary": summarise(whole), "generation": rates, **apart(whole, self._load), "jobs": self._jobs}
        store({**self._data, **found}, self._options.out / "jobs.json", raw=["jobs"])
        (self._options.out / "table.md").write_text(rates_table(rates, self._jobs) + "\n")
        shown = ("mode", "repeat", "gpus", "job_s", "first_step_s", "code", "slots_in_use")
        print({name: job[name] for name in shown} | {"steps": len(job["steps"])}, flush=True)


class Recipes:
    """The jobs of recipes, and the file with how they went."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Nothing has run yet."""
        self._options, self._runs = options, list[dict[str, Any]]()
        self._data = about_run(options)
        del self._data["options"]["python"]  # a path

    def commands(self, folder: Path) -> dict[str, list[str]]:
        """The command of each recipe, with models and problems in `folder`."""
        return {recipe: self._command(recipe, folder) for recipe in dict.fromkeys(self._options.recipes)}

    def place(self, recipe: str) -> Path:
        """Where a recipe's job writes."""
        options, mode = self._options, "baseline" if self._options.baseline else "partial"
        return options.out.resolve() / f"{recipe}-{mode}-{len(options.gpus) or 1}x{options.tensor_parallel}"

    def _command(self, recipe: str, folder: Path) -> list[str]:
        options = self._options
        given = variables(options, folder / RECIPES[recipe], folder / recipe)
        script = ROOT / "partial_rollout/run" / f"run_{recipe}{'_baseline' * options.baseline}.sh"
        words = [*without_flash_attention(RECIPES[recipe]), *options.set]
        given["OUTPUT_DIR"] = str(self.place(recipe))
        return ["env", *(f"{name}={value}" for name, value in given.items()), "bash", str(script), *words]

    def run(self, folder: Path) -> None:
        """Run one after the other; a recipe that is interrupted is stored, too."""
        options = self._options
        for recipe in options.recipes:
            write_problems(folder / recipe, recipe, 4 * (options.batch or RECIPE_BATCH))
            if not (model := folder / RECIPES[recipe]).exists():
                write_model(model, SHAPES[RECIPES[recipe]], RECIPE_POSITIONS)
                write_weights(model, RECIPES[recipe], RECIPE_POSITIONS)
        runs = {recipe: (words, self.place(recipe)) for recipe, words in self.commands(folder).items()}
        limits = {"budget_s": options.budget_s, "job_s": options.job_s, "end_after": options.end_after}
        run_jobs(runs, self._keep, [Lane(gpus=tuple(options.gpus))], skip=0, **limits)
        failed = [run["recipe"] for run in self._runs if run["code"]]
        if failed or len(self._runs) < len(runs):
            raise SystemExit(f"failed: {failed}; ran: {len(self._runs)} of {len(runs)}; logs in {options.out}")

    def _keep(self, recipe: str, job: dict[str, Any]) -> None:
        about = {"recipe": recipe, "tensor_parallel": self._options.tensor_parallel, "set": self._options.set}
        self._runs.append(about | job | {"steps": kept(job["steps"])})
        rows = [{name: run[name] for name in SHOWN} | {"num_steps": len(run["steps"])} for run in self._runs]
        store({**self._data, "summary": rows, "runs": self._runs}, self._options.out / "recipes.json", raw=["runs"])
        print(rows[-1], flush=True)


def variables(options: argparse.Namespace, model: Path, data: Path) -> dict[str, str]:
    """What a recipe is told by its environment."""
    batch = str(options.batch or RECIPE_BATCH)
    return {
        "MODEL_PATH": str(model), "TRAIN_FILE": str(data / "train.parquet"), "VAL_FILE": str(data / "test.parquet"),
        "GPUS_PER_NODE": str(len(options.gpus) or 1), "TENSOR_PARALLEL": str(options.tensor_parallel),
        "BATCH_SIZE": batch, "MINI_BATCH_SIZE": batch, "GROUP_SIZE": str(options.group or RECIPE_GROUP),
        "MAX_PROMPT_LENGTH": str(RECIPE_PROMPT_TOKENS), "MAX_RESPONSE_LENGTH": str(RECIPE_RESPONSE_TOKENS),
        "MAX_TOKENS_PER_GPU": str(ROW_TOKENS), "TOTAL_STEPS": str(options.steps), "SAVE_FREQ": "-1",
        "TEST_FREQ": "-1", "PYTHON": options.python,
    }  # fmt: skip


def write_problems(folder: Path, recipe: str, num: int) -> None:
    """`train.parquet` and `test.parquet`, made by the recipe's own script from `num` sums."""
    rng = random.Random(0)
    sums = [(rng.randrange(1000), rng.randrange(1000)) for _ in range(num)]
    texts = [(f"What is {a} + {b}?", a + b) for a, b in sums]
    rows: list[dict[str, Any]] = [{"question": text, "answer": f"#### {truth}"} for text, truth in texts]
    if "dapo" in recipe:
        rows = [
            {"data_source": "math_dapo", "prompt": [{"content": text}], "reward_model": {"ground_truth": str(truth)}}
            for text, truth in texts
        ]
    source = folder / "source"
    source.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if "dapo" in recipe:
        dapo_math.make(folder, str(source / "train.jsonl"), str(source / "test.jsonl"))
    else:
        gsm8k.make(folder, str(source), tool="tool" in recipe)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b", help="of the model (%(default)s)")
    line.add_argument("--trace", choices=TRACES, default="long_tail", help="of response lengths (%(default)s)")
    line.add_argument("--out", type=Path, required=True, help="folder for jobs.json and the jobs' logs")
    line.add_argument("--budget-s", type=float, default=560.0, help="for all jobs (%(default)s)")
    line.add_argument("--modes", nargs="+", default=list(COMPARED), choices=list(MODES), help="%(default)s")
    line.add_argument("--recipes", nargs="+", choices=list(RECIPES), help="run these instead, one after the other")
    line.add_argument("--baseline", action="store_true", help="of recipes their baselines: verl's sync trainer")
    line.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of a recipe's engine (%(default)s)")
    line.add_argument("--repeats", type=int, default=1, help="jobs of each mode, interleaved (%(default)s)")
    steps = f"of a job, the first {SKIP} are left out ({STEPS}); of a recipe ({RECIPE_STEPS})"
    line.add_argument("--steps", type=int, help=steps)
    line.add_argument("--job-s", type=float, help="at most, for each job with its start, which takes minutes")
    line.add_argument("--end-after", type=int, help="end a job after so many steps: lengths are drawn for --steps")
    line.add_argument("--rollout-only", action="store_true", help="compute no log-probs and no update")
    line.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory for the engine")
    line.add_argument("--gpus", nargs="+", type=int, default=[], help="jobs side by side, one on each of these")
    line.add_argument("--gpus-each", type=int, default=1, help="of these, for one job (%(default)s)")
    line.add_argument("--at-once", type=int, default=1, help="without GPUs: jobs side by side, each on two cores")
    for name, what in OF_THE_WORKLOAD.items():
        line.add_argument(f"--{name}", type=int, help=what)
    line.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="Hydra overrides, for every mode")
    line.add_argument("--resume", action="store_true", help="keep the jobs that --out has, and run the others")
    line.add_argument("--inputs", type=Path, help="folder for model and prompts, used again if it has them")
    line.add_argument("--python", default=sys.executable, help="interpreter of the jobs and of their Ray workers")
    line.add_argument("--dry-run", action="store_true", help="print the jobs' commands, and run nothing")
    options = line.parse_args(words)
    options.steps = options.steps or (RECIPE_STEPS if options.recipes else STEPS)
    return options


def main(words: Sequence[str] | None = None) -> None:
    """Run the jobs, and store what they measured."""
    options = parse(words)
    if len(set(options.gpus)) < len(options.gpus):
        raise SystemExit(f"--gpus {options.gpus} is not allowed: name each GPU once")
    if options.gpus_each < 1 or len(options.gpus) % options.gpus_each:
        raise SystemExit(f"--gpus-each {options.gpus_each} is not allowed: must divide {len(options.gpus)} --gpus")
    if options.job_s is not None and options.job_s <= 0:
        raise SystemExit(f"--job-s {options.job_s} is not allowed: must be above 0")
    jobs = Recipes(options) if options.recipes else Jobs(options)
    if options.dry_run:
        for name, job in jobs.commands(Path("INPUTS")).items():
            print(f"{name}: {shlex.join(job)}")
        return
    heed_termination()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pr-jobs-") as folder:
        jobs.run(options.inputs.resolve() if options.inputs else Path(folder))


if __name__ == "__main__":
    main()
