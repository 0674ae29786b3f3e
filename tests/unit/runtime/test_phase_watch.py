"""How long a phase of the trainer has lasted is counted from its beginning, without waits that others limit."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.runtime import phase_watch
from partial_rollout.runtime.phase_watch import PhaseWatch
from partial_rollout.types import Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from partial_rollout.types import Death

LEAST_S = 10.0
LIMIT_S = 30.0


class Trainer:
    """A trainer that waits for nobody, in virtual time; `ended` has the time of each end."""

    def __init__(self) -> None:
        self.now_s, self.ended, self.deaths = 0.0, list[float](), list["Death"]()
        self.ranks: Callable[[], list[Any]] = list
        self.phase = PhaseWatch(LEAST_S, "was starting", lambda: self.now_s)

    def start(self) -> None:
        """The watch begins; its thread ends at once."""
        watch: Any = SimpleNamespace(wait_stopped=lambda _: True)
        self.phase.start(watch, watch, list)
        for thread in threading.enumerate():
            if thread.name == "phase-watch":
                thread.join(LIMIT_S)

    def pass_(self, seconds: float) -> None:
        """Look once a second."""
        watch: Any = SimpleNamespace(end_stuck=self._end)
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.phase.look(watch, watch, self.ranks, threading.get_ident())

    def _end(self, death: Death, release: Callable[[], None]) -> None:
        self.ended.append(self.now_s)
        self.deaths.append(death)
        with contextlib.suppress(LookupError):  # the run ends whatever becomes of it
            release()


def _raise() -> list[Any]:
    raise LookupError("no such worker group")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(phase_watch, "own_process", Process)
    return Trainer()


def test_the_time_before_the_watch_began_is_no_pause_of_the_process(trainer: Trainer) -> None:
    trainer.now_s = 1000.0
    trainer.phase.begin("prepared to train", "report")
    trainer.start()
    trainer.pass_(4 * LEAST_S + 5.0)
    assert trainer.ended == [1000.0 + 4 * LEAST_S]
    (death,) = trainer.deaths
    assert death.process.role == "task runner"
    assert "the trainer had prepared to train for 40 s" in death.cause
    assert "pass_ (" in death.doing  # where this test stands


def test_a_wait_within_a_phase_is_left_to_others_and_what_follows_is_a_part_of_its_own(trainer: Trainer) -> None:
    trainer.start()
    trainer.phase.begin("validated the weights of step 3", "validate")
    with trainer.phase.elsewhere():
        assert trainer.phase.doing == "validated the weights of step 3"
        trainer.pass_(50 * LEAST_S)
    began_s = trainer.now_s
    assert trainer.ended == []
    trainer.pass_(4 * LEAST_S)  # nothing of its kind has ended
    assert trainer.ended == [began_s + 4 * LEAST_S]


def test_a_wait_with_a_limit_of_its_own_takes_nothing_of_the_phase_around_it(trainer: Trainer) -> None:
    trainer.start()
    trainer.phase.begin("trained step 3", "train")
    trainer.pass_(5.0)
    with trainer.phase.left_out():
        with trainer.phase.left_out():  # another thread of the trainer, which is answered first
            trainer.pass_(LEAST_S)
        trainer.pass_(49 * LEAST_S)
    assert trainer.phase.doing == "trained step 3"
    waited_s = 50 * LEAST_S
    trainer.pass_(4 * LEAST_S)
    assert trainer.ended == [waited_s + 4 * LEAST_S]
    assert "for 40 s" in trainer.deaths[0].cause


def test_a_process_that_was_stopped_for_a_while_blames_nobody(trainer: Trainer) -> None:
    trainer.start()
    trainer.phase.begin("trained step 3", "train")
    trainer.pass_(5.0)
    trainer.now_s += 100 * LEAST_S
    trainer.pass_(4 * LEAST_S - 10.0)
    assert trainer.ended == []


def test_the_run_ends_also_where_nobody_can_say_who_keeps_the_trainer_waiting(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.ranks = _raise
    trainer.phase.begin("trained step 3", "train")
    trainer.start()
    trainer.pass_(4 * LEAST_S - 1.0)
    assert "could not be found out which training ranks have an open call. After 40 s" in caplog.text
    trainer.pass_(20.0)
    assert trainer.ended == [4 * LEAST_S]
    (death,) = trainer.deaths
    assert death.process.role == "task runner"
    assert death.cause.endswith("and it could not be found out which training ranks have an open call")


def test_the_watch_looks_in_a_thread_until_the_run_ends_also_after_an_error(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = iter([False, False, True])
    watch: Any = SimpleNamespace(wait_stopped=lambda _: next(looks))

    def fails(*_: Any) -> None:
        raise LookupError("no such rank")

    monkeypatch.setattr(trainer.phase, "look", fails)
    trainer.phase.start(watch, watch, list)
    for thread in threading.enumerate():
        if thread.name == "phase-watch":
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert next(looks, None) is None
