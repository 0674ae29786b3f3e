"""Length budgets of the style guide."""

from __future__ import annotations

import ast
from statistics import median

from tests.guards.source import PACKAGE, Source, parse, sources

MAX_FUNCTION_LINES = 60
MAX_MEDIAN_LINES = 10
MAX_FILE_LINES_CORE = 250
MAX_FILE_LINES = 400


def functions(source: Source) -> list[tuple[str, int]]:
    """(where, number of lines) of each function, decorators and docstring included."""
    return [
        (f"{source.name}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def over_budget(source: Source) -> list[str]:
    limit = MAX_FILE_LINES_CORE if source.room == "core" else MAX_FILE_LINES
    length = len(source.text.splitlines())
    found = [f"{source.name}: {length} lines, at most {limit}"] if length > limit else []
    return found + [
        f"{where}: {lines} lines, at most {MAX_FUNCTION_LINES}"
        for where, lines in functions(source)
        if lines > MAX_FUNCTION_LINES
    ]


def test_files_and_functions_are_short():
    assert [line for source in sources() for line in over_budget(source)] == []


def test_the_median_function_is_short():
    assert median(lines for source in sources() for _, lines in functions(source)) <= MAX_MEDIAN_LINES


def test_the_guard_sees_it():
    body = "    x = 1\n"
    assert len(over_budget(parse(PACKAGE / "core/x.py", "def f():\n" + body * MAX_FUNCTION_LINES))) == 1
    assert over_budget(parse(PACKAGE / "core/x.py", "def f():\n" + body * (MAX_FUNCTION_LINES - 1))) == []
    assert len(over_budget(parse(PACKAGE / "core/x.py", "x = 1\n" * (MAX_FILE_LINES_CORE + 1)))) == 1
    assert over_budget(parse(PACKAGE / "train/x.py", "x = 1\n" * MAX_FILE_LINES)) == []
    assert len(over_budget(parse(PACKAGE / "train/x.py", "x = 1\n" * (MAX_FILE_LINES + 1)))) == 1
