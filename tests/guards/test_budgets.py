"""Functions fit on a screen, and the study stays small beside the package."""

from __future__ import annotations

import ast

from tests.guards.source import PACKAGE, Source, parse, sources

MAX_FUNCTION_LINES = 60
MAX_BENCHMARK_LINES = 2500
"""A script whose question is answered goes, and benchmarks/results/README.md says which commit has it."""


def long_functions(source: Source) -> list[str]:
    """Functions over the cap, decorators and docstring included."""
    functions = [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    return [
        f"{source.name}:{node.lineno} {node.name}: {lines} lines, at most {MAX_FUNCTION_LINES}"
        for node, lines in lengths.items()
        if lines > MAX_FUNCTION_LINES
    ]


def test_functions_are_short():
    assert [line for source in sources() for line in long_functions(source)] == []


def test_the_guard_sees_it():
    body = "    x = 1\n"
    assert len(long_functions(parse(PACKAGE / "core/x.py", "def f():\n" + body * MAX_FUNCTION_LINES))) == 1
    assert long_functions(parse(PACKAGE / "core/x.py", "def f():\n" + body * (MAX_FUNCTION_LINES - 1))) == []


def test_the_study_is_small():
    lines = {path.name: len(path.read_text().splitlines()) for path in PACKAGE.parent.glob("benchmarks/**/*.py")}
    assert "jobs.py" in lines
    assert sum(lines.values()) <= MAX_BENCHMARK_LINES, lines
