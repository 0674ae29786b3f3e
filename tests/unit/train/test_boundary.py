"""The end of a round with the cost model: who is asked, for how long is waited, what is noted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from partial_rollout.config import CostsConfig
from partial_rollout.core.cost_model import EngineProgress, EngineSpeed, RunningRequest
from partial_rollout.train.boundary import PATIENCE, SLACK_S, Boundary

SPEED = EngineSpeed(steps=((1.0, 0.01), (64.0, 0.01)), prefill_tokens_per_s=1000)
FAST = EngineSpeed(SPEED.steps, prefill_tokens_per_s=10_000)


def engine(*lefts: int, speed: EngineSpeed = SPEED) -> EngineProgress:
    """Without a history a request is expected to use its budget up."""
    return EngineProgress(speed, tuple(RunningRequest(f"r{left}", f"p{left}", 1000, 0, left) for left in lefts))


@dataclass
class Fleet:
    engines: list[list[EngineProgress]]
    calls: list[tuple[Any, float]] = field(default_factory=list)

    def progress(self) -> list[list[EngineProgress]]:
        return self.engines

    def let_end(self, request_ids: Any, limit_s: float) -> int:
        self.calls.append((request_ids, limit_s))
        return 1


def wait(fleet: Fleet, costs: CostsConfig | None = None) -> tuple[dict[str, float], dict[str, Any]]:
    noted: list[dict[str, Any]] = []
    boundary = Boundary(cast("Any", fleet), costs or CostsConfig(), lambda event, fields: noted.append(fields))
    metrics = boundary.wait(num_slots=64)
    return {key.removeprefix("partial_rollout/boundary/"): value for key, value in metrics.items()}, noted[0]


def test_every_replica_is_told_its_own_requests_and_the_longest_wait_bounds_all():
    fleet = Fleet([[engine(5, 900)], [engine(20), engine(10)]])
    metrics, noted = wait(fleet)
    ((request_ids, limit_s),) = fleet.calls
    assert request_ids == [["r5"], ["r20", "r10"]]
    assert limit_s == PATIENCE * 0.2 + SLACK_S
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


def test_given_costs_replace_measured_ones():
    fleet = Fleet([[engine(900)]])
    metrics, _ = wait(fleet, CostsConfig(decode_step_ms=0.1, decode_request_ms=0.001, prefill_tokens_per_s=10.0))
    assert metrics["let_end"] == 1
    assert metrics["prefill_tokens_per_s"] == 10.0


def test_starts_are_paused_once_a_round_when_the_batch_is_near():
    noted: list[tuple[str, dict[str, Any]]] = []
    paused: list[None] = []
    fleet = Fleet([[engine(5, 900, speed=FAST)]])
    boundary = Boundary(cast("Any", fleet), CostsConfig(), lambda event, fields: noted.append((event, fields)))
    boundary.look(2, 8, lambda: paused.append(None))
    assert (paused, noted) == ([], [])  # the second prompt needs 9 s more
    boundary.look(0, 8, lambda: paused.append(None))
    assert paused == []
    for _ in range(2):
        boundary.look(1, 8, lambda: paused.append(None))
    reason = "the batch is expected in 0.05 s, too soon for a prompt of 1000 tokens"
    assert (len(paused), noted) == (1, [("starts_paused", {"reason": reason})])
    assert boundary.wait(8)["partial_rollout/boundary/starts_paused"] == 1
    boundary.look(1, 8, lambda: paused.append(None))
    assert len(paused) == 2
