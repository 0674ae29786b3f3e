"""When the trainer of engines on devices of their own interrupts them, admits prompts and sends weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from partial_rollout.train.separate import SeparateTrainer
from partial_rollout.train.trainer import PartialRolloutTrainer
from tests.unit.train.support import bare_trainer, noted


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def trainer(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """In step 1 of 2, with its parts replaced by a log of what is called."""

    for name in ("_begin_round", "_interrupt", "_tune"):
        monkeypatch.setattr(SeparateTrainer, name, noted(log, name.removeprefix("_")))
    for name in ("_resume", "_save_checkpoint", "_save_last_checkpoint"):
        monkeypatch.setattr(PartialRolloutTrainer, name, noted(log, name.removeprefix("_")))

    def on_step_end(self: Any) -> None:
        log.append("send")
        self._resume()

    monkeypatch.setattr(PartialRolloutTrainer, "on_step_end", on_step_end)
    return bare_trainer(
        SeparateTrainer,
        _phase=SimpleNamespace(begin=lambda *_: None),
        depth_tuner=SimpleNamespace(begin_wait=noted(log, "begin_wait")),
        global_steps=1,
        total_training_steps=2,
        curr_step_profile=False,
    )


def step(trainer: Any, *, saves: bool = False) -> None:
    trainer.prepare_step()
    trainer.on_sample_end()
    if saves:
        trainer._save_checkpoint()
    trainer.on_step_end()
    trainer.global_steps += 1


def test_a_round_begins_when_the_batch_is_taken_and_engines_are_interrupted_for_the_weights_only(
    trainer: Any, log: list[str]
) -> None:
    step(trainer)
    assert log == ["begin_wait", "begin_round", "tune", "begin_round", "interrupt", "send", "resume"]
    log.clear()
    step(trainer)  # the last one: nobody would train what is admitted now
    assert log == ["begin_wait", "tune", "interrupt", "send", "resume"]


def test_a_checkpoint_interrupts_and_nothing_is_interrupted_twice(trainer: Any, log: list[str]) -> None:
    step(trainer, saves=True)
    waits, *rest = log
    assert waits == "begin_wait"
    assert rest == ["begin_round", "tune", "begin_round", "interrupt", "save_checkpoint", "send", "resume"]
    log.clear()
    step(trainer)
    assert log.count("interrupt") == 1


def test_the_last_checkpoint_leaves_the_interruption_to_whoever_ends_the_run(trainer: Any, log: list[str]) -> None:
    trainer._save_last_checkpoint()
    trainer._save_checkpoint()
    assert log == ["save_last_checkpoint", "save_checkpoint"]


def test_ranks_send_by_the_checkpoint_engine(trainer: Any) -> None:
    asked: list[dict[str, Any]] = []
    trainer.actor_rollout_wg = SimpleNamespace(update_weights=lambda **options: asked.append(options))
    trainer._start_update(7)
    assert asked == [{"global_steps": 7, "mode": "partial_rollout"}]
