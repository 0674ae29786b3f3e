"""`python -m partial_rollout.doctor COMMAND...`: what partial rollout would do with a training command.

COMMAND is the whole command line that starts a training (`python3 -m verl.trainer.main_ppo data.train_files=... ...`),
or its overrides only. Nothing is started, and neither torch, Ray, vLLM nor verl is imported. The flag is taken as set.
Exit code 0: the run can start, as far as one can see from here; 1: something is in the way.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from partial_rollout.errors import ConfigError, Refusal, UserError
from partial_rollout.integrations import bytecode
from partial_rollout.integrations.verl_compat import check_versions
from partial_rollout.observability.pipe import reader_may_leave
from partial_rollout.settings.auto import CORRECTION_KEY, is_corrected, waiting_inside
from partial_rollout.settings.by_hand import ByHand
from partial_rollout.settings.command_line import FLAG, check_overrides
from partial_rollout.settings.compose import CommandLine, compose_line, explain, resolve
from partial_rollout.settings.derived import ignored_limit, read_settings
from partial_rollout.settings.drafts import seldom_drafts
from partial_rollout.settings.fields import unlisted
from partial_rollout.settings.flag import enable
from partial_rollout.settings.matrix import SEEN, SEEN_ON_CPU, TESTED, UNTRIED, rows_of
from partial_rollout.settings.memory import memory_in_words
from partial_rollout.settings.mistyped import added_by_mistake
from partial_rollout.settings.prepare import examine
from partial_rollout.settings.refused import check_counts
from partial_rollout.settings.retention import ANEW, step_to_go_on_from

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omegaconf import DictConfig

    from partial_rollout.settings.matrix import Row

WIDTH = 110
HEAD = 13
"""Columns before the text."""
UNCORRECTED = "no correction: tokens of older weights are trained as they are"


@dataclass
class Report:
    """What is printed: headings with texts, in order."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    """The whole message of each refusal."""

    @property
    def is_blocked(self) -> bool:
        """Whether something is in the way of a start."""
        return bool(self.blocked)

    def add(self, heading: str, text: str) -> None:
        """One entry."""
        self.lines.append((heading, text))

    def block(self, error: Exception) -> None:
        """Something that is in the way of a start."""
        self.blocked.append(" ".join(str(error).split()))
        if not isinstance(error, Refusal):
            self.add("blocked", self.blocked[-1])
            return
        self.add("blocked", error.given)
        for heading, text in (("because", error.because), ("instead", error.instead)):
            if text:
                self.add(heading, text)

    @property
    def result(self) -> str:
        """In one sentence."""
        if not self.blocked:
            return "the run can start, as far as one can see from here"
        reasons = "one reason" if len(self.blocked) == 1 else f"{len(self.blocked)} reasons"
        return f"the run would end before it starts anything, for {reasons}"

    def __str__(self) -> str:
        """Text for a terminal."""
        return "\n".join(
            "\n".join(
                textwrap.wrap(
                    text,
                    WIDTH,
                    initial_indent=heading.ljust(HEAD),
                    subsequent_indent=" " * HEAD,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
            for heading, text in (("result", self.result), *self.lines)
        )


def diagnose(words: Sequence[str]) -> Report:
    """Look at a command line."""
    report = Report()
    try:
        line = CommandLine.parse(words)
        check_overrides(line.overrides)
        check_versions()
        config = compose_line(resolve(line))
        if not enable(config) and ByHand.read(line.overrides).has(FLAG):
            report.add("look at", f"the command line turns {FLAG} off; this is what it would do with True")
        describe(report, config, line.overrides)
    except (UserError, OmegaConfBaseException) as error:
        report.block(error)
    except HydraException as error:
        report.block(ConfigError(explain(error)))
    except TypeError as error:
        report.block(ConfigError(f"a value has another type than its key takes (a number in quotes?): {error}"))
    return report


def describe(report: Report, config: DictConfig, overrides: Sequence[str]) -> None:
    """Add what can be said of a composed configuration, which is changed as a start would change it.

    Raises:
        ConfigError, OmegaConfBaseException: something cannot be read at all.
    """
    check_counts(config)
    rows = rows_of(config)
    examined = examine(config, ByHand.read(overrides))
    for refusal in examined.refusals:
        report.block(refusal)
    _add_rows(report, rows)
    for key, meant in added_by_mistake(overrides).items():
        report.add("look at", f"+{key} adds a key that verl does not list: did you mean {meant}?")
    for found in (found for found in unlisted(config) if not found.is_refused):
        report.add("look at", f"{found.key} is no key that verl lists, and whether {found.owner} takes it is not known")
    settings = read_settings(config)
    if settings.block.tail.policy != "wait" and not is_corrected(config):
        report.add("look at", f"{UNCORRECTED} ({CORRECTION_KEY})")
    for text in _surprises(config):
        report.add("look at", text)
    if text := bytecode.remark():
        report.add("look at", text)
    report.add("memory", memory_in_words(config, settings.num_slots))
    for choice in examined.choices:
        report.add("chosen", choice.what)
        for heading, text in (("seen", choice.seen), ("why", f"{choice.why} ({choice.page})")):
            report.add(f"  {heading}", text)
    for proposal in examined.proposals:
        report.add("faster with", proposal.what)
        for heading, text in (("why", proposal.why), ("takes", f"{proposal.price} ({proposal.page})")):
            report.add(f"  {heading}", text)
    chosen = {choice.key for choice in examined.choices}
    for change in (change for change in examined.changes if change.key not in chosen):
        report.add("changed" if change.before is not None else "added", str(change))


def _surprises(config: DictConfig) -> Iterator[str]:
    """What the run does in another way than one may expect of what was set."""
    if waiting := waiting_inside(config):
        yield waiting
    step = step_to_go_on_from(config)
    if step is not None:
        folder = config.trainer.default_local_dir
        yield f"{folder} has a checkpoint of step {step}: the run goes on from it; a new run needs {ANEW}"
    for remark_on in (ignored_limit, seldom_drafts):
        with contextlib.suppress(ConfigError):  # told as a refusal
            if remark := remark_on(config):
                yield remark


def _add_rows(report: Report, rows: Sequence[Row]) -> None:
    """What the job uses, by what is known of it; what is refused has an entry of its own."""
    heading = "used" if report.is_blocked else "works"
    for state in (TESTED, SEEN, SEEN_ON_CPU):
        found = [f"{row.part}: {row.what}{f' ({row.also})' if row.also else ''}" for row in rows if row.state == state]
        if found:
            report.add(heading, f"{state}: {'; '.join(found)}")
    for row in rows:
        if row.state == UNTRIED:
            report.add(UNTRIED, f"{row.what}: {row.where}{'; ' + row.also if row.also else ''}")


def main(words: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit code."""
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    report = diagnose(words)
    with reader_may_leave():
        print(report)
    return int(report.is_blocked)


if __name__ == "__main__":
    sys.exit(main())
