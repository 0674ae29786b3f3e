"""Deaths of engines as a waiting trainer sees them; the engines are stand-ins."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from partial_rollout.errors import EnginesLost
from partial_rollout.train import engine_recovery
from partial_rollout.train.engine_recovery import EngineRecovery
from partial_rollout.train.restarts import MAX_RESTARTS_A_STEP

NUM_REPLICAS = 3


class Fleet:
    """`deaths` has what is known of each death that was asked for."""

    def __init__(self) -> None:
        self.ranks = list(range(NUM_REPLICAS))
        self.deaths: dict[str, str | Exception] = {}
        self.current: dict[int, str] = {}
        self.failed: set[int] = set()
        self._numbers = itertools.count()

    def engine_death(self, rank: int) -> str:
        self.current[rank] = f"{rank}: death {next(self._numbers)}"
        return self.current[rank]

    def failed_updates(self) -> dict[int, str]:
        return dict.fromkeys(sorted(self.failed), "died")

    def die(self, rank: int) -> str:
        self.failed.add(rank)
        self.deaths[self.current[rank]] = f"replica {rank} (x:1): the engine died"
        return self.current[rank]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    fleet = Fleet()

    def get(death: str) -> str:
        reason = fleet.deaths[death]
        if isinstance(reason, Exception):
            raise reason
        return reason

    wait = lambda refs, num_returns, timeout: ([ref for ref in refs if ref in fleet.deaths], [])  # noqa: E731
    monkeypatch.setattr(engine_recovery, "ray", SimpleNamespace(get=get, wait=wait))
    return fleet


class Run:
    def __init__(self, fleet: Fleet) -> None:
        self.brought_back: list[dict[int, str]] = []
        self.step = 1
        self._fleet: Any = fleet
        self.recovery = EngineRecovery(self._fleet, self._bring_back, step=lambda: self.step)

    def _bring_back(self, failed: dict[int, str]) -> None:
        self.brought_back.append(failed)
        self._fleet.failed -= set(failed)


def test_engines_that_died_are_brought_back_together_and_listened_to_again(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(fleet)
    before = run.recovery.deaths
    run.recovery.look(["a batch"])
    assert run.brought_back == []
    first, _ = fleet.die(2), fleet.die(0)
    run.recovery.look([first])  # Ray tells of one at a time
    assert run.brought_back == [{0: "died", 2: "died"}]
    after = run.recovery.deaths
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True, False]
    run.recovery.look([fleet.die(0)])
    assert run.brought_back == [{0: "died", 2: "died"}, {0: "died"}]
    told = [record.getMessage()[:9] for record in caplog.records if record.levelno == logging.WARNING]
    assert told == ["replica 0", "replica 2", "replica 0"]


def test_an_engine_that_an_update_has_brought_back_is_only_listened_to_again(fleet: Fleet) -> None:
    run = Run(fleet)
    death = fleet.die(1)
    fleet.failed.clear()
    run.recovery.look([death])
    assert run.brought_back == []
    assert death not in run.recovery.deaths


def test_engines_that_die_again_and_again_are_lost_unless_steps_are_completed(fleet: Fleet) -> None:
    run = Run(fleet)
    for step in (1, 2):
        run.step = step
        for _ in range(MAX_RESTARTS_A_STEP):
            run.recovery.look([fleet.die(0)])
    with pytest.raises(EnginesLost, match=r"engines died 9 times in step 2; replica 0 .*the engine died"):
        run.recovery.look([fleet.die(0)])
    assert len(run.brought_back) == 2 * MAX_RESTARTS_A_STEP


def test_the_death_of_a_server_is_left_to_whoever_watches_the_actors(fleet: Fleet) -> None:
    run = Run(fleet)
    death = fleet.current[1]
    fleet.deaths[death] = RayActorError()
    run.recovery.look([death])
    assert run.brought_back == []
    assert len(run.recovery.deaths) == NUM_REPLICAS - 1
