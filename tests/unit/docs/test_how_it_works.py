"""Every `file:function` that the documents name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = (ROOT / "docs").rglob("*.md")
PLACE = re.compile(r"`([\w/.-]+\.py):([\w.]+)`")
FILE = re.compile(r"`([a-z_]+/[\w/.-]+\.(?:py|yaml|sh|json|md|txt))`")
ELSEWHERE = ("global_step_N/", "outputs/")
"""Folders of a run."""
OLD_PAGES = ("results",)
"""Pages that name scripts of earlier commits."""


def names(text: str) -> set[str]:
    """Functions and classes of a file, with the class before a method."""
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def places() -> list[tuple[str, str]]:
    return sorted({place for page in PAGES for place in PLACE.findall(page.read_text(encoding="utf-8"))})


@pytest.mark.parametrize(("file", "name"), places())
def test_a_place_in_the_code_exists(file, name):
    path = ROOT / "partial_rollout" / file
    assert path.exists(), file
    assert name in names(path.read_text(encoding="utf-8")), f"{file} has no {name}"


def test_a_weight_tensor_stays_in_one_room():
    text = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    walks = dict(re.findall(r"^## (A prompt|An interrupted request|A weight tensor)\n(.*?)(?=^## )", text, re.M | re.S))
    assert len(walks) == 3
    assert {file.split("/")[0] for file, _ in PLACE.findall(walks["A weight tensor"])} == {"weights"}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    if page.parent.name in OLD_PAGES:
        return
    for name in FILE.findall(page.read_text(encoding="utf-8")):
        if name.startswith(ELSEWHERE):
            continue
        assert (ROOT / name).exists() or (ROOT / "partial_rollout" / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize(("walk", "most"), [("A prompt", 13), ("An interrupted request", 10), ("A weight tensor", 14)])
def test_a_walk_stays_short(walk, most):
    """A hop is a file; who adds one thinks about where the code belongs."""
    text = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    [found] = re.findall(rf"^## {walk}\n(.*?)(?=^## )", text, re.M | re.S)
    assert len({file for file, _ in PLACE.findall(found)}) <= most
