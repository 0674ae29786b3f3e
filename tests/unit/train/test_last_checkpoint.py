"""What a run that ends before its time saves: a step that is in one piece and in no checkpoint yet."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from ray.exceptions import RayActorError

from partial_rollout.errors import EngineDead, WaitTimeout
from partial_rollout.runtime.bounded import TimeLeft, call_bounded
from partial_rollout.train import last_checkpoint
from partial_rollout.train.last_checkpoint import LastCheckpoint

STOP_S = 40.0


class Run:
    """A run that began with step 4 and 32 groups taken; it notes what is done at its end."""

    def __init__(self, stop_s: float = STOP_S) -> None:
        self.last, self.calls = LastCheckpoint(TimeLeft(stop_s)), []
        self.last.begin(4, 32)
        self.num_taken = 32

    def train(self, step: int) -> None:
        self.take()
        self.last.step_ended(step)

    def take(self) -> None:
        self.num_taken += 8
        self.last.taken(8)

    def drain(self) -> None:
        self.calls.append("drain")

    def save(self) -> None:
        self.calls.append(f"save {self.last.step}")

    def end(self) -> bool:
        return self.last.save(self.drain, lambda: self.num_taken, self.save)


def test_a_step_that_ended_is_saved_after_the_engines_are_drained() -> None:
    run = Run()
    run.train(5)
    assert run.end()
    assert run.calls == ["drain", "save 5"]


def test_nothing_is_saved_twice_and_nothing_before_the_first_step() -> None:
    run = Run()
    assert not run.end()  # the checkpoint that the run began from has it all
    run.train(5)
    run.last.saved(5)
    assert not run.end()
    first = LastCheckpoint(TimeLeft(STOP_S))
    first.begin(0, 0)
    assert not first.is_due
    assert run.calls == []


def test_half_a_step_is_not_saved() -> None:
    run = Run()
    run.train(5)
    run.take()
    assert not run.end()
    assert run.calls == []


def test_a_batch_that_was_taken_and_never_came_is_noticed() -> None:
    run = Run()
    run.train(5)
    run.num_taken += 8  # the manager has given out a batch; its answer was lost
    assert not run.end()
    assert run.calls == ["drain"]


@pytest.mark.parametrize("error", [EngineDead("replica 0"), RayActorError()], ids=["engine", "its server"])
def test_without_the_engines_the_tokens_that_workers_have_are_saved(error: Exception) -> None:
    run = Run()
    run.train(5)

    def dead() -> None:
        raise error

    assert run.last.save(dead, lambda: run.num_taken, run.save)
    assert run.calls == ["save 5"]


@pytest.mark.parametrize("error", [OSError("disk full"), None])
def test_a_save_that_fails_or_takes_too_long_leaves_the_error_of_the_run_alone(error: OSError | None) -> None:
    run = Run(stop_s=0.2)
    run.train(5)

    def fail() -> None:
        if error is not None:
            raise error
        threading.Event().wait(60.0)

    assert not run.last.save(run.drain, lambda: run.num_taken, fail)


@pytest.mark.parametrize("error", [OSError("a node is gone"), None])
def test_what_follows_a_whole_checkpoint_may_fail_or_take_too_long(
    error: OSError | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, is_whole = Run(), threading.Event()
    run.train(5)

    def save() -> None:
        run.last.saved(5)
        if error is not None:
            raise error
        is_whole.set()
        threading.Event().wait(60.0)

    def take_too_long() -> None:
        if is_whole.is_set():
            raise WaitTimeout("the run's end waits for a checkpoint")

    bounded = partial(call_bounded, check=take_too_long, check_interval_s=0.01)
    monkeypatch.setattr(last_checkpoint, "call_bounded", bounded)
    assert run.last.save(run.drain, lambda: run.num_taken, save)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == ["the last checkpoint is whole"]
