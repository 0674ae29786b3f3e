"""Which algorithms and models run with partial rollout: whole short jobs on a CPU, interrupted and started again.

    python -m benchmarks.matrix [--cases gae lora] --json benchmarks/results/matrix.json        (make matrix)

A case is a chain of jobs of three steps on one folder of checkpoints, so that all but the first start from one. Every
third prompt has long responses: each job has interrupted ones, and trains them in a later step. Model, data and the
way to start a job are those of tests/e2e. A case that does not run is started once more without the flag: where verl's
own trainer ends with an error too, the table has it. Each case is stored as soon as it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partial_rollout.advise.predict import markdown
from partial_rollout.advise.result import circumstances, read_result, store, versions
from partial_rollout.run.cpu_environment import apply_cpu_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.e2e.conftest import Job

STEPS = 3
"""Of each job."""
NUM_ROWS, EVERY = 64, 3
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))
FLOAT32 = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
REFERENCE = (
    f"{REF}.log_prob_micro_batch_size_per_gpu=32", f"{REF}.fsdp_config.dtype=float32",
    f"{REF}.fsdp_config.use_torch_compile=False", f"{REF}.use_torch_compile=False",
    f"+{REF}.fsdp_config.mixed_precision={FLOAT32}",
)  # fmt: skip
PLANNER = "partial_rollout.packing.planner=verl"
SHOWN = ("case", "runs", "steps", "interrupted", "resumed", "restarts", "error", "verl")


def _critic(model: str) -> list[str]:
    from tests.e2e.conftest import with_critic

    return with_critic(Path(model))


def _estimator(name: str, *more: str) -> list[str]:
    return [f"algorithm.adv_estimator={name}", *more]


def _reward_model(model: str) -> list[str]:
    block = "reward.reward_model"
    return [
        f"{block}.enable=True", f"{block}.enable_resource_pool=True", f"{block}.n_gpus_per_node=1", f"{block}.nnodes=1",
        f"{block}.model_path={model}", f"{block}.rollout.name=vllm", f"{block}.rollout.tensor_model_parallel_size=1",
        f"{block}.rollout.dtype=float32", f"{block}.rollout.free_cache_engine=False",
        f"{block}.rollout.max_num_seqs=32", f"{block}.rollout.prompt_length=352", f"{block}.rollout.response_length=1",
        "reward.custom_reward_function.path=null", "ray_kwargs.ray_init.num_gpus=2",
    ]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Jobs on one folder of checkpoints, each with overrides of its own."""

    what: str
    jobs: Callable[[str], Sequence[list[str]]]
    """By the path of the tiny model."""
    write: Callable[[Path, Path], list[str]] | None = None
    """Makes further inputs, from the task's folder into another one, and returns overrides for them."""


def write_images(task: Path, folder: Path) -> list[str]:
    """A tiny Qwen2.5-VL with the task's words, and rows with an image each."""
    import io

    import pandas as pd
    from PIL import Image
    from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer, model = AutoTokenizer.from_pretrained(task / "model"), folder / "vl"
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(marks)), strict=True))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128}
    text: dict[str, Any] = {**heads, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    text["rope_scaling"] = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 784, "max_pixels": 1568}
    kinds = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    (model / "preprocessor_config.json").write_text(json.dumps(sizes | kinds))
    file = io.BytesIO()
    Image.new("RGB", (28, 28), "red").save(file, "PNG")
    frame = pd.read_parquet(task / "train.parquet").head(NUM_ROWS)
    frame["images"] = [[{"bytes": file.getvalue()}] for _ in range(len(frame))]
    frame["prompt"] = [[{**words, "content": f"<image>{words['content']}"} for words in row] for row in frame["prompt"]]
    frame.to_parquet(folder / "images.parquet")
    return [f"actor_rollout_ref.model.path={model}", f"data.train_files={folder / 'images.parquet'}"]


def _twice(overrides: Callable[[str], list[str]]) -> Callable[[str], list[list[str]]]:
    return lambda model: [overrides(model)] * 2


CASES = {
    "gae": Case("GAE with a critic", _twice(_critic)),
    "estimators": Case(
        "RLOO with a reference model and KL in the loss, REINFORCE++ with KL in the reward, OPO",
        lambda _: [
            _estimator("rloo", f"{ACTOR}.use_kl_loss=True", *REFERENCE),
            _estimator("reinforce_plus_plus", "algorithm.use_kl_in_reward=True", *REFERENCE),
            _estimator("opo"),
        ],
    ),
    "lora": Case(
        "LoRA", _twice(lambda _: ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"])
    ),
    "reward_model": Case("a reward model on devices of its own", _twice(_reward_model)),
    "megatron": Case(
        "Megatron with planner=verl",
        _twice(lambda _: ["model_engine=megatron", f"{ACTOR}.strategy=megatron", PLANNER]),
    ),
    "images": Case("a vision-language model with rows of text and image", _twice(lambda _: []), write_images),
}


def run_case(case: Case, task: Path, folder: Path) -> dict[str, Any]:
    """Run its jobs until one fails; how it went."""
    from tests.e2e.conftest import FLAG, LONG, SHORT, run_job, with_lengths

    folder.mkdir(parents=True)
    rows = with_lengths(task, folder, [LONG if row % EVERY == EVERY - 1 else SHORT for row in range(NUM_ROWS)])
    shared = [*rows, f"trainer.save_freq={STEPS}", *(case.write(task, folder) if case.write else ())]
    steps: list[dict[str, Any]] = []
    chain = case.jobs(str(task / "model"))
    for number, overrides in enumerate(chain, 1):
        started_s = time.monotonic()
        last = f"trainer.total_training_steps={number * STEPS}"
        job = run_job(task, folder, FLAG, *shared, *overrides, last)
        print(f"{case.what}, job {number}: code {job.code} after {time.monotonic() - started_s:.0f} s", flush=True)
        steps += job.steps
        wrong = what_is_wrong(job, range((number - 1) * STEPS + 1, number * STEPS + 1))
        if wrong:
            break
    row = {"case": case.what, "runs": not wrong, **counts(steps), "restarts": number - 1, "error": wrong, "verl": ""}
    if wrong:
        (folder / "verl").mkdir()
        verls = run_job(task, folder / "verl", *shared, *_without_ours(overrides), "trainer.total_training_steps=1")
        row["verl"] = last_error(verls) if verls.code else "runs without the flag"
    return row


def _without_ours(overrides: Sequence[str]) -> list[str]:
    return [override for override in overrides if not override.startswith("partial_rollout.")]


def what_is_wrong(job: Job, steps: range) -> str:
    """Why a job does not count as run: its error, missing steps, lost prompts, or no interruption; empty if it does."""
    from tests.e2e.conftest import is_conserved

    if job.code:
        return last_error(job)
    if [step["training/global_step"] for step in job.steps] != list(steps):
        return f"other steps than {steps.start} to {steps.stop - 1}"
    if not all(is_conserved(step) for step in job.steps):
        return "a prompt was lost"
    found = counts(job.steps)
    return "" if found["interrupted"] and found["resumed"] else "nothing was interrupted and resumed"


def counts(steps: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Steps, interrupted requests, and trained trajectories that were interrupted."""
    names = {"interrupted": "partial_rollout/interrupted", "resumed": "partial_rollout/resumed_trajectories"}
    return {"steps": len(steps)} | {name: int(sum(step[key] for step in steps)) for name, key in names.items()}


def last_error(job: Job) -> str:
    """The driver's own message, or the last line that names an exception."""
    lines = [line.strip() for line in job.output.splitlines()]
    told = [line for line in lines if line.startswith("error: ")] or [line for line in lines if "Error" in line]
    return told[-1][:300] if told else f"code {job.code}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    shown = [[str(row[name]) for name in SHOWN] for row in rows]
    return markdown([list(SHOWN), ["---"] * len(SHOWN), *shown])


def main(words: Sequence[str] | None = None) -> None:
    """Run the cases, print the table, and store it."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    line.add_argument("--task", type=Path, help="folder made by run.quickstart.make_task; made when not given")
    line.add_argument("--work", type=Path, help="folder for data, checkpoints and logs; else one that is removed")
    line.add_argument("--json", type=Path, default=Path("outputs/matrix.json"))
    options = line.parse_args(words)
    about = {**circumstances(options), "versions": versions()}
    for name in ("task", "work"):
        del about["options"][name]
    apply_cpu_environment()
    kept = read_result(options.json)["rows"] if options.json.exists() else {}
    with tempfile.TemporaryDirectory(prefix="pr-matrix-") as temporary:
        work = (options.work or Path(temporary)).resolve()
        task = _task(work, options.task)
        for name in options.cases:
            kept[name] = run_case(CASES[name], task, work / name)
            rows = {each: kept[each] for each in CASES if each in kept}
            store({**about, "rows": rows}, options.json)
            print(table(list(rows.values())), flush=True)


def _task(work: Path, made: Path | None) -> Path:
    """The tiny model and its data, and the process whose forks the jobs are (tests/preloaded)."""
    from partial_rollout.run.quickstart import make_task
    from tests import preloaded
    from tests.e2e.conftest import NURSERY

    task, nursery = work / "task", Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))
    preloaded.start(nursery, os.getpid(), preloaded.MODULES, VLLM_LOGGING_LEVEL="WARN")
    if made is not None:
        shutil.copytree(made, task, dirs_exist_ok=True, symlinks=True)
    else:
        make_task.main(["--out", str(task), "--num-train", "256", "--num-val", "8", "--warm-start-steps", "60"])
    (task / NURSERY).unlink(missing_ok=True)
    (task / NURSERY).symlink_to(nursery)
    return task


if __name__ == "__main__":
    main()
