"""Shutdown goes on after a failing step, tolerates missing parts and runs once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from partial_rollout.settings.block import PartialRolloutConfig
from partial_rollout.train import shutdown


class _Trainer(SimpleNamespace):
    is_shut_down = False
    settings = SimpleNamespace(block=PartialRolloutConfig())
    watch = SimpleNamespace(stop=lambda: None)

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
