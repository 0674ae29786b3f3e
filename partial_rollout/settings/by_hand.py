"""Which keys the user set, on the command line or in a file of his own.

a key on the command line           known from Hydra's overrides: a default that somebody typed is a wish
a value that is not verl's default  from a configuration file; one that equals the default cannot be told from it
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from partial_rollout.errors import VersionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from omegaconf import DictConfig

ON_COMMAND_LINE = "on the command line"
IN_FILE = "in a configuration file"
GENERATED = {
    "megatron": "_generated_ppo_megatron_trainer.yaml",
    "torchtitan": "_generated_ppo_torchtitan_trainer.yaml",
    "veomni": "_generated_ppo_veomni_trainer.yaml",
}
"""verl's own flat copies of its defaults, by the actor's strategy."""
GENERATED_FSDP = "_generated_ppo_trainer.yaml"


def verl_configs() -> Path:
    """The folder of verl's configuration files, found without importing verl.

    Raises:
        VersionError: verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise VersionError("verl is not installed in this environment; install it with: pip install -e '.[gpu]'")
    return Path(places[0]) / "trainer" / "config"


@cache
def verl_defaults(strategy: str = "fsdp") -> Mapping[str, Any]:
    """verl's default of every key, dotted, interpolations unresolved, for an actor of this strategy."""
    path = verl_configs() / GENERATED.get(strategy, GENERATED_FSDP)
    if not path.exists():
        raise VersionError(f"{path} is missing: another verl is installed than the one REQUIRED_VERL.txt names")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # twelve times as fast, where it was built
    return dict(leaves(yaml.load(path.read_text(encoding="utf-8"), Loader=loader)))


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value below a plain mapping, by its dotted key; an empty mapping is a value.

    >>> dict(leaves({"a": {"b": 1, "c": {}}}))
    {'a.b': 1, 'a.c': {}}
    """
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def override_key(override: str) -> str:
    """The dotted key that a Hydra override names; the name of a configuration group keeps its `/` or `@`.

    >>> override_key("+trainer.nnodes=2"), override_key("~critic.optim"), override_key("+actor@a.b=mine")
    ('trainer.nnodes', 'critic.optim', 'actor@a.b')
    """
    return override.lstrip("+~").partition("=")[0]


def _chooses_file(override: str) -> bool:
    """Whether an override names a Hydra group: a block's name without a dot, with a file's name instead of its keys.

    >>> [_chooses_file(each) for each in ("algorithm=mine", "model/a@b.c=d", "+data={seed: 1}", "~data", "a.b=mine")]
    [True, True, False, False, False]
    """
    name, value = override_key(override), override.partition("=")[2].strip()
    return "@" in name or "/" in name or ("." not in name and value != "" and not value.startswith("{"))


def _keys(override: str) -> list[str]:
    """The keys that an override sets: Hydra merges a block into the one that is there, so only those that it names.

    >>> _keys("+data={seed: 1, more: {a: 2}}"), _keys("a.b={}"), _keys("a.b=null")
    (['data.seed', 'data.more.a'], ['a.b'], ['a.b'])
    """
    key, value = override_key(override), override.partition("=")[2].strip()
    block: Any = OverridesParser.create().parse_override(override).value() if value.startswith("{") else None
    names = [name for name, _ in leaves(block)] if isinstance(block, dict) else []
    return [f"{key}.{name}" for name in names] or [key]


@dataclass(frozen=True, slots=True)
class ByHand:
    """The keys of Hydra's overrides.

    >>> given = ByHand.read(["algorithm.rollout_correction.rollout_is=null", "~trainer.logger", "+data={seed: 1}"])
    >>> given.has("algorithm.rollout_correction.rollout_is"), given.has("algorithm.rollout_correction.rollout_rs")
    (True, False)
    >>> given.has("trainer.logger"), given.has("data.seed"), given.has("data.shuffle")
    (True, True, False)
    """

    keys: frozenset[str] = frozenset()

    @classmethod
    def read(cls, overrides: Iterable[str]) -> ByHand:
        """From overrides as they were typed. The choice of a file for a group sets no key by hand."""
        typed = [override for override in overrides if not _chooses_file(override)]
        return cls(frozenset(key for override in typed for key in _keys(override)))

    def has(self, key: str) -> bool:
        """Whether the key was set, or removed, by itself or with a block around it."""
        parts = key.split(".")
        return any(".".join(parts[: number + 1]) in self.keys for number in range(len(parts)))

    def where(self, config: DictConfig, key: str) -> str | None:
        """Where the user set the key of this configuration: `ON_COMMAND_LINE`, `IN_FILE`, or None if he did not."""
        if self.has(key) or any(name.startswith(f"{key}.") for name in self.keys):
            return ON_COMMAND_LINE
        strategy = OmegaConf.select(config, "actor_rollout_ref.actor.strategy", default="fsdp")
        return IN_FILE if _plain(config, key) != _below(verl_defaults(strategy), key) else None


def _plain(config: DictConfig, key: str) -> Any:
    """The value of a key with its interpolations unresolved, a mapping as its leaves; None if there is none."""
    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if not OmegaConf.is_dict(node):
        return None
    container: Any = OmegaConf.to_container(node)
    value = container.get(last)
    return dict(leaves(value)) if isinstance(value, dict) else value


def _below(defaults: Mapping[str, Any], key: str) -> Any:
    if key in defaults:
        return defaults[key]
    found = {name.removeprefix(f"{key}."): value for name, value in defaults.items() if name.startswith(f"{key}.")}
    return found or None
