"""The files of a task that a recipe makes by itself (quickstart, SmolLM2): data, starting model and a manifest."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from partial_rollout.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """Where the parts of a task lie below `root`."""

    root: Path

    @property
    def train(self) -> Path:
        """Training prompts."""
        return self.root / "train.parquet"

    @property
    def val(self) -> Path:
        """Held-out prompts."""
        return self.root / "val.parquet"

    @property
    def model(self) -> Path:
        """Starting model and tokenizer."""
        return self.root / "model"

    @property
    def manifest(self) -> Path:
        """JSON: the parameters that the parts were made with, and what else tells whether they can be used again."""
        return self.root / "manifest.json"

    def make_root(self) -> None:
        """Make the directory; raises DataError where it cannot be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.manifest.touch()
        except OSError as error:
            raise DataError(f"cannot write the task to {self.root}: {error}") from error

    def read_manifest(self) -> dict[str, Any]:
        """What the manifest says; empty if it is missing or torn."""
        try:
            return dict(json.loads(self.manifest.read_text()))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}

    def write_manifest(self, content: dict[str, Any]) -> dict[str, Any]:
        """Write the manifest whole or not at all; returns `content`."""
        part = self.manifest.with_suffix(".part")
        part.write_text(json.dumps(content, indent=2))
        os.replace(part, self.manifest)
        return content


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a data file whole or not at all."""
    part = path.with_suffix(".part")
    pd.DataFrame(list(rows)).to_parquet(part)
    os.replace(part, path)


def require_positive(parameters: Any, *names: str) -> None:
    """Raise DataError for a parameter below 1, by the name of its option."""
    for name in names:
        if getattr(parameters, name) < 1:
            raise DataError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(parameters, name)}")


def text_after(mark: str, solution: object) -> str:
    """The text after the last `mark` of a response; empty if there is none, or the response is no text.

    >>> text_after("Answer:", "Answer: 3, no. Answer: 4 ")
    '4'
    """
    if not isinstance(solution, str) or mark not in solution:
        return ""
    return solution.rpartition(mark)[2].strip()
