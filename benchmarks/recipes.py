"""The text recipes on GPUs, unchanged but for paths and sizes: made-up weights and problems, a few steps of each.

    python -m benchmarks.recipes --recipes qwen3-0.6b_gsm8k_grpo --gpus 0 1 --out OUT
    ... --gpus 0 1 --tensor-parallel 2 --set partial_rollout.weights.backend=channel

One replica for each `--tensor-parallel` GPUs. Stored one by one in `recipes.json`, with the metrics of every step; logs
are beside it. There need be no flash-attention: attention is `varlen_sdpa` and log-probs are fused, which `--set`
may change.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.jobs import without_flash_attention
from benchmarks.lanes import Lane, run_all
from benchmarks.training_job import ROOT, run_job
from partial_rollout.advise.measured import kept
from partial_rollout.advise.result import about_run, store
from partial_rollout.advise.shapes import SHAPES, write_model, write_weights
from partial_rollout.run.data import dapo_math, gsm8k
from partial_rollout.runtime.termination import heed_termination

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
MAX_POSITIONS = 4096
SHOWN = ("recipe", "tensor_parallel", "gpus", "set", "code", "job_s", "first_step_s")
"""Fields of a run that are in the summary; the run's steps are beside it."""


def write_problems(folder: Path, recipe: str, num: int) -> None:
    """`train.parquet` and `test.parquet`, made by the recipe's own script from `num` sums."""
    rng = random.Random(0)
    sums = [(rng.randrange(1000), rng.randrange(1000)) for _ in range(num)]
    texts = [(f"What is {a} + {b}?", a + b) for a, b in sums]
    if "dapo" in recipe:
        rows: list[dict[str, Any]] = [
            {"data_source": "math_dapo", "prompt": [{"content": text}], "reward_model": {"ground_truth": str(truth)}}
            for text, truth in texts
        ]
    else:
        rows = [{"question": text, "answer": f"#### {truth}"} for text, truth in texts]
    source = folder / "source"
    source.mkdir(parents=True)
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if "dapo" in recipe:
        dapo_math.make(folder, str(source / "train.jsonl"), str(source / "test.jsonl"))
    else:
        gsm8k.make(folder, str(source), tool="tool" in recipe)


def variables(options: argparse.Namespace, model: Path, data: Path) -> dict[str, str]:
    """What the recipe is told by its environment."""
    return {
        "MODEL_PATH": str(model),
        "TRAIN_FILE": str(data / "train.parquet"),
        "VAL_FILE": str(data / "test.parquet"),
        "GPUS_PER_NODE": str(len(options.gpus)),
        "TENSOR_PARALLEL": str(options.tensor_parallel),
        "BATCH_SIZE": str(options.batch),
        "MINI_BATCH_SIZE": str(options.batch),
        "GROUP_SIZE": str(options.group),
        "MAX_PROMPT_LENGTH": "768",
        "MAX_RESPONSE_LENGTH": str(options.response_tokens),
        "MAX_TOKENS_PER_GPU": "12288",
        "TOTAL_STEPS": str(options.steps),
        "SAVE_FREQ": "-1",
        "TEST_FREQ": "-1",
        "PYTHON": options.python,
    }


def command(options: argparse.Namespace, recipe: str, places: dict[str, Path]) -> list[str]:
    """The recipe's own script with its settings; `places` of model, data and output."""
    given = variables(options, places["model"], places["data"]) | {"OUTPUT_DIR": str(places["out"])}
    script = ROOT / "partial_rollout/run" / f"run_{recipe}{'_baseline' * options.baseline}.sh"
    words = without_flash_attention(options.shape or RECIPES[recipe])
    words += ["actor_rollout_ref.rollout.free_cache_engine=False"] if options.retain_kv else []
    return ["env", *(f"{name}={value}" for name, value in given.items()), "bash", str(script), *words, *options.set]


def run_recipe(options: argparse.Namespace, recipe: str, folder: Path, limit_s: float, lane: Lane) -> dict[str, Any]:
    """Start it, and return how it went, which is as far as it came where the lane or the time has ended."""
    shape = options.shape or RECIPES[recipe]
    mode = "baseline" if options.baseline else "partial"
    out = options.out.resolve() / f"{recipe}-{mode}-{len(options.gpus)}x{options.tensor_parallel}"
    places = {"model": folder / shape, "data": folder / recipe, "out": out}
    if not places["model"].exists():
        write_model(places["model"], SHAPES[shape], MAX_POSITIONS)
        write_weights(places["model"], shape, MAX_POSITIONS)
    write_problems(places["data"], recipe, 4 * options.batch)
    about = {"recipe": recipe, "tensor_parallel": options.tensor_parallel, "gpus": options.gpus, "set": options.set}
    job = run_job(command(options, recipe, places), out, limit_s, lane, skip=0)
    return about | job | {"steps": kept(job["steps"])}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    line.add_argument("--out", type=Path, required=True, help="folder for recipes.json and the jobs' logs")
    line.add_argument("--gpus", nargs="+", type=int, default=[0], help="by their numbers (%(default)s)")
    line.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of an engine (%(default)s)")
    line.add_argument("--baseline", action="store_true", help="their baselines, which are verl's sync trainer")
    line.add_argument("--retain-kv", action="store_true", help="engines keep their memory, with the KV")
    line.add_argument("--shape", choices=list(SHAPES), help="of the model; the recipe's own unless given")
    line.add_argument("--steps", type=int, default=4)
    line.add_argument("--batch", type=int, default=16, help="prompts of a step (%(default)s)")
    line.add_argument("--group", type=int, default=8, help="responses to each (%(default)s)")
    line.add_argument("--response-tokens", type=int, default=512, help="at most (%(default)s)")
    line.add_argument("--budget-s", type=float, default=560.0)
    line.add_argument("--python", default=sys.executable, help="interpreter of the recipes")
    line.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="Hydra overrides")
    line.add_argument("--dry-run", action="store_true", help="print the recipes' commands, and run nothing")
    return line


def main(words: list[str] | None = None) -> None:
    """Run the recipes, and store how they went."""
    options = parser().parse_args(words)
    if options.dry_run:
        for recipe in options.recipes:
            print(shlex.join(command(options, recipe, {name: Path(name.upper()) for name in ("model", "data", "out")})))
        return
    heed_termination()
    ends_s = time.monotonic() + options.budget_s
    options.out.mkdir(parents=True, exist_ok=True)
    about = about_run(options)
    del about["options"]["python"]  # a path
    runs: list[dict[str, Any]] = []

    def run(recipe: str, folder: Path, lane: Lane) -> None:
        left_s = ends_s - time.monotonic()
        if left_s > 0:
            runs.append(run_recipe(options, recipe, folder, left_s, lane))
            rows = [{name: each[name] for name in SHOWN} | {"num_steps": len(each["steps"])} for each in runs]
            store({**about, "summary": rows, "runs": runs}, options.out / "recipes.json", raw=["runs"])
            print(rows[-1], flush=True)

    with tempfile.TemporaryDirectory(prefix="pr-recipes-") as folder:
        recipes = [partial(run, recipe, Path(folder)) for recipe in dict.fromkeys(options.recipes)]
        # One lane, one after the other; a recipe that is interrupted is stored, too.
        run_all(recipes, [Lane(gpus=tuple(options.gpus))])
    failed = [run["recipe"] for run in runs if run["code"]]
    if failed or len(runs) < len(options.recipes):
        raise SystemExit(f"failed: {failed}; not run: {options.recipes[len(runs) :]}; logs in {options.out}")


if __name__ == "__main__":
    main()
