"""Command lines of verl's example scripts: what doctor says is what the start does, and nothing changes in silence."""

from __future__ import annotations

import copy
from pathlib import Path
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
from scripts.real_commands import BEGIN, END, PAGE, commands, row, verdict
from tests.unit.settings.support import unlisted, values

if TYPE_CHECKING:
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:provider=hydra.searchpath:UserWarning")
@pytest.mark.parametrize("source", commands(Path()))
def test_doctor_and_start_agree_on_a_command_of_verls_examples(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("DATA", "FILE"):
        (tmp_path / name).touch()
    report, line = Report(), CommandLine.parse(commands(tmp_path)[source])
    try:
        config = compose_line(resolve(line))
        enable(config)
    except UserError as error:
        report.block(error)
    else:
        before, given = values(config), ByHand.read(line.overrides)
        started = copy.deepcopy(config)
        describe(report, config, line.overrides)
        if report.is_blocked:
            with pytest.raises(UserError):
                prepare(started, given)
        else:
            made = prepare(started, given).changes
            assert refused_by_verl(started) == ""
            assert unlisted(before, values(started), made) == []
            assert not [change for change in made if given.has(change.key)]
    page = PAGE.read_text(encoding="utf-8")
    assert row(source, verdict(report)) in page.splitlines(), "run `python -m scripts.real_commands --write`"


def test_the_page_has_one_row_for_each_command():
    shown = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].split("|---|---|")[1]
    assert len(shown.strip().splitlines()) == len(commands(Path())) >= 40
