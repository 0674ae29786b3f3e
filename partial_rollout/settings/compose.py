"""From a command line to the composed configuration, without an import of verl.

`python -m partial_rollout.main_ppo` takes any command line of `python -m verl.trainer.main_ppo`: verl's folder of
configurations and ours are both searched, and a configuration that does not name our block gets its defaults.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from partial_rollout.errors import ConfigError
from partial_rollout.settings.block import BLOCK
from partial_rollout.settings.by_hand import override_key, verl_configs
from partial_rollout.settings.mistyped import unknown_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omegaconf import DictConfig

PACKAGE = Path(__file__).resolve().parents[1]
OUR_CONFIGS = (PACKAGE / "configs").resolve()
DEFAULT_NAME = "partial_rollout"
ENTRY_POINTS = ("verl.trainer.main_ppo", "partial_rollout.main_ppo")
"""Modules whose command lines these are."""
WITH_VALUE = (("-c", "--cfg"), ("-p", "--package"), ("--experimental-rerun",))
"""Hydra's other options that take a word."""
WITHOUT_VALUE = (
    *("-h", "--help", "--hydra-help", "--version", "-r", "--run", "-m", "--multirun", "--resolve"),
    *("-sc", "--shell-completion", "-i", "--info"),
)
"""Hydra's options that stand alone; `--info` may be followed by a word."""
SEARCHPATH = "hydra.searchpath"
VERL_PACKAGE = "pkg://verl.trainer.config"
"""Hydra would import verl, and with it torch and Ray, to find this."""
VERL_CHECKOUT = "file://verl/trainer/config"
"""The folder of verl's configurations, as they name it from the root of verl's repository."""
SEARCHED = "Config search path:"
"""What Hydra's message says last; the folders are those of an installation."""
ADD_BLOCK = f"+{BLOCK}@{BLOCK}=default"


@dataclass(frozen=True)
class CommandLine:
    """What a training command asks of Hydra.

    >>> line = CommandLine.parse(["python3", "-m", "verl.trainer.main_ppo", "--config-name=x", "trainer.nnodes=2"])
    >>> line.config_name, line.overrides
    ('x', ('trainer.nnodes=2',))
    """

    config_path: str | None
    config_name: str | None
    config_dir: str | None
    """One more folder to search."""
    options: tuple[str, ...]
    """Hydra's other options."""
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, words: Sequence[str]) -> CommandLine:
        """From the words of a whole command (`python3 -m verl.trainer.main_ppo ...`), or of its arguments only.

        Raises:
            ConfigError: another program is started, or a word is neither an option of Hydra's nor an override.
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for names in (("-cp", "--config-path"), ("-cn", "--config-name"), ("-cd", "--config-dir"), *WITH_VALUE):
            parser.add_argument(*names)
        known, rest = parser.parse_known_args(_arguments(words))
        _check_words(rest)
        others = {names[-1]: getattr(known, names[-1].lstrip("-").replace("-", "_")) for names in WITH_VALUE}
        return cls(
            known.config_path,
            known.config_name,
            known.config_dir,
            (
                *(f"{name}={value}" for name, value in others.items() if value is not None),
                *(word for word in rest if word.startswith("-")),
            ),
            tuple(word for word in rest if not word.startswith("-")),
        )

    def arguments(self) -> list[str]:
        """Arguments for Hydra."""
        given = (("--config-path", self.config_path), ("--config-name", self.config_name))
        pairs = [f"{option}={value}" for option, value in (*given, ("--config-dir", self.config_dir)) if value]
        return [*pairs, *self.options, *self.overrides]


def _arguments(words: Sequence[str]) -> list[str]:
    """What follows the started program in a command."""
    if words and _is_command_in_quotes(words[0]):
        raise ConfigError(
            f"the command is one word of the shell's, {words[0]!r}: leave out the quotes around the command"
        )
    for position, word in enumerate(words):
        previous = words[position - 1] if position else ""
        if previous == "-m" and word in ENTRY_POINTS:
            return list(words[position + 1 :])
        if word.endswith("main_ppo.py"):
            return list(words[position + 1 :])
    if words and ("=" not in words[0] and not words[0].startswith("-")):
        raise ConfigError(
            f"{' '.join(words[:3])} ... does not start one of {', '.join(ENTRY_POINTS)}: give the command line that "
            "starts the training, or its overrides only"
        )
    return list(words)


def _is_command_in_quotes(word: str) -> bool:
    """Whether a word has several and begins with a program, or with variables before one.

    >>> [_is_command_in_quotes(word) for word in ("python3 -m verl.trainer.main_ppo a=1", "a.b='x y'", "a.b = 1")]
    [True, False, False]
    """
    first, *more = word.split() or [""]
    starts = "=" not in first and first[:1] not in ("-", "~") and not (more and more[0].startswith("="))
    return bool(more) and (starts or any(each in ENTRY_POINTS or each.endswith("main_ppo.py") for each in more))


def _check_words(words: Sequence[str]) -> None:
    """Refuse, by its name, each word that Hydra would refuse without naming it."""
    for position, word in enumerate(words):
        before = words[position - 1] if position else ""
        if word.startswith("-"):
            _check_option(word)
        elif not word.strip():
            raise ConfigError(
                "the command line has a word of spaces only: a backslash that continues a line must be its last "
                "character (or an unset variable stands in quotes)"
            )
        elif "=" not in word and not word.startswith("~") and before not in ("-i", "--info"):
            raise ConfigError(_without_equals(words, position))
        elif "=" in word or word.startswith("~"):
            _check_grammar(word)


def _check_option(word: str) -> None:
    name, equals, _ = word.partition("=")
    if name in WITHOUT_VALUE:
        return
    key = word.lstrip("-")
    what = f"write it without {word[: len(word) - len(key)]}: {key}" if equals else "an override is written key=value"
    raise ConfigError(f"{word} is not an option of Hydra's: {what}")


def _without_equals(words: Sequence[str], position: int) -> str:
    """What is wrong with a word in which `=` is missing, with the word that was perhaps meant."""
    word, after = words[position], [*words[position + 1 : position + 3], "", ""]
    meant = "key=value"
    if after[0].startswith("="):
        meant = f"{word}{after[0]}{after[1] if after[0] == '=' else ''}"
    elif position and words[position - 1].endswith("="):
        meant = f"{words[position - 1]}{word}"
    return f"{word} is not an override: write {meant}, as one word without spaces around ="


def _check_grammar(override: str) -> None:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException as error:
        value = override.partition("=")[2]
        if "~/" in value:
            home = override.replace("~/", "$HOME/")
            why = f"Hydra takes no ~ in a value, and the shell has not replaced it: write {home}"
        elif value.endswith(","):
            why = f"there is a comma at its end: write {override.rstrip(',')}"
        else:
            why = explain(error)
        raise ConfigError(f"{override} cannot be read: {why}") from error


def resolve(line: CommandLine) -> CommandLine:
    """The command line with absolute folders, from which Hydra composes without an import of verl.

    Raises:
        ConfigError: there is no such folder or configuration.
    """
    folder, name = _primary(line)
    primary = _load(folder / f"{name}.yaml")
    own = (primary.get("hydra") or {}).get("searchpath") or []
    places = [*_searchpath_of(line.overrides), *own]
    places = [_place(place) for place in places]
    for extra in (OUR_CONFIGS, verl_configs()):
        if extra != folder and f"file://{extra}" not in places:
            places.append(f"file://{extra}")
    overrides = [override for override in line.overrides if override_key(override) != SEARCHPATH]
    folders = [folder, *([Path(line.config_dir)] if line.config_dir else []), *_folders(places)]
    if not _names_block(name, folders):
        overrides.insert(0, ADD_BLOCK)
    overrides.append(f"{SEARCHPATH}=[{','.join(_quoted(place) for place in places)}]")
    return replace(line, config_path=str(folder), config_name=name, overrides=tuple(overrides))


def compose_line(line: CommandLine) -> DictConfig:
    """Compose what `resolve` returned.

    Raises:
        ConfigError: Hydra refuses it; mistyped keys are told with what was perhaps meant.
    """
    try:
        with initialize_config_dir(str(line.config_path), version_base=None):
            return compose(line.config_name, overrides=list(line.overrides))
    except HydraException as error:
        raise ConfigError(explain(error)) from error


def explain(error: Exception) -> str:
    """Hydra's error and its causes without the folders that it searched; of an unknown key, what was perhaps meant."""
    unknown = unknown_key(str(error), str(error.__cause__))
    if unknown is not None:
        return unknown
    lines, cause = [], error
    while cause is not None:
        text = str(cause).partition(SEARCHED)[0].strip()
        if text and text not in lines:
            lines.append(text)
        cause = cause.__cause__
    return "\n".join(lines)


def _primary(line: CommandLine) -> tuple[Path, str]:
    """Folder and name of the primary configuration; verl's is taken where ours has none of that name."""
    name = (line.config_name or DEFAULT_NAME).removesuffix(".yaml")
    verl, given = verl_configs(), line.config_path
    if given is None:
        candidates = [OUR_CONFIGS, verl]
    else:
        given = given.removeprefix("file://")
        # Hydra takes a relative path from the folder of the started module.
        candidates = [Path(given)] if os.path.isabs(given) else [PACKAGE / given, verl.parent / given]
        if line.config_name is None:
            name = "ppo_trainer"
    for folder in candidates:
        if (folder / f"{name}.yaml").exists():
            return folder.resolve(), name
    where = " or ".join(str(folder) for folder in candidates)
    raise ConfigError(f"there is no configuration {name}.yaml in {where} (--config-path, --config-name)")


def _load(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    return found if isinstance(found, dict) else {}


def _searchpath_of(overrides: Sequence[str]) -> list[str]:
    given = [override for override in overrides if override_key(override) == SEARCHPATH]
    if not given:
        return []
    value: Any = OverridesParser.create().parse_override(given[-1]).value()
    return [str(place) for place in value] if isinstance(value, list) else [str(value)]


def _place(place: str) -> str:
    in_checkout = place == VERL_CHECKOUT and not Path(place.removeprefix("file://")).is_dir()
    return f"file://{verl_configs()}" if place == VERL_PACKAGE or in_checkout else place


def _folders(places: Sequence[str]) -> Iterator[Path]:
    for place in places:
        if place.startswith("file://") or "://" not in place:
            yield Path(place.removeprefix("file://"))


def _names_block(name: str, folders: Sequence[Path]) -> bool:
    """Whether a configuration, or one that it starts from, has our block."""
    path = next((folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").exists()), None)
    if path is None:
        return False
    content = _load(path)
    if BLOCK in content:
        return True
    for item in content.get("defaults") or []:
        if isinstance(item, dict):
            if any(str(key).partition("@")[2] == BLOCK for key in item):
                return True
        elif item != "_self_" and _names_block(str(item).partition("@")[0].removeprefix("/"), folders):
            return True
    return False


def _quoted(text: str) -> str:
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"
