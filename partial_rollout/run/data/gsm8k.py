"""GSM8K in verl's format: `python -m partial_rollout.run.data.gsm8k --out DIR [--source PATH] [--tool]`.

With `--tool` the rows ask for verl's multi-turn agent and carry what `run/tools/gsm8k_tool.py` needs.
"""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path

from partial_rollout.errors import DataError
from partial_rollout.run.data.source import Row, column, load_rows, write_rows
from partial_rollout.run.tools.gsm8k_tool import TOOL_NAME

HUB_NAME = "openai/gsm8k"
DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
TOOL_SYSTEM_PROMPT = (
    "You are a math expert. Reason step by step. Before you settle on an answer, check it with the "
    f"`{TOOL_NAME}` tool, at least once. Put the final answer after `####`, for example `#### 42`."
)
FINAL_ANSWER = re.compile(r"####\s*(-?[\d.,]+)")


def final_answer(text: str) -> str:
    """The number after `####`, without thousands separators.

    Raises:
        DataError: the text has no such number.
    """
    found = FINAL_ANSWER.search(text)
    if found is None:
        raise DataError(f"a GSM8K answer has no '#### <number>': {text[-80:]!r}")
    return found.group(1).replace(",", "").rstrip(".")


def convert(index: int, row: Row, *, split: str, tool: bool, source: str = HUB_NAME) -> Row:
    """One row with verl's columns."""
    question, answer = column(row, "question", source), column(row, "answer", source)
    truth = final_answer(answer)
    messages = [{"role": "user", "content": f"{question} {INSTRUCTION}"}]
    extra = {"split": split, "index": index, "answer": answer, "question": question}
    converted = {
        "data_source": DATA_SOURCE,
        "prompt": messages,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
    }
    return _with_tool(converted, truth) if tool else converted


def _with_tool(row: Row, truth: str) -> Row:
    tools_kwargs = {TOOL_NAME: {"create_kwargs": {"ground_truth": truth}}}
    return {
        **row,
        "agent_name": "tool_agent",
        "prompt": [{"role": "system", "content": TOOL_SYSTEM_PROMPT}, *row["prompt"]],
        "extra_info": {**row["extra_info"], "need_tools_kwargs": True, "tools_kwargs": tools_kwargs},
    }


def make(out: Path, source: str, *, tool: bool) -> None:
    """Write `train.parquet` and `test.parquet` below `out`.

    Raises:
        DataError: `source` cannot be read or is not GSM8K, or `out` cannot be written.
    """
    for split in ("train", "test"):
        rows = load_rows(source, split, subset="main")
        write_rows(rows, out / f"{split}.parquet", partial(convert, split=split, tool=tool, source=source))


def main(arguments: list[str] | None = None) -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for train.parquet and test.parquet")
    parser.add_argument("--source", default=HUB_NAME, help="local copy or hub name (%(default)s)")
    parser.add_argument("--tool", action="store_true", help="rows for the multi-turn tool recipe")
    options = parser.parse_args(arguments)
    try:
        make(options.out.expanduser(), options.source, tool=options.tool)
    except DataError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"GSM8K in {options.out}")


if __name__ == "__main__":
    main()
