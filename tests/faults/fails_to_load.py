"""Training data that the second start of a run cannot read, after it has started its training workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset

TRACED = "traced.parquet"
"""Name of the training data; those for validation belong to all jobs."""
FAILS = 2
"""Number of the start in which reading fails."""


class FailingDataset(RLHFDataset):
    """Raises, once, what is no death of a process."""

    def __init__(self, data_files: Any, *args: Any, **options: Any) -> None:
        data = Path(data_files if isinstance(data_files, str) else data_files[0])
        if data.name == TRACED:
            with data.with_suffix(".starts").open("a+") as file:
                file.write("begun\n")
                file.seek(0)
                number = len(file.readlines())
            if number == FAILS:
                raise RuntimeError("the data cannot be read just now")
        super().__init__(data_files, *args, **options)
