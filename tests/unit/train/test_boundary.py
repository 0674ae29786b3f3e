"""The end of a round with the cost model: who is asked, for how long is waited, what is noted."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest

from partial_rollout.core.cost_model import EngineProgress, EngineSpeed, RunningRequest
from partial_rollout.errors import EngineDead
from partial_rollout.runtime.bounded import call_bounded
from partial_rollout.settings.block import CostsConfig, PartialRolloutConfig, TailConfig, TimeoutConfig
from partial_rollout.train import boundary as boundary_module
from partial_rollout.train.boundary import PATIENCE, SLACK_S, Boundary

SPEED = EngineSpeed(steps=((1.0, 0.01), (64.0, 0.01)), prefill_tokens_per_s=1000)
FAST = EngineSpeed(SPEED.steps, prefill_tokens_per_s=10_000)


def engine(*lefts: int, speed: EngineSpeed = SPEED) -> EngineProgress:
    """After a long response a request is expected to use its budget up."""
    running = tuple(RunningRequest(f"r{left}", f"p{left}", 1000, 0, left) for left in lefts)
    return EngineProgress(speed, running, history=[100_000])


@dataclass
class Fleet:
    engines: list[list[EngineProgress]]
    calls: list[tuple[Any, list[float]]] = field(default_factory=list)

    def progress(self) -> list[list[EngineProgress]]:
        return self.engines

    def let_end(self, request_ids: Any, limits_s: Any) -> int:
        self.calls.append((request_ids, limits_s))
        return 1

    def require_health(self) -> None:
        """All engines are there."""


def wait(
    fleet: Fleet, costs: CostsConfig | None = None, drain_s: float = 60.0
) -> tuple[dict[str, float], dict[str, Any]]:
    noted: list[dict[str, Any]] = []
    settings = PartialRolloutConfig(
        costs=costs or CostsConfig(), timeouts=TimeoutConfig(drain_s=drain_s), tail=TailConfig(boundary="cost")
    )
    boundary = Boundary(cast("Any", fleet), settings, lambda event, fields: noted.append(fields))
    metrics = boundary.wait(num_slots=64)
    return {key.removeprefix("partial_rollout/boundary/"): value for key, value in metrics.items()}, noted[0]


def test_every_replica_is_told_its_own_requests_and_has_its_own_limit():
    fleet = Fleet([[engine(5, 900)], [engine(20), engine(10)]])
    metrics, noted = wait(fleet)
    ((request_ids, limits_s),) = fleet.calls
    assert request_ids == [["r5"], ["r20", "r10"]]
    assert limits_s == [PATIENCE * 0.05 + SLACK_S, PATIENCE * 0.2 + SLACK_S]
    assert (metrics["let_end"], metrics["interrupted"], metrics["late"]) == (3, 1, 1)
    assert [(each["uid"], each["ends"]) for each in noted["requests"]] == [
        ("p5", True), ("p900", False), ("p20", True), ("p10", True),
    ]  # fmt: skip
    assert noted["requests"][1]["reason"].startswith("interrupt: 900 tokens left")


def test_where_nothing_is_worth_waiting_for_no_server_is_asked_to_wait():
    fleet = Fleet([[engine(900)], [engine(3, speed=EngineSpeed())]])
    metrics, noted = wait(fleet)
    assert fleet.calls == []
    assert (metrics["let_end"], metrics["interrupted"]) == (0, 1)
    assert noted["engines"][1] == "speeds are not measured yet"


def test_no_wait_is_longer_than_a_drain_may_be():
    fleet = Fleet([[engine(5)], [engine(20)]])
    wait(fleet, drain_s=0.2)
    assert fleet.calls[0][1] == [PATIENCE * 0.05 + SLACK_S, 0.2]


def test_an_engine_that_dies_during_the_wait_ends_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(boundary_module, "call_bounded", partial(call_bounded, check_interval_s=0.001))
    waiting = threading.Event()

    class Dying(Fleet):
        def let_end(self, request_ids: Any, limits_s: Any) -> int:
            waiting.wait(60)
            return 0

        def require_health(self) -> None:
            raise EngineDead("replica 1")

    with pytest.raises(EngineDead):
        wait(Dying([[engine(5)]]))
    waiting.set()


def test_given_costs_replace_measured_ones():
    fleet = Fleet([[engine(900)]])
    metrics, _ = wait(fleet, CostsConfig(decode_step_ms=0.1, decode_request_ms=0.001, prefill_tokens_per_s=10.0))
    assert metrics["let_end"] == 1
    assert metrics["prefill_tokens_per_s"] == 10.0


@dataclass
class Round:
    """Looks at a fleet whose progress and clock the test sets."""

    fleet: Fleet
    now_s: float = 0.0
    pauses: list[bool] = field(default_factory=list)
    noted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        def note(event: str, fields: dict[str, Any]) -> None:
            self.noted.append((event, fields))

        self.boundary = Boundary(cast("Any", self.fleet), PartialRolloutConfig(), note, lambda: self.now_s)

    def look(self, num_missing: int = 1, now_s: float = 0.0) -> list[bool]:
        self.now_s = now_s
        self.boundary.look(num_missing, 8, self.pauses.append)
        return self.pauses


def test_starts_are_paused_once_when_the_batch_is_near():
    round_ = Round(Fleet([[engine(5, 900, speed=FAST)]]))
    assert round_.look(2) == []  # the second prompt needs 9 s more
    assert round_.look(0) == []
    for _ in range(2):
        assert round_.look() == [True]
    reason = "the batch is expected in 0.05 s, too soon for a prompt of 1000 tokens"
    assert round_.noted == [("starts_paused", {"reason": reason})]
    assert round_.boundary.wait(8)["partial_rollout/boundary/starts_paused"] == 1
    assert round_.look() == [True, True]


def test_a_pause_ends_when_the_batch_is_no_longer_near():
    round_ = Round(Fleet([[engine(5, 900, speed=FAST)]]))
    round_.look()
    round_.fleet.engines = [[engine(800, 900, speed=FAST)]]
    assert round_.look() == [True, False]
    round_.fleet.engines = [[engine(5, 900, speed=FAST)]]
    assert round_.look() == [True, False, True]
    assert [event for event, _ in round_.noted] == ["starts_paused", "starts_resumed", "starts_paused"]


@pytest.mark.parametrize("num_missing", [0, 1])
def test_a_straggler_that_outlasts_its_estimate_ends_the_pause_until_the_next_round(num_missing: int):
    """It seems about to end at every look; or the batch is full, and waits for prompts that are due."""
    round_ = Round(Fleet([[engine(5, 900, speed=FAST)]]))
    round_.look(now_s=10.0)
    assert round_.look(num_missing, now_s=10.0 + PATIENCE * 0.05) == [True]
    assert round_.look(num_missing, now_s=10.0 + PATIENCE * 0.05 + SLACK_S) == [True, False]
    assert round_.look(now_s=11.0) == [True, False]
    assert round_.boundary.wait(8)["partial_rollout/boundary/starts_paused"] == 0
    assert round_.look(now_s=12.0) == [True, False, True]
