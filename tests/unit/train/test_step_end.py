"""What the trainer does at the end of a step, in which order."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from verl.trainer.ppo.v1 import PPOTrainer

from partial_rollout.core.phases import FIRST
from partial_rollout.runtime import phase_watch
from partial_rollout.runtime.phase_watch import PhaseWatch
from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.train import trainer as trainer_module
from partial_rollout.train.trainer import SAVE, PartialRolloutTrainer
from partial_rollout.types import Process
from tests.unit.train.support import bare_trainer, noted

TRAIN_S = 10.0


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
    trainer._phase = SimpleNamespace(begin=lambda doing, kind="": log.append(kind or "others limit it"))
    trainer.on_sample_end()
    assert log == ["others limit it", "tune", "drain", "note_gate", "report_step", "sleep", "train"]


def test_the_time_of_a_wait_for_a_frozen_prompt_manager_is_no_part_of_what_the_step_does(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, ended = 0.0, list[str]()
    trainer._phase = PhaseWatch(TRAIN_S, "was starting", lambda: now_s)
    trainer.settings = SimpleNamespace(block=PartialRolloutConfig())
    watch: Any = SimpleNamespace(end_stuck=lambda death, release: ended.append(death.cause))
    monkeypatch.setattr(phase_watch, "own_process", Process)

    def wait_for(answer: str, *, timeout_s: float, who_waits: str) -> str:
        nonlocal now_s
        assert who_waits == "trainer waits for the prompt manager"
        end_s = now_s + timeout_s / 2  # it was killed, and started again
        while now_s < end_s:
            now_s += phase_watch.LOOK_S
            trainer._phase.look(watch, watch, list, threading.get_ident())
        return answer

    monkeypatch.setattr(trainer_module, "wait_for", wait_for)
    trainer._phase.begin("saved the checkpoint of step 1", SAVE)
    answer: Any = "the queue"
    assert trainer._ask(answer) == "the queue"
    assert now_s > FIRST * TRAIN_S
    assert ended == []


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


@pytest.mark.parametrize(("next_step", "saved_step"), [(1, 0), (41, 40)])
def test_saving_by_time_knows_the_checkpoint_that_the_run_goes_on_from(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, next_step: int, saved_step: int
) -> None:
    told: list[Any] = []
    trainer.global_steps, trainer._ask = next_step, lambda call: call
    trainer.manager = SimpleNamespace(statistics=SimpleNamespace(remote=lambda: SimpleNamespace(taken=7)))
    trainer._last_checkpoint = SimpleNamespace(begin=lambda *given: told.append(given))
    trainer._cadence = SimpleNamespace(begin=told.append)
    trainer.agent_loop_manager = SimpleNamespace(start=lambda: told.append("start"))
    monkeypatch.setattr(trainer_module.stages, "begin", lambda _: None)
    trainer.on_train_begin()
    assert told == [(saved_step, 7), saved_step, "start"]


def test_old_checkpoints_go_when_all_of_the_new_one_is_noted(
    trainer: Any, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last checkpoint may have no time for it, and must not seem to have failed for that."""
    for name in ("save_tokens", "save_queue"):
        monkeypatch.setattr(trainer_module, name, noted(log, name))
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", noted(log, "verl saves"))
    monkeypatch.setattr(trainer_module, "remove_log_after", noted(log, "remove the log"))
    trainer._log, trainer._ask = None, lambda call: call
    trainer.agent_loop_manager.tokens_in_flight = lambda: ({}, [])
    trainer.manager = SimpleNamespace(snapshot=SimpleNamespace(remote=lambda: None))
    trainer.config = None
    trainer._checkpoints = SimpleNamespace(
        before_save=noted(log, "before_save"),
        after_save=lambda step: log.append("after_save") or 7,
        remove_old=noted(log, "remove_old"),
    )
    trainer._last_checkpoint.saved = noted(log, "last checkpoint saved")
    trainer._cadence = SimpleNamespace(saved=noted(log, "cadence saved"))
    trainer._events = SimpleNamespace(write=lambda event: log.append(f"{event.num_bytes} bytes told"))
    trainer._save_checkpoint()
    assert log == [
        "before_save", "remove the log", "save_tokens", "save_queue", "verl saves", "after_save",
        "last checkpoint saved", "cadence saved", "7 bytes told", "remove_old",
    ]  # fmt: skip
