"""An error while training starts is told as it is, not as the death of what verl closes next."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.trainer.ppo.v1 import PPOTrainer

from partial_rollout.errors import DataError
from partial_rollout.integrations.verl_compat import TaskRunnerBase
from partial_rollout.runtime.run_watch import Interruption, RunWatch
from partial_rollout.train.task_runner import TaskRunner
from partial_rollout.train.trainer import SERVER_MODULE
from tests.run_watches import make_run_watch
from tests.unit.train.support import bare_trainer


@pytest.fixture
def watch() -> RunWatch:
    manager: Any = None
    return make_run_watch(manager, Interruption(1.0), 1.0, doing=lambda: "was starting", step=lambda: None)


def fails(*_: object) -> None:
    raise DataError("3 rows")


def test_the_end_begins_with_the_trainers_error(watch: RunWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPOTrainer, "init", fails)
    trainer = bare_trainer(watch=watch)
    with pytest.raises(DataError):
        trainer.init()
    assert watch._stopped.is_set()


def test_the_end_begins_with_an_error_of_the_agent_loops(watch: RunWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskRunnerBase, "init_agent_loop_manager", fails)
    runner: Any = object.__new__(getattr(TaskRunner, "__ray_actor_class__", TaskRunner))
    runner.trainer = type("Trainer", (), {"watch": watch})
    with pytest.raises(DataError):
        runner.init_agent_loop_manager()
    assert watch._stopped.is_set()


def test_a_start_without_an_error_is_watched_further(watch: RunWatch) -> None:
    with watch.stops_at_an_error():
        pass
    assert not watch._stopped.is_set()


def test_the_module_that_handles_of_engine_servers_need_is_theirs() -> None:
    spec = importlib.util.find_spec(SERVER_MODULE)  # not imported here: it brings vLLM along
    assert spec is not None
    assert spec.origin is not None
    assert "\nclass PartialRolloutServer(" in Path(spec.origin).read_text()
