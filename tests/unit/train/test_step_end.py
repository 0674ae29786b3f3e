"""What the trainer does at the end of a step, in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from partial_rollout.train.trainer import PartialRolloutTrainer


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def trainer(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """In step 1 of 2, with its parts replaced by a log of what is called."""

    def noted(name: str) -> Any:
        return lambda *_args, **_options: log.append(name)

    for name in ("_save_by_time", "_send_weights", "_resume", "_note_gate", "_report_step"):
        monkeypatch.setattr(PartialRolloutTrainer, name, noted(name.removeprefix("_")))
    trainer: Any = object.__new__(PartialRolloutTrainer)
    trainer._phase = SimpleNamespace(begin=lambda *_: None)
    trainer.agent_loop_manager = SimpleNamespace(stop=noted("stop"), forget_claimed=noted("forget_claimed"))
    trainer.fleet = SimpleNamespace(reject_parked=noted("reject_parked"))
    trainer._last_checkpoint = SimpleNamespace(step_ended=noted("step_ended"))
    trainer.global_steps, trainer.total_training_steps, trainer.timing_raw = 1, 2, {"resume": 0.0}
    return trainer


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
