"""The prompt queue: conservation, exactly once, order, stale claims, snapshot and restore."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from partial_rollout.core.lifecycle import TRANSITIONS, Event, State, next_state
from partial_rollout.core.queue import AGENT_LOOP_FAILED, PromptQueue
from partial_rollout.core.tail import Partial, Reorder
from partial_rollout.errors import (
    CapacityExceeded,
    ConfigError,
    DuplicateUid,
    IllegalTransition,
    InternalError,
    StaleClaim,
)
from partial_rollout.types import Claim, PromptMeta, QueueSnapshot, TakeResult, TrajectorySummary, VersionSpan

GROUP = 2


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def prompts(*uids: str, n: int = GROUP) -> list[PromptMeta]:
    return [PromptMeta(uid, n, global_step=1, source_index=f"row-{uid}") for uid in uids]


def trajectories(uid: str, n: int = GROUP) -> list[TrajectorySummary]:
    return [
        TrajectorySummary(f"{uid}_{i}_0", prompt_len=3, response_len=5, min_version=0, max_version=1) for i in range(n)
    ]


def make_queue(*uids: str, capacity: int = 16, max_attempts: int = 2) -> PromptQueue:
    queue = PromptQueue(Partial(capacity), max_attempts, ManualClock())
    queue.admit(prompts(*uids))
    return queue


def claim_all(queue: PromptQueue, worker_id: str = "w0") -> list[Claim]:
    return queue.claim(worker_id, free_slots=1000)


def uids(claims: list[Claim]) -> list[str]:
    return [claim.uid for claim in claims]


# ---- table ----


@pytest.mark.parametrize(("state", "event"), [p for p in itertools.product(State, Event) if p not in TRANSITIONS])
def test_event_without_row_is_illegal_and_named(state: State, event: Event) -> None:
    with pytest.raises(IllegalTransition, match=rf"'p7'.*'{event.value}'.*'{state.value}'"):
        next_state("p7", state, event)


# ---- admit ----


@pytest.mark.parametrize("again", [["b", "a"], ["c", "c"]])
def test_admit_is_all_or_nothing_on_a_duplicate(again: list[str]) -> None:
    queue = make_queue("a")
    with pytest.raises(DuplicateUid):
        queue.admit(prompts(*again))
    assert queue.statistics().admitted == 1
    assert uids(claim_all(queue)) == ["a"]


def test_taken_and_dropped_uids_are_never_admitted_again() -> None:
    queue = make_queue("a", "b")
    first, second = claim_all(queue)
    queue.finish(first, trajectories("a"))
    queue.take(1)
    queue.drop(second, "prompt_too_long")
    for uid in ("a", "b"):
        with pytest.raises(DuplicateUid, match=uid):
            queue.admit(prompts(uid))


def test_memory_of_uids_is_bounded_by_the_capacity() -> None:
    queue = make_queue(capacity=2)
    for uid in ("a", "b", "c"):
        queue.admit(prompts(uid))
        queue.drop(claim_all(queue)[0], "x")
    with pytest.raises(DuplicateUid, match="b"):
        queue.admit(prompts("b"))
    queue.admit(prompts("a"))
    assert len(msgspec.json.encode(queue.snapshot())) < 400


def test_admit_beyond_capacity_changes_nothing_and_room_comes_back_with_take() -> None:
    queue = make_queue("a", "b", capacity=2)
    with pytest.raises(CapacityExceeded, match="admitting 1 prompts with 2 in flight exceeds capacity 2"):
        queue.admit(prompts("c"))
    queue.finish(queue.claim("w0", GROUP)[0], trajectories("a"))
    queue.take(1)
    queue.admit(prompts("c"))
    assert queue.statistics().pending == 2


def test_values_below_one_are_refused() -> None:
    queue = make_queue()
    with pytest.raises(ConfigError, match="num_trajectories=0"):
        queue.admit(prompts("a", n=0))
    with pytest.raises(ConfigError, match="num_groups=0"):
        queue.take(0)
    with pytest.raises(ConfigError, match="capacity=0"):
        PromptQueue(Partial(0), 1, ManualClock())


# ---- claim order and slots ----


def test_claims_are_first_in_first_out_and_stop_at_the_slots() -> None:
    queue = make_queue("a", "b", "c")
    assert uids(queue.claim("w0", free_slots=5)) == ["a", "b"]
    assert queue.claim("w0", free_slots=1) == []
    assert uids(queue.claim("w1", free_slots=2)) == ["c"]


def test_claim_does_not_overtake_a_head_that_does_not_fit() -> None:
    queue = make_queue()
    queue.admit(prompts("wide", n=4) + prompts("narrow", n=1))
    assert queue.claim("w0", free_slots=3) == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_given_back_prompts_are_first_and_keep_their_order(order: tuple[int, ...]) -> None:
    queue = make_queue("a", "b", "c", "d")
    claims = queue.claim("w0", 3 * GROUP)
    for index in order:
        queue.give_back(claims[index])
    assert uids(claim_all(queue)) == ["a", "b", "c", "d"]


def test_released_worker_loses_only_its_own_claims() -> None:
    queue = make_queue("a", "b", "c")
    lost, kept = queue.claim("lost", 2 * GROUP), queue.claim("kept", GROUP)
    assert queue.release_worker("lost") == ["a", "b"]
    assert queue.release_worker("lost") == []
    queue.finish(kept[0], trajectories("c"))
    with pytest.raises(StaleClaim):
        queue.finish(lost[0], trajectories("a"))
    assert [(claim.uid, claim.attempt) for claim in claim_all(queue)] == [("a", 2), ("b", 2)]


@pytest.mark.parametrize("change", [{"uid": "b"}, {"worker_id": "other"}, {"attempt": 9}])
def test_claim_that_was_not_handed_out_is_refused(change: dict[str, Any]) -> None:
    queue = make_queue("a", "b")
    (claim,) = queue.claim("w0", GROUP)
    with pytest.raises(StaleClaim):
        queue.give_back(dataclasses.replace(claim, **change))
    assert queue.statistics().ongoing == 1


# ---- failures ----


def test_failed_prompt_is_tried_again_then_dropped() -> None:
    queue = make_queue("a", max_attempts=2)
    assert queue.fail(claim_all(queue)[0]) is True
    (again,) = claim_all(queue)
    assert again.attempt == 2
    assert queue.fail(again) is False
    now = queue.statistics()
    assert (now.dropped, now.failed_attempts, now.in_flight) == ({AGENT_LOOP_FAILED: 1}, 1, 0)


def test_give_back_and_lost_workers_do_not_use_up_attempts() -> None:
    queue = make_queue("a", max_attempts=2)
    queue.give_back(claim_all(queue)[0])
    for _ in range(5):
        claim_all(queue)
        queue.release_worker("w0")
    assert queue.fail(claim_all(queue)[0]) is True


# ---- finish and take ----


@pytest.mark.parametrize("group", [trajectories("a", 1), trajectories("a", 1) * 2, []])
def test_group_that_is_not_whole_is_refused_and_the_claim_stays(group: list[TrajectorySummary]) -> None:
    queue = make_queue("a")
    (claim,) = claim_all(queue)
    with pytest.raises(InternalError, match="'a'.*expected at least 2"):
        queue.finish(claim, group)
    queue.finish(claim, trajectories("a"))
    assert queue.statistics().done == 1


def test_take_gives_whole_batches_oldest_finished_first() -> None:
    queue = make_queue("a", "b", "c", "d")
    claims = {claim.uid: claim for claim in claim_all(queue)}
    for uid in ("c", "a", "b"):
        queue.finish(claims[uid], trajectories(uid))
    assert [group.uid for group in queue.take(2).groups] == ["c", "a"]
    assert queue.take(2) == TakeResult()
    assert queue.take(3) == TakeResult(num_missing=1)
    group = queue.take(1).groups[0]
    assert (group.uid, group.global_step, group.source_index) == ("b", 1, "row-b")
    assert group.trajectories == tuple(trajectories("b"))


# ---- visibility, snapshot ----


def test_oldest_ongoing_names_prompt_worker_and_age() -> None:
    clock = ManualClock()
    queue = PromptQueue(Partial(8), 2, clock)
    queue.admit(prompts("a", "b"))
    (first,) = queue.claim("w0", GROUP)
    clock.now_s = 7.0
    queue.claim("w1", GROUP)
    clock.now_s = 10.0
    now = queue.statistics()
    assert (now.oldest_ongoing_uid, now.oldest_ongoing_worker, now.oldest_ongoing_s) == ("a", "w0", 10.0)
    assert now.claimed_trajectories == 2 * GROUP
    queue.drop(first, "x")
    assert queue.statistics().oldest_ongoing_s == 3.0


def test_restore_puts_ongoing_first_and_keeps_history() -> None:
    queue = make_queue("a", "b", "c", "d", "e", "f")
    a, b, c, d = queue.claim("w0", 4 * GROUP)
    queue.finish(a, trajectories("a"))
    queue.finish(b, trajectories("b"))
    queue.drop(c, "prompt_too_long")
    assert queue.take(1).groups[0].uid == "a"
    restored = PromptQueue.restore(queue.snapshot(), Partial(16), 2, ManualClock())
    now = restored.statistics()
    assert (now.admitted, now.pending, now.ongoing, now.done, now.taken) == (6, 3, 0, 1, 1)
    assert now.dropped == {"prompt_too_long": 1}
    assert now.conserved
    with pytest.raises(StaleClaim):
        restored.finish(d, trajectories("d"))
    assert uids(claim_all(restored)) == ["d", "e", "f"]
    assert restored.take(1).groups[0].uid == "b"
    for uid in ("b", "d", "e"):
        with pytest.raises(DuplicateUid):
            restored.admit(prompts(uid))


@pytest.mark.parametrize(
    "damage",
    [
        {"pending": ()},
        {"done": ()},
        {"taken": 0},
        {"dropped": {}},
        {"admitted": 5},
        {"pending": tuple(prompts("e", "e"))},
    ],
)
def test_restore_refuses_a_snapshot_that_does_not_add_up(damage: dict[str, Any]) -> None:
    queue = make_queue("a", "b", "c", "d", "e", "f")
    a, b, c, _ = queue.claim("w0", 4 * GROUP)
    queue.finish(a, trajectories("a"))
    queue.finish(b, trajectories("b"))
    queue.drop(c, "prompt_too_long")
    queue.take(1)
    with pytest.raises(InternalError, match="does not add up"):
        PromptQueue.restore(dataclasses.replace(queue.snapshot(), **damage), Partial(16), 2, ManualClock())


def test_snapshot_without_some_prompts_counts_them_as_dropped() -> None:
    queue = make_queue("a", "b", "c", "d")
    a, b = queue.claim("w0", 2 * GROUP)
    queue.finish(a, trajectories("a"))
    queue.fail(b)
    (b,) = queue.claim("w0", GROUP)
    snapshot = queue.snapshot().without({"a", "b", "d", "unknown"}, "lost")
    restored = PromptQueue.restore(snapshot, Partial(16), 2, ManualClock())
    now = restored.statistics()
    assert (now.admitted, now.pending, now.done, now.dropped) == (4, 1, 1, {"lost": 2})
    assert uids(claim_all(restored)) == ["c"]
    assert snapshot.failures == {}


def test_a_refill_is_admitted_beyond_the_capacity_and_nothing_else() -> None:
    queue = make_queue(*"abcdefghij")
    claim_all(queue)
    snapshot = dataclasses.replace(queue.snapshot(), ongoing=(), deferred=queue.snapshot().ongoing)
    queue = PromptQueue.restore(snapshot, Reorder(2, 3, 1), 1, ManualClock())
    assert queue.begin_round().kind == "long"
    first, second = claim_all(queue)
    queue.finish(first, trajectories(first.uid))
    queue.drop(second, "prompt_too_long")
    with pytest.raises(CapacityExceeded):
        queue.admit(prompts("x"))
    assert queue.take(2) == TakeResult(num_missing=1)
    with pytest.raises(CapacityExceeded):
        queue.admit(prompts("x", "y"))
    queue.admit(prompts("x"))
    with pytest.raises(CapacityExceeded, match="admitting 1 prompts with 10 in flight exceeds capacity 5"):
        queue.admit(prompts("y"))
    (third,) = claim_all(queue)
    queue.finish(third, trajectories(third.uid))
    assert [group.uid for group in queue.take(2).groups] == [first.uid, "x"]


def test_restore_keeps_used_attempts() -> None:
    queue = make_queue("a", max_attempts=2)
    queue.fail(claim_all(queue)[0])
    restored = PromptQueue.restore(queue.snapshot(), Partial(16), 2, ManualClock())
    assert restored.fail(claim_all(restored)[0]) is False


def test_snapshot_owns_rows_of_prompts_in_flight_and_trajectories_of_done_groups() -> None:
    queue = make_queue("a", "b", "c", "d")
    a, b, _ = queue.claim("w0", 3 * GROUP)
    for claim in (a, b):
        queue.finish(claim, trajectories(claim.uid))
    queue.take(1)
    assert queue.snapshot().owned_keys() == {"b", "c", "d", "b_0_0", "b_1_0"}


def test_snapshot_survives_a_checkpoint_as_json() -> None:
    queue = make_queue("a", "b", "c")
    a, b = queue.claim("w0", 2 * GROUP)
    queue.finish(a, [dataclasses.replace(t, version_spans=(VersionSpan(1, 5),)) for t in trajectories("a")])
    queue.fail(b)
    snapshot = queue.snapshot()
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=QueueSnapshot) == snapshot


# ---- property test ----


class QueueMachine(RuleBasedStateMachine):
    """Any sequence of events against a model that keeps one plain dict: uid -> state."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PromptQueue(Partial(12), max_attempts=2, clock=ManualClock())
        self.model: dict[str, str] = {}
        self.order: list[str] = []
        self.claims: list[Claim] = []
        self.ended: list[Claim] = []
        self.trained: list[str] = []

    def end(self, claim: Claim, state: str) -> None:
        self.claims.remove(claim)
        self.ended.append(claim)
        self.model[claim.uid] = state

    @rule(sizes=st.lists(st.integers(1, 3), max_size=5))
    def admit(self, sizes: list[int]) -> None:
        new = [PromptMeta(f"p{len(self.model) + i}", n, global_step=0) for i, n in enumerate(sizes)]
        if len(new) > self.queue.policy.capacity - self.queue.num_in_flight:
            with pytest.raises(CapacityExceeded):
                self.queue.admit(new)
            return
        self.queue.admit(new)
        self.model |= {meta.uid: "pending" for meta in new}
        self.order += [meta.uid for meta in new]

    @rule(worker=st.sampled_from(["w0", "w1"]), free_slots=st.integers(0, 6))
    def claim(self, worker: str, free_slots: int) -> None:
        expected = [uid for uid in self.order if self.model[uid] == "pending"]
        claims = self.queue.claim(worker, free_slots)
        assert uids(claims) == expected[: len(claims)]
        assert sum(claim.num_trajectories for claim in claims) <= free_slots
        for claim in claims:
            self.model[claim.uid] = "ongoing"
        self.claims += claims

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), event=st.sampled_from(["finish", "fail", "drop", "give_back"]))
    def report(self, data: st.DataObject, event: str) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        if event == "finish":
            self.queue.finish(claim, trajectories(claim.uid, claim.num_trajectories))
            self.end(claim, "done")
        elif event == "fail":
            self.end(claim, "pending" if self.queue.fail(claim) else "dropped")
        elif event == "drop":
            self.queue.drop(claim, "reason")
            self.end(claim, "dropped")
        else:
            self.queue.give_back(claim)
            self.end(claim, "pending")

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def stale_report_changes_nothing(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.ended))
        before = self.queue.snapshot()
        for report in (
            lambda: self.queue.finish(claim, trajectories(claim.uid, claim.num_trajectories)),
            lambda: self.queue.fail(claim),
            lambda: self.queue.drop(claim, "reason"),
            lambda: self.queue.give_back(claim),
        ):
            with pytest.raises(StaleClaim):
                report()
        assert self.queue.snapshot() == before

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def release(self, worker: str) -> None:
        lost = [claim for claim in self.claims if claim.worker_id == worker]
        assert self.queue.release_worker(worker) == uids(lost)
        for claim in lost:
            self.end(claim, "pending")

    @rule(num_groups=st.integers(1, 4))
    def take(self, num_groups: int) -> None:
        result = self.queue.take(num_groups)
        assert len(result.groups) in (0, num_groups)
        self.trained += [group.uid for group in result.groups]
        self.model |= {group.uid: "taken" for group in result.groups}

    @rule()
    def restart(self) -> None:
        before = self.queue.statistics()
        for claim in list(self.claims):
            self.end(claim, "pending")
        snapshot = self.queue.snapshot()
        self.queue = PromptQueue.restore(snapshot, Partial(12), 2, ManualClock())
        after = self.queue.statistics()
        assert (after.admitted, after.in_flight, after.taken) == (before.admitted, before.in_flight, before.taken)
        self.order = [meta.uid for meta in snapshot.ongoing + snapshot.pending]
        assert [meta.uid for meta in self.queue.snapshot().pending] == self.order

    @invariant()
    def conserved_and_each_uid_in_one_state(self) -> None:
        now, counts = self.queue.statistics(), Counter(self.model.values())
        assert now.conserved, now
        seen = (now.pending, now.ongoing, now.done, now.taken, now.num_dropped)
        assert seen == tuple(counts[state] for state in ("pending", "ongoing", "done", "taken", "dropped"))
        assert now.claimed_trajectories == sum(claim.num_trajectories for claim in self.claims)

    @invariant()
    def no_prompt_is_trained_twice(self) -> None:
        assert len(self.trained) == len(set(self.trained))


QueueMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestQueueMachine = QueueMachine.TestCase
