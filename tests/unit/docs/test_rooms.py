"""The table of docs/design/0008 says how large the project is, and the stranger's answers say what other pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from partial_rollout.settings.block import field_keys
from tests.guards.test_budgets import MAX_BENCHMARK_LINES
from tests.unit.docs.test_readme import MOST_WORDS
from tests.unit.settings.test_changelog import GONE, KEYS, OLD

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/design/0008-rooms.md").read_text(encoding="utf-8")
WITHIN = 0.1
"""Lines come and go; the table is for their order of magnitude."""


def after(row: str) -> str:
    """The last cell of a row."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
    return line.split("|")[3].strip()


def numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


def count_lines(pattern: str) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in ROOT.glob(pattern))


@pytest.mark.parametrize(
    ("row", "pattern"),
    [
        ("lines of the package", "partial_rollout/**/*.py"),
        ("lines of the tests", "tests/**/*.py"),
        ("lines of stored results (JSON)", "benchmarks/results/**/*.json"),
    ],
)
def test_lines_are_about_what_the_table_says(row: str, pattern: str) -> None:
    assert numbers(after(row))[0] == pytest.approx(count_lines(pattern), rel=WITHIN)


def test_limits_are_those_of_the_tests() -> None:
    assert numbers(after("lines of the benchmarks"))[0] == MAX_BENCHMARK_LINES
    assert numbers(after("words of the README"))[0] == MOST_WORDS


def test_keys_are_counted_rightly() -> None:
    deadlines = {key for key in KEYS - OLD if key.startswith("timeouts.")}
    found = [len(field_keys()), len(GONE), len(OLD), len(KEYS - OLD), len(deadlines)]
    assert numbers(after("keys of the configuration")) == found


def test_compared_lines_are_about_as_many_as_the_table_says() -> None:
    documents = yaml.safe_load((ROOT / "docs/numbers.yaml").read_text(encoding="utf-8"))
    lines = sum(len(document["lines"]) for document in documents)
    row = "lines with numbers in documents that a test compares with a stored file"
    assert numbers(after(row))[0] == pytest.approx(lines, rel=WITHIN)


def test_the_settings_for_eight_gpus_are_those_of_the_page_that_has_them() -> None:
    settings = re.findall(r"`?((?:\w+\.)*\w+=[\w.]+)", after("Settings for 8 GPUs, Qwen3-8B and memory to spare?"))
    page = (ROOT / "docs/your-job.md").read_text(encoding="utf-8")
    assert len(settings) == 4
    assert [each for each in settings if f"{each}\n" not in page] == []
