"""What the trainer does at the end of a step, in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from partial_rollout.train.trainer import PartialRolloutTrainer
from tests.unit.train.support import bare_trainer, noted


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def trainer(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """In step 1 of 2, with its parts replaced by a log of what is called."""

    for name in ("_save_by_time", "_send_weights", "_resume", "_note_gate", "_report_step"):
        monkeypatch.setattr(PartialRolloutTrainer, name, noted(log, name.removeprefix("_")))
    stop, forget_claimed = noted(log, "stop"), noted(log, "forget_claimed")
    return bare_trainer(
        _phase=SimpleNamespace(begin=lambda *_: None),
        agent_loop_manager=SimpleNamespace(stop=stop, forget_claimed=forget_claimed),
        fleet=SimpleNamespace(reject_parked=noted(log, "reject_parked")),
        _last_checkpoint=SimpleNamespace(step_ended=noted(log, "step_ended")),
        global_steps=1,
        total_training_steps=2,
        timing_raw={"resume": 0.0},
    )


def test_engines_release_their_memory_by_a_call_of_the_fleet(
    trainer: Any, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fleet makes a call again when a silent server was replaced; verl's checkpoint manager does not."""
    trainer.fleet = SimpleNamespace(drain=lambda: log.append("drain") or 0, sleep=noted(log, "sleep"))
    trainer.curr_step_profile, trainer._pending_sync_metrics = False, {}
    trainer.replay_buffer = SimpleNamespace(num_deferred=0)
    monkeypatch.setattr(PartialRolloutTrainer, "_tune", noted(log, "tune"))
    trainer.on_sample_end()
    assert log == ["tune", "drain", "note_gate", "report_step", "sleep"]


def test_restored_tokens_are_forgotten_after_each_step_when_the_engines_generate_again(
    trainer: Any, log: list[str]
) -> None:
    trainer.on_step_end()
    step = ["save_by_time", "send_weights", "resume", "note_gate", "report_step", "forget_claimed", "step_ended"]
    assert log == step
    log.clear()
    trainer.global_steps = 2  # the last one: parked requests must not begin responses that nobody trains
    trainer.on_step_end()
    assert log == [step[0], "stop", "reject_parked", *step[1:]]
