"""The number of slots on its way from the engines' load to the workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("verl")

from partial_rollout.agent_loop import manager as agent_loop_manager
from partial_rollout.core.engine_meter import EngineSpeed
from partial_rollout.core.slots import EngineLoad, SlotBounds
from partial_rollout.train.slot_tuning import SlotTuner
from tests.unit.agent_loop.support import make_workers

if TYPE_CHECKING:
    from partial_rollout.core.slots import SlotDecision

PREFIX = "partial_rollout/slots/"


@dataclass
class World:
    """Two engines with a load each, and workers that take whatever they are given."""

    loads: list[EngineLoad] = field(default_factory=lambda: [EngineLoad(num_tokens=1), EngineLoad()])
    resized: list[int] = field(default_factory=list)
    noted: list[SlotDecision] = field(default_factory=list)

    def statistics(self) -> list[Any]:
        return [SimpleNamespace(load=load, speed=EngineSpeed()) for load in self.loads]

    def resize(self, num_slots: int) -> None:
        self.resized.append(num_slots)

    def tuner(self) -> SlotTuner:
        return SlotTuner(
            32,
            SlotBounds(8, 64, 4),
            fleet=cast("Any", self),
            agent_loops=cast("Any", self),
            slots_in_use=lambda: self.resized[-1] if self.resized else 32,
            note=self.noted.append,
        )


def test_a_change_reaches_the_workers_the_metrics_and_the_log():
    world = World()
    tuner = world.tuner()
    tuner.look()
    world.loads = [EngineLoad(kv_usage=0.2, num_preemptions=2), EngineLoad(kv_usage=0.5, waiting=3)]
    tuner.look()
    world.loads = [EngineLoad(num_preemptions=2), EngineLoad(waiting=1)]
    tuner.look()
    assert world.resized == [36, 24]
    reasons = [decision.reason for decision in world.noted]
    assert reasons == ["all slots in use, KV cache 0% full", "2 requests preempted"]
    assert tuner.metrics() == {
        PREFIX + "num": 24,
        PREFIX + "raised": 1,
        PREFIX + "lowered": 1,
        PREFIX + "kv_usage_max": 0.5,
        PREFIX + "waiting_max": 3,
        PREFIX + "preemptions": 2,
    }
    world.loads = [EngineLoad(num_preemptions=3, waiting=1)]
    tuner.look()
    assert tuner.metrics()[PREFIX + "preemptions"] == 1


def test_preemptions_of_a_validation_lower_no_slots_and_are_not_counted():
    world = World()
    tuner = world.tuner()
    world.loads = [EngineLoad(num_preemptions=5, waiting=1), EngineLoad()]
    tuner.begin(world.statistics())
    tuner.look()
    assert world.resized == []
    assert tuner.metrics()[PREFIX + "preemptions"] == 0
    world.loads = [EngineLoad(num_preemptions=6), EngineLoad()]
    tuner.look()
    assert world.resized == [24]
    assert tuner.metrics()[PREFIX + "preemptions"] == 1


@pytest.mark.parametrize(("num_slots", "shares"), [(32, [16, 16]), (20, [12, 8]), (8, [4, 4])])
def test_workers_share_whole_groups(monkeypatch: pytest.MonkeyPatch, num_slots: int, shares: list[int]):
    given: list[int] = []
    monkeypatch.setattr(agent_loop_manager, "settle_all", lambda refs, **_: given.extend(refs) or refs)
    workers = make_workers([SimpleNamespace(resize=SimpleNamespace(remote=lambda share: share))] * 2)
    workers.resize(num_slots)
    assert given == workers._slot_shares == shares


async def test_workers_start_with_the_shares_that_a_resize_to_the_same_number_gives(monkeypatch: pytest.MonkeyPatch):
    started: list[int] = []

    def start(worker_id: str, settings: Any, num_slots: int, *_: Any) -> SimpleNamespace:
        started.append(num_slots)
        return SimpleNamespace(ping=SimpleNamespace(remote=lambda: worker_id))

    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))
    node = {"NodeID": "ab" * 28, "Alive": True, "Resources": {"CPU": 1.0}}
    monkeypatch.setattr(agent_loop_manager, "ray", SimpleNamespace(nodes=lambda: [node], remote=lambda _: options))
    monkeypatch.setattr(agent_loop_manager, "wait_for_all", lambda refs, **_: refs)
    await make_workers(batch=5, group=4, num_workers=2)._init_agent_loop_workers()
    assert started == [12, 8]
