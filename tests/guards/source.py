"""What the guards read: our files as syntax trees."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "partial_rollout"
OWN = "partial_rollout"


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Path from the repository root, for messages."""
        return str(self.path.relative_to(ROOT))

    @property
    def module(self) -> str:
        """Dotted name."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """Folder below the package (`core`, `rollout`, ...) or the file's own name at its top level."""
        return self.path.relative_to(PACKAGE).parts[0].removesuffix(".py")

    def imports(self) -> Iterator[tuple[str, int]]:
        """Every imported module with its line, inside functions too; not what is imported for types only."""
        yield from _imports(self.tree, self.module.split("."), is_package=self.path.name == "__init__.py")


@cache
def sources(folder: Path = PACKAGE) -> tuple[Source, ...]:
    """All Python files below `folder`."""
    return tuple(parse(path) for path in sorted(folder.rglob("*.py")))


def parse(path: Path, text: str | None = None) -> Source:
    """Read one file, or take `text` as its content."""
    text = path.read_text(encoding="utf-8") if text is None else text
    return Source(path, text, ast.parse(text, filename=str(path)))


def _imports(node: ast.AST, module: list[str], *, is_package: bool) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = module[: len(module) - child.level + is_package] if child.level else []
            prefix = ".".join([*base, *([child.module] if child.module else [])])
            yield from ((f"{prefix}.{alias.name}", child.lineno) for alias in child.names)
        else:
            yield from _imports(child, module, is_package=is_package)
