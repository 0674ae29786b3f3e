"""Command lines of verl's example scripts: what doctor says is what the start does, and nothing changes in silence."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import validate_config

from partial_rollout.doctor import Report, describe
from partial_rollout.errors import UserError
from partial_rollout.settings.by_hand import ByHand
from partial_rollout.settings.compose import CommandLine, compose_line, resolve
from partial_rollout.settings.flag import enable
from partial_rollout.settings.prepare import prepare
from scripts.real_commands import PAGE, commands, table, verdict, with_table
from tests.unit.settings.support import unlisted, values

if TYPE_CHECKING:
    from pathlib import Path

    from omegaconf import DictConfig


def refused_by_verl(config: DictConfig) -> str:
    """What verl's own check of a configuration, with which its start begins, says against it; empty if nothing.

    Without that of a critic, for which verl loads the files of the critic's model.
    """
    try:
        validate_config(copy.deepcopy(config), need_reference_policy(config), use_critic=False)
    except (AssertionError, ValueError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:provider=hydra.searchpath:UserWarning")
def test_doctor_and_start_agree_on_commands_of_verls_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    verdicts: list[tuple[str, str]] = []
    against: dict[str, str] = {}
    for source, words in commands(tmp_path).items():
        report, line = Report(), CommandLine.parse(words)
        try:
            config = compose_line(resolve(line))
            enable(config)
        except UserError as error:
            report.block(error)
            verdicts.append((source, verdict(report)))
            continue
        before, given = values(config), ByHand.read(line.overrides)
        started = copy.deepcopy(config)
        describe(report, config, line.overrides)
        verdicts.append((source, verdict(report)))
        if report.is_blocked:
            with pytest.raises(UserError):
                prepare(started, given)
        else:
            made = prepare(started, given).changes
            against[source] = refused_by_verl(started)
            assert unlisted(before, values(started), made) == [], source
            assert not [change for change in made if given.has(change.key)], source
    page = PAGE.read_text(encoding="utf-8")
    assert len(verdicts) >= 40
    assert not any(against.values()), against
    assert page == with_table(page, table(verdicts)), "run `python -m scripts.real_commands --write`"
