"""Shutdown goes on after a failing step, tolerates missing parts, runs once, and never takes longer than it may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.errors import ActorLost, WaitTimeout
from partial_rollout.runtime.bounded import TimeLeft
from partial_rollout.train import last_checkpoint, shutdown
from partial_rollout.train.last_checkpoint import LastCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable

STOP_S = 60.0


class _Trainer(SimpleNamespace):
    is_shut_down = False
    watch = SimpleNamespace(stop=lambda: None, left=TimeLeft(STOP_S))

    def close_manager(self) -> None:
        self.calls.append("manager")


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    actors: list[Any] = []
    monkeypatch.setattr(shutdown.ray, "kill", actors.append)
    return actors


def test_a_failing_step_does_not_stop_the_others(killed: list[Any]) -> None:
    calls: list[str] = []

    def fail() -> None:
        raise RuntimeError("already dead")

    trainer = _Trainer(
        calls=calls,
        agent_loop_manager=SimpleNamespace(stop=fail, agent_loop_workers=["worker"]),
        fleet=SimpleNamespace(shutdown=lambda: calls.append("fleet")),
        actor_rollout_wg=SimpleNamespace(workers=["training"]),
        manager="manager actor",
    )
    shutdown.shutdown_run(trainer)
    shutdown.shutdown_run(trainer)
    assert calls == ["fleet", "manager"]
    assert killed == ["worker", "training", "manager actor"]


def test_parts_that_were_never_made_are_left_out(killed: list[Any]) -> None:
    calls: list[str] = []
    shutdown.shutdown_run(_Trainer(calls=calls, manager="manager actor"))
    assert calls == ["manager"]
    assert killed == ["manager actor"]


class Slow:
    """Every wait takes all the time that it has; some calls answer in the last moment, the others never."""

    def __init__(self, answer: tuple[str, ...]) -> None:
        self.now_s, self.waits, self._answer = 1000.0, list[tuple[str, float]](), answer

    def clock(self) -> float:
        return self.now_s

    def call_bounded(self, call: Callable[[], Any], *, timeout_s: float, who_waits: str) -> Any:
        self.now_s += timeout_s
        self.waits.append((who_waits, timeout_s))
        if any(word in who_waits for word in self._answer):
            return call()
        raise WaitTimeout(who_waits)


@pytest.mark.parametrize(
    ("answer", "num_waits"),
    [
        ((), 2 + 3),
        (("engines", "prompt manager"), 3 + 3),
        (("prompt manager",), 3 + 3),
        (("engines", "manager", "checkpoint"), 6),
    ],
)
def test_a_checkpoint_and_the_end_together_take_no_longer_than_stop_s(
    answer: tuple[str, ...], num_waits: int, killed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run had an error that is not a death, after which nobody else ends the run."""
    slow = Slow(answer)
    for module in (last_checkpoint, shutdown):
        monkeypatch.setattr(module, "call_bounded", slow.call_bounded)
    left = TimeLeft(STOP_S, slow.clock)
    last = LastCheckpoint(left)
    last.begin(4, 32)
    last.step_ended(5)
    last.save(lambda: None, lambda: 32, lambda: None)
    trainer = _Trainer(
        calls=[],
        watch=SimpleNamespace(stop=lambda: None, left=left),
        agent_loop_manager=SimpleNamespace(stop=lambda: None, agent_loop_workers=["worker"]),
        fleet=SimpleNamespace(shutdown=lambda: None),
        manager="manager actor",
    )
    shutdown.shutdown_run(trainer)
    assert len(slow.waits) == num_waits
    assert sum(seconds for _, seconds in slow.waits) == pytest.approx(slow.now_s - 1000.0)
    assert slow.now_s - 1000.0 <= STOP_S
    assert all(seconds > 1.0 for _, seconds in slow.waits)
    assert killed == ["worker", "manager actor"]


def test_a_signal_before_the_end_has_begun_leaves_all_steps_to_the_next_call(killed: list[Any]) -> None:
    calls: list[str] = []

    class Watch(SimpleNamespace):
        def stop(self) -> None:
            if not self.is_stopped:
                self.is_stopped = True
                raise ActorLost("an engine died when the last step had ended")

    watch = Watch(is_stopped=False, left=TimeLeft(STOP_S))
    trainer = _Trainer(calls=calls, manager="manager actor", watch=watch)
    with pytest.raises(ActorLost):
        shutdown.shutdown_run(trainer)
    shutdown.shutdown_run(trainer)
    shutdown.shutdown_run(trainer)
    assert (calls, killed) == (["manager"], ["manager actor"])
