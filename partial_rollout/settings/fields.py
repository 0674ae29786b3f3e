"""Keys that a dataclass of verl's does not have. verl refuses them when its first worker starts, long after Ray.

The dataclasses are read from verl's source, since their import brings torch.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from partial_rollout.settings.by_hand import verl_configs, verl_defaults
from partial_rollout.settings.derived import needs_critic

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from omegaconf import DictConfig

MADE_AT_THE_START = ("actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout")
"""Blocks of which every run makes verl's dataclasses; a critic's as well if it is used."""
TARGET = "_target_"
ROOT = "BaseConfig"
"""The class that verl's dataclasses begin with; it has no fields."""


@dataclass(frozen=True, slots=True)
class Unlisted:
    """A key of a block that becomes a dataclass, which verl's configuration files do not list."""

    key: str
    value: Any
    owner: str
    """The dataclass."""
    is_refused: bool
    """Whether the dataclass certainly has no such field; False: its fields cannot be read from here."""


def unlisted(config: DictConfig) -> Iterator[Unlisted]:
    """The keys that verl refuses, or may refuse, because its dataclasses do not have them."""
    defaults = verl_defaults(str(config.actor_rollout_ref.actor.strategy))
    listed = {key[:end] for key in defaults for end in (*_dots(key), len(key))}
    for block in (*MADE_AT_THE_START, *(["critic"] if needs_critic(config) else [])):
        content: Any = OmegaConf.to_container(OmegaConf.select(config, block))
        yield from _below(content, block, listed)


def _dots(key: str) -> list[int]:
    return [position for position, letter in enumerate(key) if letter == "."]


def _below(content: Mapping[str, Any], block: str, listed: Collection[str]) -> Iterator[Unlisted]:
    target = content.get(TARGET)
    for name, value in content.items():
        key = f"{block}.{name}"
        if isinstance(target, str) and key not in listed and not str(name).startswith("_"):
            fields = fields_of(target)
            if fields is None or name not in fields:
                yield Unlisted(key, value, target, is_refused=fields is not None)
                continue
        if isinstance(value, dict):
            yield from _below(value, key, listed)


@cache
def fields_of(target: str) -> frozenset[str] | None:
    """Names of the fields of a dataclass of verl's, those of its bases included; None: its source does not say them.

    >>> "temperature" in fields_of("verl.workers.config.RolloutConfig")
    True
    >>> fields_of("mine.Config")
    """
    module, _, name = target.rpartition(".")
    package, *parts = module.split(".")
    if package != "verl":
        return None
    place = verl_configs().parents[1].joinpath(*parts)
    return _fields(name, sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")])


def _fields(name: str, files: Collection[Path]) -> frozenset[str] | None:
    """Fields of the class `name`, which one of the files defines, or the file with its subclass imports."""
    for file in files:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if f"class {name}" not in text:
            continue
        tree = ast.parse(text)
        found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
        if found is not None:
            return _own_and_inherited(found, tree, files)
    return None


def _own_and_inherited(found: ast.ClassDef, tree: ast.Module, files: Collection[Path]) -> frozenset[str] | None:
    is_plain = any("dataclass" in ast.unparse(decorator) for decorator in found.decorator_list)
    if not is_plain or any(isinstance(node, ast.FunctionDef) and node.name == "__init__" for node in found.body):
        return None
    own = {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for base in found.bases:
        inherited = _of_base(base, tree, files)
        if inherited is None:
            return None
        own |= inherited
    return frozenset(own)


def _of_base(base: ast.expr, tree: ast.Module, files: Collection[Path]) -> frozenset[str] | None:
    if not isinstance(base, ast.Name):
        return None
    if base.id == ROOT:
        return frozenset()
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module)
    module = next((node.module for node in imports if base.id in [name.name for name in node.names]), None)
    return fields_of(f"{module}.{base.id}") if module else _fields(base.id, files)
