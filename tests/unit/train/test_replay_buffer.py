"""`sample("train")` against a fake manager, fake workers and a fake TransferQueue; time moves only in ray.wait."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from fake_transfer_queue import FakeTransferQueue
from verl.trainer.ppo.v1 import PPOTrainer

from partial_rollout.agent_loop import manager as agent_loop_manager
from partial_rollout.errors import ActorLost, AgentLoopBroken, EngineDead, TransferQueueSilent, WaitTimeout
from partial_rollout.observability.events import BatchTaken, EventReader, EventWriter
from partial_rollout.observability.step_line import REPLAYED
from partial_rollout.runtime import remote_call
from partial_rollout.settings.block import PartialRolloutConfig, TailConfig, TimeoutConfig
from partial_rollout.train import replay_buffer
from partial_rollout.train import trainer as trainer_module
from partial_rollout.train.replay_buffer import MAX_REFILL_BATCHES, PartialRolloutReplayBuffer
from partial_rollout.train.stale_mask import StaleTokens
from partial_rollout.types import (
    Claim,
    FinishedGroup,
    ManagerStatus,
    QueueStatistics,
    TakeResult,
    TrajectorySummary,
    VersionSpan,
)
from tests.unit.agent_loop.support import make_workers
from tests.unit.train.support import bare_trainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEP = 7
LIMIT_S = 60.0
"""A bound that no test reaches."""


@dataclass(eq=False)
class Ref:
    """An object ref: `value` once `ready`, or the error to raise."""

    value: Any = None
    ready: bool = True


@dataclass(eq=False)
class LateRef:
    """An object ref that is ready so many seconds after it was first looked at."""

    value: Any
    ray: FakeRay
    after_s: float
    since_s: float | None = None

    @property
    def ready(self) -> bool:
        self.since_s = self.ray.now_s if self.since_s is None else self.since_s
        return self.ray.now_s - self.since_s >= self.after_s


@dataclass
class FakeRay:
    """`wait` with nothing ready lets its whole timeout pass."""

    now_s: float = 0.0

    def get(self, refs: Ref | list[Ref], timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        if isinstance(refs.value, Exception):
            raise refs.value
        return refs.value

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        ready = [ref for ref in refs if ref.ready][:num_returns]
        if not ready:
            self.now_s += timeout
        return ready, [ref for ref in refs if ref not in ready]

    def monotonic(self) -> float:
        return self.now_s


@dataclass
class Manager:
    """Answers `take_batch` from a list; the last answer is repeated."""

    answers: list[Ref]
    calls: list[tuple[int, float]] = field(default_factory=list)
    wanted: list[tuple[str, ...]] = field(default_factory=list)
    on_discard: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        now = QueueStatistics(admitted=9, pending=0, ongoing=9, done=0, taken=0, dropped={"agent_loop_failed": 6})
        self.take_batch = SimpleNamespace(remote=self._take)
        self.statistics = SimpleNamespace(remote=lambda: Ref(now))
        self.discard_expired = SimpleNamespace(remote=self._discard)
        status = ManagerStatus(queue=now, capacity=9, last_failure="u3: RuntimeError: no tool")
        self.status = SimpleNamespace(remote=lambda: Ref(status))

    def _discard(self) -> Ref:
        self.on_discard()
        return Ref(["gone"])

    def _take(self, num_groups: int, timeout_s: float, wanted: tuple[str, ...] = ()) -> Ref:
        self.calls.append((num_groups, timeout_s))
        self.wanted.append(wanted)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@dataclass
class World:
    ray: FakeRay
    tq: FakeTransferQueue
    refills: list[int] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    oldest: list[int | None] = field(default_factory=list)
    tail: TailConfig = field(default_factory=TailConfig)
    events: EventWriter | None = None

    def hold(self, claims: list[Claim], oldest_version: int | None) -> Ref:
        self.held += [claim.uid for claim in claims]
        self.oldest.append(oldest_version)
        return Ref()

    def buffer(self, *answers: Ref, loops: dict[Ref, str] | None = None, **timeouts: float):
        buffer = PartialRolloutReplayBuffer("partial_rollout", cast("Any", {}), None, "drop", cast("Any", {}))
        buffer.refill_fn = self.refills.append
        settings = PartialRolloutConfig(timeouts=TimeoutConfig(batch_s=100.0, **timeouts), tail=self.tail)
        holding = [SimpleNamespace(hold=SimpleNamespace(remote=self.hold)) for _ in range(2)]
        workers = make_workers(holding, settings=settings)
        workers.loops = cast("Any", loops or {Ref(ready=False): "agent-loop worker 0"})
        buffer.bind(cast("Any", Manager(list(answers))), workers, settings, mini_batch=1, events=self.events)
        return buffer


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(FakeRay(), FakeTransferQueue())
    for module in (replay_buffer, remote_call, agent_loop_manager):
        monkeypatch.setattr(module, "ray", world.ray)
    monkeypatch.setattr(replay_buffer, "time", world.ray)
    monkeypatch.setattr(replay_buffer, "tq", world.tq)
    return world


def group(uid: str, *response_lens: int, version: int = 4) -> FinishedGroup:
    members = tuple(
        TrajectorySummary(f"{uid}_{session}_0", 3, response_len, min_version=version, max_version=6)
        for session, response_len in enumerate(response_lens)
    )
    return FinishedGroup(uid, global_step=5, source_index="0", trajectories=members)


def test_a_batch_has_all_trajectories_of_the_groups_with_the_tags_that_verl_reads(world: World) -> None:
    buffer = world.buffer(Ref(TakeResult(groups=(group("b", 10, 20), group("a", 30)))))
    batch, metrics = buffer.sample(STEP, "train", 2)
    assert (batch.partition_id, batch.keys) == ("train", ["b_0_0", "b_1_0", "a_0_0"])
    assert [tag["seq_len"] for tag in batch.tags] == [13, 23, 33]
    assert batch.tags[0] == {
        "status": "success",
        "prompt_len": 3,
        "response_len": 10,
        "seq_len": 13,
        "global_steps": 5,
        "min_global_steps": 4,
        "max_global_steps": 6,
    }
    assert metrics
    assert world.refills == []
    assert buffer.version_spans == {"b_0_0": [], "b_1_0": [], "a_0_0": []}


def test_a_batch_is_an_event_with_its_prompts_and_their_rows(world: World, tmp_path: Path) -> None:
    world.events = EventWriter(tmp_path, "trainer")
    world.buffer(Ref(TakeResult(groups=(group("b", 10, 20), group("a", 30))))).sample(STEP, "train", 2)
    (taken,) = (event for event in EventReader(tmp_path).read() if isinstance(event, BatchTaken))
    assert (taken.step, taken.uids, taken.source_index) == (STEP, ["b", "a"], ["0", "0"])
    assert (taken.deferrals, taken.interruptions) == ([0, 0], [0, 0])


def test_the_rows_of_taken_prompts_are_cleared_but_not_their_trajectories(world: World) -> None:
    world.buffer(Ref(TakeResult(groups=(group("b", 1), group("a", 1))))).sample(STEP, "train", 2)
    assert world.tq.cleared == [("train", ["b", "a"])]


def test_dropped_prompts_are_replaced_and_the_same_batch_is_asked_for_again(world: World) -> None:
    buffer = world.buffer(Ref(TakeResult(num_missing=2)), Ref(TakeResult(groups=(group("a", 1), group("b", 1)))))
    batch, _ = buffer.sample(STEP, "train", 2)
    assert world.refills == [2]
    assert cast("Any", buffer)._manager.calls == [(2, 100.0), (2, 100.0)]
    assert len(batch.keys) == 2


class Log:
    """A log of rollouts with one batch; its prompts are still to be admitted `num_coming` times."""

    def __init__(self, *uids: str, num_coming: int) -> None:
        self.uids, self.num_coming, self.steps = uids, num_coming, []

    def wanted(self, step: int) -> tuple[str, ...]:
        return self.uids if step == STEP else ()

    def require_coming(self, step: int) -> None:
        self.num_coming -= 1
        if self.num_coming < 0:
            self.uids = ()

    def taken(self, step: int, groups: tuple[FinishedGroup, ...]) -> int:
        self.steps.append((step, [group.uid for group in groups]))
        return 3 if self.uids else 0


@pytest.mark.parametrize(("num_coming", "refills", "replayed"), [(2, [2, 1], 3), (1, [2], None)])
def test_a_batch_of_the_log_is_asked_for_by_name_until_a_prompt_of_it_cannot_come(
    world: World, num_coming: int, refills: list[int], replayed: int | None
) -> None:
    answers = [Ref(TakeResult(num_missing=2)), Ref(TakeResult(num_missing=1)), Ref(TakeResult(groups=(group("a", 1),)))]
    buffer = world.buffer(*answers)
    log: Any = Log("a", num_coming=num_coming)
    buffer._log = log
    _, metrics = buffer.sample(STEP, "train", 1)
    assert world.refills == refills
    assert cast("Any", buffer)._manager.wanted == [("a",), ("a",), ("a",) if replayed else ()]
    assert metrics.get(REPLAYED) == replayed
    assert log.steps == [(STEP, ["a"])]


def test_every_worker_is_told_what_it_has_to_hold_back(world: World) -> None:
    deferred = (Claim("u8", 3, "w0", 2, 1, 1),)
    buffer = world.buffer(Ref(TakeResult(groups=(group("a", 1),), deferred=deferred)))
    buffer.sample(STEP, "train", 1)
    assert world.held == ["u8", "u8"]
    assert buffer.num_deferred == 1


@pytest.mark.parametrize(
    ("past", "oldest"), [("drop", STEP - 2), ("restart", STEP - 2), ("finish", None), ("mask", None), ("train", None)]
)
def test_workers_end_what_would_be_too_old_for_the_next_update(world: World, past: str, oldest: int | None) -> None:
    """Weights of version STEP - 1 are trained now, those of STEP next; the tokens of this batch are old enough."""
    world.tail = TailConfig(max_staleness=2, past_staleness=past)
    world.buffer(Ref(TakeResult(groups=(group("a", 1, version=STEP - 3),)))).sample(STEP, "train", 1)
    assert world.oldest == ([] if oldest is None else [oldest, oldest])


def test_tokens_past_the_bound_are_counted_whether_they_are_masked_or_trained(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def mask(trajectories: list[TrajectorySummary], *, oldest_version: int, **_: Any) -> StaleTokens:
        asked.append(oldest_version)
        return StaleTokens(num_masked=3, num_trained=5)

    monkeypatch.setattr(replay_buffer, "mask_stale_tokens", mask)
    spans = (VersionSpan(STEP - 4, 7), VersionSpan(STEP - 3, 11))
    member = replace(group("a", 18).trajectories[0], version_spans=spans)
    found = Ref(TakeResult(groups=(FinishedGroup("a", 5, "0", (member,)),)))
    counted = []
    for past in ("mask", "train"):
        world.tail = TailConfig(max_staleness=2, past_staleness=past)
        _, metrics = world.buffer(found).sample(STEP, "train", 1)
        counted.append((metrics["partial_rollout/masked_tokens"], metrics["partial_rollout/stale_tokens_trained"]))
    assert asked == [STEP - 1 - 2]
    assert counted == [(3, 5), (0, 7)]


def test_rows_of_groups_that_are_too_old_are_gone_before_the_queue_lets_them_begin_again(world: World) -> None:
    world.tail = TailConfig(max_staleness=2, past_staleness="restart")
    batch, late = group("a", 1, version=STEP - 3), group("b", 1, 2, version=STEP - 4)
    buffer = world.buffer(Ref(TakeResult(groups=(batch,), expired=(late,))))
    seen: list[tuple[str, list[str]]] = []
    cast("Any", buffer)._manager.on_discard = lambda: seen.extend(world.tq.cleared)
    buffer.sample(STEP, "train", 1)
    assert seen == [("train", ["b_0_0", "b_1_0"])]
    assert world.tq.cleared[1:] == [("train", ["gone"]), ("train", ["a"])]


def test_endless_drops_end_the_run_with_their_reason(world: World) -> None:
    buffer = world.buffer(Ref(TakeResult(num_missing=2)))
    with pytest.raises(AgentLoopBroken, match=r"6 prompts.*'agent_loop_failed': 6.*u3: RuntimeError: no"):
        buffer.sample(STEP, "train", 2)
    assert sum(world.refills) == MAX_REFILL_BATCHES * 2


def filtered(num: int, num_failed: int = 0) -> Ref:
    return Ref(TakeResult(num_missing=num + num_failed, num_filtered=num, filtered={0.0: num}))


def test_groups_without_spread_are_replaced_without_end_and_warned_of_at_each_doubling(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_buffer, "logger", logging.getLogger("test"))
    caplog.set_level(logging.WARNING)  # a library may have raised the root logger's
    buffer = world.buffer(*[filtered(2)] * 12, Ref(TakeResult(groups=(group("a", 1), group("b", 1)))))
    _, metrics = buffer.sample(STEP, "train", 2)
    assert world.refills == [2] * 12
    assert metrics["training/filter_groups/evicted_samples"] == 24
    assert metrics["_dapo_filtered_reward_counts"] == {0.0: 24}
    texts = [record.getMessage() for record in caplog.records if record.name == "test"]
    assert [text.split("has dropped ")[1].split()[0] for text in texts] == ["6", "12", "24"]
    assert "(6 at 0)" in texts[0]
    assert f"step {STEP} waits for 2 prompt groups" in texts[0]


def test_a_batch_without_filtered_groups_has_no_such_metric(world: World) -> None:
    _, metrics = world.buffer(Ref(TakeResult(groups=(group("a", 1),)))).sample(STEP, "train", 1)
    assert not any("filter" in name for name in metrics)


def test_a_broken_agent_loop_ends_the_run_also_among_groups_without_spread(world: World) -> None:
    with pytest.raises(AgentLoopBroken, match="6 prompts were dropped"):
        world.buffer(filtered(3, num_failed=1)).sample(STEP, "train", 2)
    assert len(world.refills) == MAX_REFILL_BATCHES * 2


@pytest.mark.parametrize(
    ("outcome", "error", "message"),
    [
        (EngineDead("replica 1 is gone"), EngineDead, "replica 1 is gone"),
        (None, ActorLost, "agent-loop worker 1 ended its claim loop"),
    ],
)
def test_a_claim_loop_that_ends_while_a_batch_is_waited_for_raises(
    world: World, outcome: Exception | None, error: type[Exception], message: str
) -> None:
    loops = {Ref(ready=False): "agent-loop worker 0", Ref(outcome): "agent-loop worker 1"}
    with pytest.raises(error, match=message):
        world.buffer(Ref(ready=False), loops=loops).sample(STEP, "train", 2)
    assert world.ray.now_s == 0.0
    assert world.tq.cleared == []


class Engines:
    """One engine, which has died; `batch` is there when it is back."""

    def __init__(self, batch: Ref) -> None:
        self.deaths, self._batch = [Ref("replica 0 died")], batch

    def look(self, ready: list[Ref]) -> None:
        if self.deaths[0] in ready:
            self.deaths, self._batch.ready = [Ref(ready=False)], True


def test_an_engine_that_dies_while_a_batch_is_waited_for_is_brought_back(world: World) -> None:
    answer = Ref(TakeResult(groups=(group("a", 1),)), ready=False)
    buffer = world.buffer(answer)
    buffer._engines = cast("Any", Engines(answer))
    batch, _ = buffer.sample(STEP, "train", 1)
    assert batch.keys == ["a_0_0"]
    assert world.ray.now_s == 0.0


def test_an_engine_that_dies_while_validation_is_waited_for_is_brought_back(world: World) -> None:
    answer = Ref(ready=False)
    buffer = world.buffer(answer)
    agent_loops = buffer._agent_loops
    agent_loops.engines = cast("Any", Engines(answer))
    worker = cast("Any", SimpleNamespace())
    agent_loops._validations = [agent_loop_manager._Validation(0, worker, cast("Any", None), cast("Any", answer))]
    agent_loops.wait_validation(100.0)
    assert answer.ready
    assert world.ray.now_s == 0.0


def test_a_manager_that_never_answers_is_told_after_the_deadline(world: World) -> None:
    with pytest.raises(WaitTimeout, match="trainer waited 180 s for the prompt manager to answer"):
        world.buffer(Ref(ready=False)).sample(STEP, "train", 2)


def test_a_dead_transfer_queue_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(world.tq, "kv_clear", lambda keys, partition_id: never.wait())
    buffer = world.buffer(Ref(TakeResult(groups=(group("a", 1),))), call_s=0.01)
    with pytest.raises(TransferQueueSilent, match="TransferQueue to clear 1 rows of prompts that have left"):
        buffer.sample(STEP, "train", 1)
    never.set()


@pytest.mark.parametrize("answers", [True, False])
def test_of_dataloader_and_transfer_queue_the_silent_one_is_told(
    answers: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(PPOTrainer, "_add_prompts_to_generate", lambda *_: never.wait())
    monkeypatch.setattr(trainer_module, "ADMIT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(world.tq, "kv_list", dict if answers else never.wait)
    buffer = world.buffer(call_s=LIMIT_S if answers else 0.01)
    trainer = bare_trainer(_last_checkpoint=SimpleNamespace(step=STEP), replay_buffer=buffer)
    told = "the dataloader and TransferQueue to take in prompts" if answers else "TransferQueue to list its rows"
    with pytest.raises(WaitTimeout, match=f"trainer waits for {told}") as raised:
        trainer._add_prompts_to_generate(4)
    assert isinstance(raised.value, TransferQueueSilent) == (not answers)
    assert trainer._last_checkpoint.step is None  # prompts may have been lost on their way
    never.set()


def test_a_wait_as_long_as_those_before_is_no_warning(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A sound run with long responses waits for minutes in each step; its log says so, its warnings do not."""
    monkeypatch.setattr(replay_buffer, "REPORT_INTERVAL_S", 10.0)
    caplog.set_level(logging.INFO, logger=replay_buffer.__name__)
    taken = TakeResult(groups=(group("a", 1),))
    buffer = world.buffer(*(cast("Any", LateRef(taken, world.ray, after_s)) for after_s in (25.0, 25.0, 75.0)))
    told: list[list[tuple[str, int]]] = []
    for step in range(3):
        caplog.clear()
        buffer.sample(STEP + step, "train", 1)
        reports = [each for each in caplog.records if each.name == replay_buffer.__name__]
        told.append([(each.levelname, int(each.getMessage().split()[3])) for each in reports])
    assert told[0] == [("WARNING", 10), ("WARNING", 20), ("WARNING", 30)]
    assert told[1] == [("INFO", 10), ("INFO", 20), ("INFO", 30)]
    usual = [("INFO", seconds) for seconds in range(10, 70, 10)]
    assert told[2] == [*usual, ("WARNING", 70), ("WARNING", 80)]


def test_a_wait_that_is_shorter_than_the_interval_is_looked_at_in_its_middle(world: World) -> None:
    """Slots that were all in use may be free at the end of the wait, and a run of short steps would never get more."""
    taken, seconds = TakeResult(groups=(group("a", 1),)), (2.0, 2.0, 10.0, 10.0)
    buffer = world.buffer(*(cast("Any", LateRef(taken, world.ray, after_s)) for after_s in seconds))
    looks: list[list[float]] = []
    for step in range(len(seconds)):
        began_s, found = world.ray.now_s, list[float]()
        buffer._look = lambda began_s=began_s, found=found: found.append(world.ray.now_s - began_s)
        buffer.sample(STEP + step, "train", 1)
        looks.append(found)
    assert looks == [[5.0], [2.5], [1.25, 6.25, 11.25], [5.0, 10.0]]
