"""Writes docs/real-commands.md: what `doctor` says of command lines of verl's example scripts.

    python -m scripts.real_commands [--write]

The command lines are in tests/fixtures/verl_commands.txt: overrides as the scripts give them to verl, without names of
projects and loggers. DATA stands for a data file that is there, FILE for another file.
"""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from partial_rollout.doctor import SEEN_ON_CPU, UNTRIED, diagnose

if TYPE_CHECKING:
    from collections.abc import Iterable

    from partial_rollout.doctor import Report

ROOT = Path(__file__).resolve().parents[1]
FIXTURE = ROOT / "tests" / "fixtures" / "verl_commands.txt"
PAGE = ROOT / "docs" / "real-commands.md"
UNKNOWN_TO_VERL = (
    "actor_rollout_ref.actor.megatron.grad_offload",
    "critic.model.fsdp_config.param_offload",
    "critic.model.fsdp_config.optimizer_offload",
)
"""Keys of scripts for other versions of verl, which 0.9.1 refuses by itself. A command that has one is read again
without it, so that the page says something of the rest of the command."""
WORKS = "works"
BEGIN, END = "<!-- commands: begin -->", "<!-- commands: end -->"


def commands(folder: Path) -> dict[str, list[str]]:
    """The words of each command by the name of its script; `folder` has the files DATA and FILE."""
    data, other = folder / "DATA", folder / "FILE"
    found: dict[str, list[str]] = {}
    source = ""
    for line in FIXTURE.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            source = line.removeprefix("# ")
            found[source] = []
        else:
            found[source] += shlex.split(line.replace("=DATA", f"={data}").replace("=FILE", f"={other}"))
    for source, words in list(found.items()):
        known = [word for word in words if word.lstrip("+").partition("=")[0] not in UNKNOWN_TO_VERL]
        if known != words:
            found[f"{source}, without keys that verl 0.9.1 does not know"] = known
    return found


def verdict(report: Report) -> str:
    """In one cell of a table."""
    if report.blocked:
        return "blocked: " + "<br>".join(report.blocked)
    untried = [text.partition(":")[0] for heading, text in report.lines if heading == UNTRIED]
    if untried:
        return f"can start; not tried: {'; '.join(untried)}"
    on_cpu = [text.partition(": ")[2] for heading, text in report.lines if text.startswith(f"{SEEN_ON_CPU}: ")]
    return f"{WORKS}; of it seen on a CPU only: {'; '.join(on_cpu)}" if on_cpu else WORKS


def row(source: str, said: str) -> str:
    """A row of the table, as Markdown."""
    place, _, script = source.partition(" ")
    name = place.partition("@")[0].partition("/")[2]
    return f"| {name}: {script} | {said.replace('|', '/')} |"


def table(verdicts: Iterable[tuple[str, str]]) -> str:
    """A Markdown table of what doctor says of each script."""
    lines = ["| script | what doctor says |", "|---|---|", *(row(source, said) for source, said in verdicts)]
    return "\n".join(lines) + "\n"


def with_table(page: str, made: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write it into the page")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # relative paths of the scripts are nowhere
        for name in ("DATA", "FILE"):
            Path(folder, name).touch()
        os.environ.pop("HF_HUB_OFFLINE", None)
        made = table((source, verdict(diagnose(words))) for source, words in commands(Path(folder)).items())
    if write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    else:
        print(made, end="")


if __name__ == "__main__":
    main()
