"""Signals at the end of a run break nothing off: they may come between any two lines."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

from verl.trainer.ppo.v1 import PPOTrainer

from partial_rollout.errors import ActorLost, DataError
from partial_rollout.integrations.verl_compat import TaskRunnerBase
from partial_rollout.runtime import run_watch
from partial_rollout.runtime.processes import TRAINING_RANK
from partial_rollout.runtime.run_watch import Interruption, RunWatch
from partial_rollout.train import task_runner
from partial_rollout.train import trainer as trainer_module
from partial_rollout.train.task_runner import TaskRunner
from partial_rollout.train.trainer import PartialRolloutTrainer
from partial_rollout.types import Death, Process
from tests.run_watches import make_run_watch
from tests.unit.train.support import bare_trainer, noted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STOP_S = 40.0
LOST = ActorLost("an engine died")


def lose(interruption: Interruption) -> None:
    """An error is raised in the main thread, once, as by the thread of a watch."""
    interruption._error = LOST
    signal.raise_signal(run_watch.SIGNAL)


@pytest.fixture
def interruption() -> Iterator[Interruption]:
    made = Interruption(STOP_S, force=lambda: None)
    yield made
    made.ended()


@pytest.fixture
def trainer(interruption: Interruption, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer that is ready to train; `log` has what its end does."""
    manager: Any = None
    log: list[str] = []
    watch = make_run_watch(manager, interruption, STOP_S)
    monkeypatch.setattr(run_watch, "EXPLAIN_S", 0.0)
    monkeypatch.setattr(PartialRolloutTrainer, "_prepare", noted(log, "prepare"))
    monkeypatch.setattr(PartialRolloutTrainer, "_save_last_checkpoint", noted(log, "save"))
    monkeypatch.setattr(trainer_module, "shutdown_run", noted(log, "shut down"))
    return bare_trainer(watch=watch, log=log, _ray_metrics=SimpleNamespace(close=noted(log, "end metrics")))


def test_a_death_that_is_told_when_its_error_has_ended_the_training_leaves_the_last_checkpoint_alone(
    trainer: Any, interruption: Interruption, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray tells the trainer and the watch of a death at about the same time."""

    def train(*_: object) -> None:
        raise DataError("what Ray has told of the death")

    bound_end = RunWatch.bound_end

    def told_now(watch: RunWatch, error: BaseException) -> None:
        lose(interruption)
        bound_end(watch, error)

    monkeypatch.setattr(PPOTrainer, "fit", train)
    monkeypatch.setattr(RunWatch, "bound_end", told_now)
    with pytest.raises(DataError):
        trainer.fit(None)
    assert trainer.log == ["prepare", "save", "end metrics", "shut down"]


def test_a_death_after_the_last_step_does_not_make_a_complete_run_a_failed_one(
    trainer: Any, interruption: Interruption, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    def end(*, is_complete: bool, timeout_s: float) -> None:
        lose(interruption)
        ended.append(is_complete)

    monkeypatch.setattr(PPOTrainer, "fit", lambda *_: None)
    trainer._log = SimpleNamespace(end=end)
    trainer.fit(None)
    trainer.watch._end(
        Death(Process("training rank", "actor-0"), "killed")
    )  # ended by force, it would be trained again
    assert ended == [True]
    assert trainer.log == ["prepare", "end metrics", "shut down"]
    assert not trainer.watch.has_lost(TRAINING_RANK)


def test_an_error_before_the_first_step_ends_the_run_as_any_other(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl closes TransferQueue next, whose death would be told in place of the error if nobody shut the run down."""

    def fail(*_: object) -> None:
        raise DataError("no log")

    monkeypatch.setattr(PartialRolloutTrainer, "_prepare", fail)
    with pytest.raises(DataError):
        trainer.fit(None)
    assert trainer.log == ["save", "end metrics", "shut down"]


def test_a_start_that_was_given_up_is_shut_down_although_its_error_is_told_at_the_end_of_its_watch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The thread that kills a start's processes tells of it next, and the main thread waits for that thread."""
    made: list[Interruption] = []

    def make(end_s: float) -> Interruption:
        made.append(Interruption(end_s))
        return made[-1]

    def run(runner: Any, config: object) -> None:
        runner.trainer = SimpleNamespace(watch=SimpleNamespace(ended=noted(log, "ended")))
        raise DataError("what a killed process has left")

    log: list[str] = []
    for name in ("configure_logging", "require_own_transfer_queue", "require_resources", "tell"):
        monkeypatch.setattr(task_runner, name, lambda *_, **__: None)
    monkeypatch.setattr("partial_rollout.rollout.replica.register_replicas", lambda **_: None)
    monkeypatch.setattr(task_runner, "require_equal_nodes", lambda *_: set())
    monkeypatch.setattr(task_runner, "choose_on_cluster", lambda _: ())
    monkeypatch.setattr(task_runner, "is_enabled", lambda _: True)
    monkeypatch.setattr(task_runner, "Interruption", make)
    monkeypatch.setattr(task_runner.StartWatch, "begin", lambda _: None)
    monkeypatch.setattr(task_runner.StartWatch, "end", lambda _: lose(made[0]))
    monkeypatch.setattr(TaskRunnerBase, "run", run)
    monkeypatch.setattr("partial_rollout.train.shutdown.shutdown_run", noted(log, "shut down"))
    config = OmegaConf.create({
        "partial_rollout": {"events": str(tmp_path)}, "trainer": {"default_local_dir": str(tmp_path)},
    })  # fmt: skip
    runner: Any = object.__new__(getattr(TaskRunner, "__ray_actor_class__", TaskRunner))
    with pytest.raises(DataError):
        runner.run(config)
    assert log == ["shut down", "ended"]
