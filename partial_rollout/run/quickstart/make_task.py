"""Make the quickstart's data, tokenizer and starting checkpoint in one directory.

`python -m partial_rollout.run.quickstart.make_task --out DIR`. The manifest has the parameters and is written last; a
second start with the same parameters reuses the files.

The weights for the default parameters lie beside this file, since training them takes more than a minute. Other
parameters are trained. `--ship` trains the default ones anew and replaces the file; commit it with its description.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from tqdm import trange
from transformers.utils.logging import disable_progress_bar

from partial_rollout.errors import DataError
from partial_rollout.run.quickstart import warm_start
from partial_rollout.run.quickstart.problem import Habits, Problem, draw_problem
from partial_rollout.run.quickstart.reward import DATA_SOURCE
from partial_rollout.run.quickstart.tokenizer import build_tokenizer
from partial_rollout.run.task_files import TaskFiles, require_positive, write_rows

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

FORMAT_VERSION = 1
"""Raised whenever the same parameters would make other files."""
SHIPPED = Path(__file__).with_name("warm_start.safetensors")
"""Weights of the starting checkpoint, fp32; `warm_start.json` beside it has their SHA-256 and what made them."""
OF_DATA = ("num_train", "num_val")
"""Parameters that the checkpoint does not depend on."""
MAX_RESPONSE_TOKENS = 320
"""Room for the longest plain work: 99 places of 3 characters, the answer and the end token."""


logger = logging.getLogger(__name__)


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
    tokenizer = build_tokenizer(warm_start.MAX_POSITIONS)
    weights = shipped_weights(parameters)
    if weights is None:
        model = _trained(parameters)
    else:
        model = warm_start.build_model(tokenizer)
        model.load_state_dict(load(weights))
    disable_progress_bar()  # of transformers, which draws it into files too
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def shipped_weights(parameters: TaskParameters, path: Path = SHIPPED) -> bytes | None:
    """The content of the shipped file; None if it is missing, was changed, or is of other parameters."""
    try:
        content, described = path.read_bytes(), json.loads(path.with_suffix(".json").read_text())
    except FileNotFoundError:
        return None
    if described["parameters"] != _of_model(parameters):
        return None
    if described["sha256"] != hashlib.sha256(content).hexdigest():
        logger.warning("%s is not the file that was shipped, so the starting checkpoint is trained anew", path)
        return None
    return content


def ship(parameters: TaskParameters, path: Path = SHIPPED) -> None:
    """Train the starting checkpoint and write it to `path`, with its description beside it."""
    content = save(_trained(parameters).state_dict())
    path.write_bytes(content)
    described = {"sha256": hashlib.sha256(content).hexdigest(), "parameters": _of_model(parameters)}
    path.with_suffix(".json").write_text(json.dumps(described, indent=2) + "\n")


def _of_model(parameters: TaskParameters) -> dict[str, Any]:
    """The parameters that the checkpoint depends on, as JSON has them."""
    return {name: value for name, value in asdict(parameters).items() if name not in OF_DATA}


def _trained(parameters: TaskParameters) -> Qwen3ForCausalLM:
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
    return model


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    defaults = TaskParameters()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--out", type=Path, help="directory for data and checkpoint")
    place.add_argument("--ship", action="store_true", help=f"train {SHIPPED.name} anew, for a commit")
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
        if options.ship:
            ship(parameters)
            return
        made = make_task(options.out, parameters)
    except DataError as error:
        raise SystemExit(f"error: {error}") from error
    took = f"made in {time.monotonic() - started:.0f} s" if made else "found, made with the same parameters: reused"
    print(f"quickstart task in {options.out}: {took}")


if __name__ == "__main__":
    main()
