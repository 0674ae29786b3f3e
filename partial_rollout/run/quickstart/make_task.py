"""Make the quickstart's data, tokenizer and starting checkpoint in one directory.

`python -m partial_rollout.run.quickstart.make_task --out DIR`. The manifest has the parameters and is written last; a
second start with the same parameters reuses the files.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import trange

from partial_rollout.errors import DataError
from partial_rollout.run.quickstart import warm_start
from partial_rollout.run.quickstart.problem import Habits, Problem, draw_problem
from partial_rollout.run.quickstart.reward import DATA_SOURCE
from partial_rollout.run.quickstart.tokenizer import build_tokenizer
from partial_rollout.run.task_files import TaskFiles, require_positive, write_rows

FORMAT_VERSION = 1
"""Raised whenever the same parameters would make other files."""
MAX_RESPONSE_TOKENS = 320
"""Room for the longest plain work: 99 places of 3 characters, the answer and the end token."""


@dataclass(frozen=True, slots=True)
class TaskParameters:
    """Everything that the files depend on."""

    num_train: int = 4096
    num_val: int = 128
    seed: int = 0
    warm_start_steps: int = 500
    max_response_tokens: int = MAX_RESPONSE_TOKENS
    habits: Habits = field(default_factory=Habits)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Raise DataError for sizes below 1."""
        require_positive(self, "num_train", "num_val", "warm_start_steps")


def make_task(root: Path, parameters: TaskParameters) -> bool:
    """Make all files below `root`; False if files made with the same parameters are there already.

    Raises:
        DataError: `root` cannot be written.
    """
    files = TaskFiles(root)
    if is_complete(files, parameters):
        return False
    files.make_root()
    # Until all parts are there, no manifest vouches for them.
    files.manifest.unlink()
    rng = random.Random(parameters.seed)
    _write_rows(files.train, "train", parameters.num_train, rng)
    _write_rows(files.val, "test", parameters.num_val, rng)
    _write_model(files.model, parameters)
    files.write_manifest(asdict(parameters))
    return True


def is_complete(files: TaskFiles, parameters: TaskParameters) -> bool:
    """Whether all files are there and were made with `parameters`."""
    parts = (files.train, files.val, files.model / "model.safetensors", files.model / "tokenizer.json")
    return all(part.is_file() for part in parts) and files.read_manifest() == asdict(parameters)


def row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """One row with the columns of verl's GSM8K files."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "counting",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {
            "split": split,
            "index": index,
            "question": problem.prompt,
            "num_places": problem.num_places,
        },
    }


def _write_rows(path: Path, split: str, num_rows: int, rng: random.Random) -> None:
    indices = trange(num_rows, desc=f"{split} prompts", unit="row", disable=None)
    write_rows(path, (row(draw_problem(rng), split, index) for index in indices))


def _write_model(directory: Path, parameters: TaskParameters) -> None:
    torch.manual_seed(parameters.seed)
    tokenizer = build_tokenizer(warm_start.MAX_POSITIONS)
    model = warm_start.build_model(tokenizer)
    warm_start.train(
        model,
        tokenizer,
        num_steps=parameters.warm_start_steps,
        habits=parameters.habits,
        max_response_tokens=parameters.max_response_tokens,
        seed=parameters.seed,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    defaults = TaskParameters()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for data and checkpoint")
    parser.add_argument("--num-train", type=int, default=defaults.num_train, help="training prompts (%(default)s)")
    parser.add_argument("--num-val", type=int, default=defaults.num_val, help="validation prompts (%(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of data and checkpoint (%(default)s)")
    parser.add_argument(
        "--warm-start-steps", type=int, default=defaults.warm_start_steps, help="supervised steps (%(default)s)"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Command-line entry."""
    options = parse_arguments(arguments)
    started = time.monotonic()
    try:
        parameters = TaskParameters(
            num_train=options.num_train,
            num_val=options.num_val,
            seed=options.seed,
            warm_start_steps=options.warm_start_steps,
        )
        made = make_task(options.out, parameters)
    except DataError as error:
        raise SystemExit(f"error: {error}") from error
    took = f"made in {time.monotonic() - started:.0f} s" if made else "found, made with the same parameters: reused"
    print(f"quickstart task in {options.out}: {took}")


if __name__ == "__main__":
    main()
