"""Loads a data set from a local copy or the Hugging Face hub, and writes verl parquet files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from datasets import load_dataset
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from tqdm import tqdm

from partial_rollout.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
Row = dict[str, Any]


def load_rows(source: str, split: str, *, subset: str | None = None) -> list[Row]:
    """All rows of one split of `source`: a file, a directory with a file named after the split, or a name on the hub.

    Raises:
        DataError: `source` does not exist or has no rows, or the hub cannot be reached.
    """
    path = Path(source).expanduser()
    looks_local = path.is_absolute() or source.startswith((".", "~")) or path.suffix in FORMATS
    rows = _load_local(path, split) if path.exists() or looks_local else _load_hub(source, split, subset)
    if not rows:
        raise DataError(f"{source} has no rows in split {split!r}")
    return rows


def find_file(path: Path, split: str) -> Path:
    """`path` itself, or the one file below it whose name starts with `split`."""
    if not path.exists():
        raise DataError(f"{path} does not exist; give a file, a directory with {split}*.parquet or a hub name")
    if path.is_file():
        return path
    found = sorted(file for file in path.rglob(f"{split}*") if file.suffix in FORMATS)
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise DataError(f"{path} must hold one file {split}*{'|'.join(FORMATS)}, found: {names}")
    return found[0]


def _load_local(path: Path, split: str) -> list[Row]:
    file = find_file(path, split)
    if file.suffix not in FORMATS:
        raise DataError(f"{file} has an ending that is not allowed: must be one of {', '.join(FORMATS)}")
    frame = pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_json(file, lines=file.suffix == ".jsonl")
    return frame.to_dict("records")


def _load_hub(name: str, split: str, subset: str | None) -> list[Row]:
    try:
        return load_dataset(name, subset, split=split).to_list()
    except (DatasetNotFoundError, HfHubHTTPError, OfflineModeIsEnabled, ConnectionError, ValueError) as error:
        raise DataError(
            f"cannot load {name} (split {split!r}) from the Hugging Face hub: {error}. "
            "Without a network, download it elsewhere and give the directory with --source"
        ) from error


def column(row: Row, name: str, source: str) -> Any:
    """`row[name]`; raises DataError with the names of the columns if there is no such column."""
    if name not in row:
        raise DataError(f"{source} has no column {name!r}; its columns are: {', '.join(map(str, row))}")
    return row[name]


def write_rows(rows: Iterable[Row], path: Path, convert: Callable[[int, Row], Row]) -> int:
    """Write `convert(index, row)` of all rows to a parquet file, which appears when it is complete; return how many.

    Raises:
        DataError: a row cannot be converted or the file cannot be written.
    """
    converted = [convert(index, row) for index, row in enumerate(tqdm(list(rows), desc=path.name, unit="row"))]
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(converted).to_parquet(part)
        os.replace(part, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error}") from error
    return len(converted)
