"""DAPO-Math-17k and AIME 2024: `python -m partial_rollout.run.data.dapo_math --out DIR [--train PATH] [--val PATH]`.

Both come in verl's format. The published training file holds every problem about a hundred times: one copy is kept.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from partial_rollout.errors import DataError
from partial_rollout.run.data.source import Row, column, load_rows, write_rows

TRAIN_NAME = "BytedTsinghua-SIA/DAPO-Math-17k"
VAL_NAME = "BytedTsinghua-SIA/AIME-2024"


def question_of(row: Row, source: str) -> str:
    """The text of the first message.

    Raises:
        DataError: the prompt is missing or is no list of messages.
    """
    messages = list(column(row, "prompt", source))
    if not messages or "content" not in messages[0]:
        raise DataError(f"{source}: `prompt` must be a list of messages with `content`, not {messages!r:.80}")
    return messages[0]["content"]


def unique(rows: list[Row], source: str) -> list[Row]:
    """The first row of each question, in order."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(question_of(row, source), row)
    return list(first.values())


def convert(index: int, row: Row, *, split: str, source: str) -> Row:
    """The row with verl's columns and a running index."""
    reward_model = column(row, "reward_model", source)
    return {
        "data_source": column(row, "data_source", source),
        "prompt": [{"role": "user", "content": question_of(row, source)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(column(reward_model, "ground_truth", source))},
        "extra_info": {"split": split, "index": index},
    }


def make(out: Path, train: str, val: str) -> None:
    """Write `train.parquet` and `test.parquet` below `out`.

    Raises:
        DataError: a source cannot be read or has other columns, or `out` cannot be written.
    """
    for split, source in (("train", train), ("test", val)):
        # AIME 2024 is published as one split, named train.
        rows = unique(load_rows(source, "train"), source)
        write_rows(rows, out / f"{split}.parquet", partial(convert, split=split, source=source))


def main(arguments: list[str] | None = None) -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for train.parquet and test.parquet")
    parser.add_argument("--train", default=TRAIN_NAME, help="local file or hub name (%(default)s)")
    parser.add_argument("--val", default=VAL_NAME, help="local file or hub name (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        make(options.out.expanduser(), options.train, options.val)
    except DataError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"DAPO-Math and AIME 2024 in {options.out}")


if __name__ == "__main__":
    main()
