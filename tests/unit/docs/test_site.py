"""The site builds without a warning and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?(https?:)?//|<link\b[^>]*\bhref=["']?(https?:)?//"""
)
IMPORTED = re.compile(r"""@import\s+(?:url\()?["']?https?:|url\(["']?https?:""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; mkdocs is a tool for developers, so the quickstart's environment may lack it."""
    pytest.importorskip("material", reason="needs mkdocs-material of requirements/dev.txt")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_in_the_site(site: Path) -> None:
    built = {path.relative_to(site).with_suffix(".md") for path in site.rglob("*.html")}
    assert {path.relative_to(ROOT / "docs") for path in PAGES} <= built


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_stand_in_fences(page: Path) -> None:
    """Behind a list an indented block would be text of the list's last point."""
    outside = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"\n\n {4}.*", outside)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not LOADED.search(text), f"{page.name}: {LOADED.search(text)}"
        assert 'class="mermaid"' not in text, f"{page.name}: the theme would load mermaid from a CDN"
        assert "fonts.g" not in text, page.name
    for sheet in site.rglob("*.css"):
        assert not IMPORTED.search(sheet.read_text(encoding="utf-8")), sheet.name


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://unpkg.com/x.js">',
        '<link rel="stylesheet" href="https://fonts.googleapis.com/css">',
        "<img alt=a src=//example.org/a.png>",
    ],
)
def test_what_a_page_must_not_load_is_found(text: str) -> None:
    assert LOADED.search(text)
    assert not LOADED.search('<a href="https://github.com/verl-project/verl">')
