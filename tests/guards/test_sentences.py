"""A docstring or comment begins with its noun, not with a pronoun or genitive whose noun is somewhere else."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import TYPE_CHECKING

import pytest

from tests.guards.source import PACKAGE, ROOT, Source, parse, sources

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDERS = ("partial_rollout", "benchmarks", "scripts", "tests")
WITHOUT_NOUN = re.compile(
    r"""(?: Of | Its? | Whose | Those | These | Theirs? | They | Them | Both | That | None | Also | And | Or | But
    | As | There\ (?:is|are) | The\ same | Same\ (?:as|for) | So\ many
    | Each\ (?:of\ (?:them|these|those)|after|with)
    | (?:With|By|In|From|For|On|At|To|Where|What|Who|How|When|Which|Why)\ 
      (?:its?|they|them|their|those|these|that|both|which)
    )\b""",
    re.VERBOSE,
)


def docstrings(source: Source) -> Iterator[tuple[int, str]]:
    """Texts that stand alone as a statement: of modules, classes and functions, and those below a field or constant."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: Source) -> Iterator[tuple[int, str]]:
    """Comments, without the lines that go on with the sentence of the line before."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            is_alone = token.line.lstrip().startswith("#")
            if not (is_alone and token.start[0] == last + 1):
                yield token.start[0], token.string.lstrip("#")
            last = token.start[0] if is_alone else last


def beginnings_without_noun(source: Source) -> list[str]:
    """Where a text begins with such a word, with the beginning."""
    texts = [(line, text.strip()) for line, text in sorted([*docstrings(source), *comments(source)])]
    found = [(line, text) for line, text in texts if WITHOUT_NOUN.match(text)]
    return [f"{source.name}:{line}: {text[:60]!r} begins without its noun" for line, text in found]


def test_texts_begin_with_their_noun():
    files = (source for folder in FOLDERS for source in sources(ROOT / folder))
    assert [line for source in files for line in beginnings_without_noun(source)] == []


@pytest.mark.parametrize(
    "text",
    [
        '"""Of its log."""',
        'NUM_BYTES = 5\n"""Of a file."""',
        'class A:\n    """Its calls end when the test says so."""',
        'class A:\n    pid: int\n    """Whose process it is."""',
        'def f():\n    """None: nobody knows."""',
        'def f():\n    """Where it runs."""',
        "x = 1\n# It may have ended.\n",
        "x = 1  # Both ends.\n",
        'def f():\n    """As the queue has them."""',
        "x = 1\n# There is no other reader.\n",
    ],
)
def test_the_guard_sees_it(text: str):
    assert len(beginnings_without_noun(parse(PACKAGE / "core/x.py", text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        '"""Offsets of the frames."""',
        'def f():\n    """Where the process runs."""',
        "# The reason begins here\n# and its second line goes on.\n",
        'x = "Of a text that is no docstring"',
    ],
)
def test_the_guard_lets_nouns_pass(text: str):
    assert beginnings_without_noun(parse(PACKAGE / "core/x.py", text)) == []
