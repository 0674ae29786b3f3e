"""The number of batches in flight on its way from the engines' load to the prompt queue."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

from partial_rollout.core.engine_meter import EngineSpeed
from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.tail import Partial
from partial_rollout.core.slots import EngineLoad, SlotBounds
from partial_rollout.settings.auto import DEPTH_KEY
from partial_rollout.settings.block import PartialRolloutConfig, SlotsConfig, TailConfig
from partial_rollout.train.depth_tuning import DepthTuner
from partial_rollout.types import PromptMeta, TrajectorySummary

if TYPE_CHECKING:
    from partial_rollout.core.depth import DepthDecision

BATCH, GROUP, SLOTS = 8, 4, 32


class Run:
    """A queue whose prompts finish at once, and two engines with a load."""

    def __init__(self, most: float = 3.0) -> None:
        self.queue = PromptQueue(Partial(2 * BATCH), max_attempts=2, clock=lambda: 0.0)
        self.noted: list[DepthDecision] = []
        self.now_s = 0.0
        self.tuner = DepthTuner(
            (2.0, most),
            batch=BATCH,
            set_capacity=lambda capacity: self.queue.resize(Partial(capacity)),
            note=self.noted.append,
            clock=lambda: self.now_s,
        )
        self.num_admitted = 0

    def step(self, *, taken: float, waits_s: float = 4.0, **load: Any) -> int:
        """6 s of training and a wait for the batch; returns how many prompts were in flight while it generated."""
        num = self.queue.begin_round().num_fresh
        fresh = [PromptMeta(str(self.num_admitted + each), GROUP, 1) for each in range(num)]
        self.queue.admit(fresh)
        self.num_admitted += num
        in_flight = self.queue.num_in_flight
        for claim in self.queue.claim("worker", BATCH * GROUP):
            summaries = [TrajectorySummary(f"{claim.uid}_{n}", 3, 5, 0, 0) for n in range(GROUP)]
            self.queue.finish(claim, summaries)
        engines: Any = [SimpleNamespace(load=EngineLoad(**load)) for _ in range(2)]
        self.now_s += 6
        self.tuner.begin_wait()
        self.now_s += waits_s
        self.tuner.look(engines, taken=taken / SLOTS, pending=0)
        assert len(self.queue.take(BATCH).groups) == BATCH
        assert self.queue.statistics().conserved
        return in_flight


def test_idle_slots_let_more_prompts_in_from_the_next_step_on():
    run = Run()
    assert [run.step(taken=16) for _ in range(12)] == [16] * 5 + [24] * 7
    assert [(each.before, each.after) for each in run.noted] == [(2.0, 3.0)]


def test_a_trainer_that_finds_its_batch_whole_lets_no_more_in():
    run = Run()
    assert {run.step(taken=16, waits_s=0.1) for _ in range(12)} == {16}
    assert run.noted == []


def test_what_is_too_much_for_a_full_cache_is_trained_before_more_is_admitted():
    run = Run()
    for _ in range(6):
        run.step(taken=16)
    assert run.step(taken=30, kv_usage=0.95) == 24
    assert [run.step(taken=30) for _ in range(2)] == [20, 20]
    assert run.tuner.depth == 2.5


@pytest.mark.parametrize("load", [{"num_preemptions": 3}, {"kv_usage": 0.91}])
def test_preempted_requests_and_a_full_cache_take_it_back(load: dict[str, Any]):
    run = Run()
    for _ in range(5):
        run.step(taken=16)
    assert run.tuner.depth == 3.0
    run.step(taken=16, **load)
    assert run.tuner.depth == 2.5


def test_preemptions_of_a_validation_do_not_count():
    run = Run()
    run.step(taken=16, num_preemptions=0)
    for step in range(1, 6):  # each validation preempts twice in each of the two engines
        engines: Any = [SimpleNamespace(load=EngineLoad(num_preemptions=2 * step)) for _ in range(2)]
        run.tuner.begin(engines)
        run.step(taken=16, num_preemptions=2 * step)
    assert run.tuner.depth == 3.0


def test_a_bound_on_staleness_keeps_two_batches():
    run = Run(most=2.0)
    assert {run.step(taken=16) for _ in range(20)} == {16}
    assert run.noted == []


def make_trainer(told: list[int], noted: list[Any], slots: SlotsConfig | None = None) -> Any:
    """A trainer whose engines run 16 requests in 20 slots; `told` gets capacities of the queue, `noted` the events."""
    pytest.importorskip("vllm")
    from tests.unit.train.support import bare_trainer

    method = lambda answer: SimpleNamespace(remote=answer)  # noqa: E731
    status = SimpleNamespace(queue=SimpleNamespace(pending=0), mean_slots_in_use=20.0)
    block = PartialRolloutConfig(tail=TailConfig(interrupt_mode="reuse_kv"), slots=slots or SlotsConfig())
    bounds = SlotBounds(SLOTS, 3 * SLOTS, GROUP)
    trainer = bare_trainer(settings=SimpleNamespace(block=block, batch=BATCH, num_slots=SLOTS, slot_bounds=bounds))
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"disable_log_stats": False}}})
    trainer.manager = SimpleNamespace(status=method(lambda: status), set_capacity=method(told.append))
    trainer._phase = SimpleNamespace(begin=lambda *_: None)
    trainer.fleet = SimpleNamespace(statistics=lambda: [SimpleNamespace(mean_running=16.0, load=EngineLoad())])
    added = SimpleNamespace(kv_usage_max=0.0, was_full_with_few=False, look=lambda: None, metrics=dict)
    trainer.slot_tuner = added
    trainer._pending_sync_metrics, trainer.global_steps, trainer._log = {}, 7, None
    trainer._events = SimpleNamespace(write=noted.append)
    trainer._ask = lambda answer: answer
    trainer.depth_tuner = trainer._make_depth_tuner()
    return trainer


def test_the_trainer_looks_at_each_batch_and_tells_queue_metrics_and_events(monkeypatch: pytest.MonkeyPatch):
    told: list[int] = []
    noted: list[Any] = []
    trainer = make_trainer(told, noted)
    trainer._begin_round = lambda: 0
    depths, now_s = [], [trainer.depth_tuner._looked_s]
    monkeypatch.setattr(trainer.depth_tuner, "_clock", lambda: now_s[0])
    trainer._log = SimpleNamespace(has_replayed=True)
    now_s[0] += 100.0
    trainer._tune()  # says nothing, and its time is in no share
    assert "partial_rollout/waited" not in trainer._pending_sync_metrics
    trainer._log = None
    for _ in range(6):
        now_s[0] += 6.0
        trainer.prepare_step()
        now_s[0] += 4.0
        trainer._tune()
        depths.append(trainer._pending_sync_metrics["partial_rollout/depth"])
        assert trainer._pending_sync_metrics["partial_rollout/slot_utilisation"] == 16.0 / SLOTS
        assert trainer._pending_sync_metrics["partial_rollout/slots_taken"] == 20.0 / SLOTS
        assert trainer._pending_sync_metrics["partial_rollout/waited"] == pytest.approx(0.4)
    assert depths == [2.0] * 5 + [3.0]
    assert told == [24]
    assert [(each.step, each.key, each.before, each.after) for each in noted] == [(7, DEPTH_KEY, 2.0, 3.0)]


@dataclass
class Load:
    """Engines at each look: trajectories take all slots, and of those that were taken away 2 come free in between."""

    kv_usage: float
    """With the slots of the start."""
    growth: float = 1.0
    """By how much requests are longer once slots were added."""
    preempts: int = 0
    """Requests that each added slot preempts."""
    in_use: int = 0
    num_preemptions: int = 0
    num_tokens: int = 0

    def move(self, num_slots: int) -> None:
        self.in_use = max(num_slots, self.in_use - 2)
        self.num_preemptions += self.preempts * max(0, self.in_use - SLOTS)
        self.num_tokens += 1000

    def statistics(self) -> list[Any]:
        usage = min(1.0, self.kv_usage * self.in_use / SLOTS * (self.growth if self.in_use > SLOTS else 1.0))
        load = EngineLoad(self.in_use, 0, usage, self.num_preemptions, self.num_tokens)
        return [SimpleNamespace(mean_running=self.in_use, load=load, speed=EngineSpeed())]


@pytest.mark.parametrize(
    ("load", "depth", "rises"),
    [
        (Load(0.5, growth=1.8), 3.0, True),
        (Load(0.59, growth=1.5), 3.0, True),
        (Load(0.3, preempts=1), 3.0, True),
        (Load(0.7), 3.0, False),
        (Load(0.84), 3.0, False),
        (Load(0.92), 2.0, False),
    ],
    ids=[
        "an added slot fills the cache",
        "from the most that may be full",
        "added slots preempt",
        "no room for more",
        "nearly full",
        "full without them",
    ],
)
def test_a_cache_that_only_added_slots_fill_takes_no_batch_back(load: Load, depth: float, rises: bool):
    """Slots are added and taken away again within a step, so that its end has those of the start and a full cache."""
    trainer = make_trainer([], [], slots=SlotsConfig(adaptive=True))
    trainer.depth_tuner._controller.depth = 3.0
    load = trainer.fleet = replace(load)
    status = {"queue": SimpleNamespace(pending=0), "mean_slots_in_use": float(SLOTS)}
    trainer.manager.status.remote = lambda: SimpleNamespace(slots_in_use=load.in_use, **status)
    trainer.slot_tuner = trainer._make_slot_tuner(SimpleNamespace(resize=lambda _: None))
    slots = []
    for step in range(60):
        for tuner in (trainer.slot_tuner, trainer.depth_tuner):
            tuner.begin(load.statistics())
        for _ in range(5 + step % 5):
            load.move(trainer.slot_tuner.num_slots)
            trainer.slot_tuner.look()
        load.move(trainer.slot_tuner.num_slots)
        slots.append(trainer.slot_tuner.num_slots)
        trainer._tune()
    assert (SLOTS in slots, max(slots) > SLOTS) == (True, rises)
    assert trainer.depth_tuner.depth == depth
