"""A last checkpoint is whole whatever the trainer has left behind: calls that are answered late, a late save."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("verl")

from verl.trainer.ppo.v1 import PPOTrainer

from partial_rollout.core.queue.tail import Partial
from partial_rollout.errors import RunStopped, WaitTimeout
from partial_rollout.runtime.bounded import TimeLeft
from partial_rollout.runtime.prompt_manager import RolloutPromptManager
from partial_rollout.train import last_checkpoint
from partial_rollout.train import trainer as trainer_module
from partial_rollout.train.last_checkpoint import LastCheckpoint
from partial_rollout.types import PromptMeta, TrajectorySummary
from tests.unit.train.support import bare_trainer, noted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STOP_S = 40.0


class Manager:
    """A prompt manager as its actor; its calls go on while the answer to one of them is waited for."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

        async def made() -> RolloutPromptManager:
            return RolloutPromptManager(Partial(4), 2, self.loop.time)

        self._manager = self.ask(self.loop.create_task(made()))

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self.loop.create_task(getattr(self._manager, name)(*given)))

    def ask(self, call: asyncio.Task[Any]) -> Any:
        return self.loop.run_until_complete(call)


@pytest.fixture
def manager() -> Iterator[Manager]:
    made = Manager()
    yield made
    made.loop.close()


def trainer_in_step_6(manager: Manager) -> Any:
    """Step 5 has ended, and the batch of step 6 is waited for."""
    last = LastCheckpoint(TimeLeft(STOP_S))
    last.begin(4, 0)
    last.step_ended(5)
    return bare_trainer(
        _phase=SimpleNamespace(begin=lambda *_: None),
        watch=SimpleNamespace(has_lost=lambda *_: False),
        fleet=SimpleNamespace(drain=lambda: None, sleep=lambda: None),
        manager=manager,
        _ask=manager.ask,
        _last_checkpoint=last,
        global_steps=6,
    )


def test_a_batch_that_the_trainer_waits_for_no_more_stays_in_the_queue_that_is_saved(manager: Manager) -> None:
    """A death or a dead engine ends the trainer's wait, and not its call, which would take what is finished later."""
    manager.ask(manager.admit.remote([PromptMeta("a", 1, global_step=5)]))
    manager.ask(manager.report_step.remote(6, 5, "open"))
    claims = manager.ask(manager.claim.remote("w0", 1, 0))
    abandoned = manager.take_batch.remote(1, STOP_S)
    trainer, saved = trainer_in_step_6(manager), list[str]()

    def save() -> None:
        done = [(claims[0], [TrajectorySummary("a_0_0", 3, 5, min_version=5, max_version=5)])]
        manager.ask(manager.finish_many.remote(done))
        with pytest.raises(RunStopped):
            manager.ask(abandoned)
        saved.extend(group.uid for group in manager.ask(manager.snapshot.remote()).done)
        trainer._last_checkpoint.saved(5)

    trainer._save_checkpoint = save
    trainer._save_last_checkpoint()
    assert saved == ["a"]


def test_a_save_that_is_late_goes_on_with_the_step_that_it_began_with(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl writes its tracker last, with the step of then: it would name a checkpoint that is not there."""
    go_on, written, late = threading.Event(), list[int](), list[threading.Thread]()

    def in_time(call: Callable[[], Any], *, timeout_s: float, who_waits: str) -> Any:
        if not who_waits.endswith("for a checkpoint"):
            return call()
        late.append(threading.Thread(target=call))
        late[0].start()
        raise WaitTimeout(who_waits)

    monkeypatch.setattr(last_checkpoint, "call_bounded", in_time)
    trainer = trainer_in_step_6(manager)

    def save() -> None:
        go_on.wait()
        written.append(trainer.global_steps)

    trainer._save_checkpoint = save
    trainer._save_last_checkpoint()
    go_on.set()
    late[0].join()
    assert written == [5]


@pytest.mark.parametrize(("step", "forgets"), [(0, []), (5, ["forget"])])
def test_a_run_that_goes_on_forgets_the_validation_in_which_the_last_one_ended(
    step: int, forgets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", noted(log, "load"))
    monkeypatch.setattr(trainer_module, "forget_validation", noted(log, "forget"))
    checkpoints = SimpleNamespace(before_load=noted(log, "look"))
    bare_trainer(global_steps=step, _checkpoints=checkpoints)._load_checkpoint()
    assert log == ["look", "load", *forgets]
