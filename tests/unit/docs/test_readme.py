"""The README stays short, and what it says twice it says in the same words."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES, MOST_WORDS = 200, 1200
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)")


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES
    assert len(README.split()) <= MOST_WORDS


def anchors(page: Path) -> set[str]:
    """Anchors as GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_of_the_readme_lead_somewhere() -> None:
    links = LINK.findall(README)
    assert len(links) > 10
    for name, anchor in links:
        assert (ROOT / name).exists(), name
        assert not anchor or anchor in anchors(ROOT / name), f"{name}#{anchor}"


def test_the_readme_says_how_long_the_second_command_takes() -> None:
    """The number is the one that `make test` itself says at its start."""
    announced = re.search(r"make test:.*about (\d+) minutes", (ROOT / "Makefile").read_text(encoding="utf-8"))
    pages = [README, (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")]
    said = [re.search(r"(?:no GPU:|takes) about (\d+) minutes on 2 quiet cores", page) for page in pages]
    numbers = {found.group(1) for found in said if found}
    assert all(said)
    assert announced is not None
    assert numbers == {announced.group(1)}


def test_the_exact_change_is_the_same_in_readme_and_documents() -> None:
    fence = re.compile(r"```diff\n.*?```", flags=re.DOTALL)
    [in_readme] = fence.findall(README)
    [in_documents] = fence.findall((ROOT / "docs/your-job.md").read_text(encoding="utf-8"))
    assert in_readme == in_documents
