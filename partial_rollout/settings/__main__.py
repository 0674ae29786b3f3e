"""`python -m partial_rollout.settings`: the block's keys as documents, made from their descriptions in `block`.

python -m partial_rollout.settings table      the table of docs/configuration.md
python -m partial_rollout.settings yaml       configs/partial_rollout/default.yaml
python -m partial_rollout.settings support    the table of docs/your-job.md: what is supported
python -m partial_rollout.settings summary    the short table of README.md: the same in few words
python -m partial_rollout.settings write      write all of them, below the present folder
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from partial_rollout.settings import matrix
from partial_rollout.settings.block import BLOCK, PartialRolloutConfig, field_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 120
YAML_PATH = Path("configs") / BLOCK / "default.yaml"
TABLE_PATH = Path("docs/configuration.md")
SUPPORT_PATH = Path("docs/your-job.md")
README_PATH = Path("README.md")
KEYS, SUPPORT, SUMMARY = "keys", "support", "summary"
"""Names of the tables: `<!-- NAME: begin -->` and `<!-- NAME: end -->` stand around each in its document."""


def yaml() -> str:
    """The defaults, with what each key means as a comment."""
    lines = ["# Made by `python -m partial_rollout.settings write` from partial_rollout/settings/block.py.", ""]
    return "\n".join([*lines, *_yaml_lines(PartialRolloutConfig, "")]).rstrip("\n") + "\n"


def _yaml_lines(model: type[BaseModel], indent: str) -> Iterator[str]:
    for name, item in model.model_fields.items():
        key, inner = item.alias or name, item.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            text = (inner.__doc__ or "").strip().partition("\n")[0]
            yield from ("", *_comment(text, indent), f"{indent}{key}:", *_yaml_lines(inner, f"{indent}  "))
        else:
            yield from (*_comment(item.description or "", indent), f"{indent}{key}: {_plain(item.default)}")


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def table() -> str:
    """A row for each key: its default, what it means, who needs it, and what speaks for it."""
    rows = [("key", "default", "meaning", "who needs it", "evidence"), ("---",) * 5]
    for key, item in field_keys().items():
        extra = item.json_schema_extra
        rows.append((f"`{key}`", f"`{_plain(item.default)}`", item.description, extra["who"], extra["evidence"]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def with_table(document: str, name: str = KEYS) -> str:
    """The document, with the table of that name between its marks as it should be.

    Raises:
        ValueError: the document has no marks.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in document or end not in document:
        raise ValueError(f"the document needs the lines {begin} and {end}, between which the table stands")
    made = {KEYS: table, SUPPORT: matrix.table, SUMMARY: matrix.summary}[name]()
    before, _, rest = document.partition(begin)
    return f"{before}{begin}\n\n{made}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    """Print or write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m partial_rollout.settings", description="Our keys as documents.")
    parser.add_argument("what", choices=("table", "yaml", "support", "summary", "write"), nargs="?", default="table")
    what = parser.parse_args().what
    if what != "write":
        print({"table": table, "yaml": yaml, "support": matrix.table, "summary": matrix.summary}[what](), end="")
        return
    YAML_PATH.write_text(yaml(), encoding="utf-8")
    for path, name in ((TABLE_PATH, KEYS), (SUPPORT_PATH, SUPPORT), (README_PATH, SUMMARY)):
        path.write_text(with_table(path.read_text(encoding="utf-8"), name), encoding="utf-8")


if __name__ == "__main__":
    main()
