"""The prompt queue: conservation, exactly once, order, stale claims, snapshot and restore."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from partial_rollout.core.queue import lifecycle
from partial_rollout.core.queue.ledger import WORKER_LOST
from partial_rollout.core.queue.lifecycle import MAX_LOSSES, TRANSITIONS, Event, State, next_state
from partial_rollout.core.queue.queue import AGENT_LOOP_FAILED, PromptQueue
from partial_rollout.core.queue.staleness import StalenessBound
from partial_rollout.core.queue.tail import Partial, Reorder
from partial_rollout.core.queue.whole import WholeQueue
from partial_rollout.errors import (
    CapacityExceeded,
    ConfigError,
    DuplicateUid,
    IllegalTransition,
    InternalError,
    StaleClaim,
)
from partial_rollout.types import QueueSnapshot, ReleaseResult, TakeResult, TrajectorySummary, VersionSpan
from tests.unit.core.queue.queues import GROUP, ManualClock, claim_all, make_queue, prompts, trajectories, uids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from partial_rollout.types import Claim

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


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_worker_is_called_when_a_claim_would_give_it_something_and_only_then(size: int) -> None:
    for free_slots in range(-1, 5):
        queue = PromptQueue(Partial(1), 2, ManualClock())
        assert not queue.can_claim("w0", free_slots)
        queue.admit(prompts("a", n=size))
        is_called = queue.can_claim("w0", free_slots)
        assert is_called == (free_slots >= size) == bool(queue.claim("w0", free_slots))


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
    queue.fence_worker("lost")
    assert queue.release_worker("lost") == ReleaseResult(given_back=("a", "b"))
    assert queue.release_worker("lost") == ReleaseResult()
    queue.finish(kept[0], trajectories("c"))
    with pytest.raises(StaleClaim):
        queue.finish(lost[0], trajectories("a"))
    assert [(claim.uid, claim.attempt) for claim in claim_all(queue)] == [("a", 2), ("b", 2)]


def test_a_prompt_whose_lost_worker_has_left_tokens_goes_on_from_them_and_is_as_old_as_they_are() -> None:
    queue = make_queue("a", "b")
    queue.claim("lost", 2 * GROUP)
    queue.version = 3
    queue.release_worker("lost", ["a"])
    assert queue.snapshot().begun == {"a": 0}
    assert [(claim.uid, claim.goes_on) for claim in claim_all(queue)] == [("a", True), ("b", False)]
    assert queue.snapshot().begun == {"a": 0, "b": 3}
    queue.release_worker("w0")  # the next loss finds none
    assert queue.snapshot().begun == {}
    assert not any(claim.goes_on for claim in claim_all(queue))


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


def test_give_back_lost_workers_and_workers_that_stop_do_not_use_up_attempts() -> None:
    queue = make_queue("a", max_attempts=2)
    queue.give_back(claim_all(queue)[0])
    for _ in range(2 * MAX_LOSSES):
        claim_all(queue)
        queue.release_worker("w0")
    for _ in range(MAX_LOSSES - 1):
        assert lose(queue, "w0", claim_all(queue)).dropped == ()
    assert queue.fail(claim_all(queue)[0]) is True


def test_a_lost_worker_reports_in_vain_until_it_is_released_and_nobody_else_has_its_prompts() -> None:
    """The rows of a lost worker are cleared meanwhile."""
    queue = make_queue("a", "b")
    a, b = claim_all(queue, "lost")
    assert queue.fence_worker("lost") == [a, b]
    with pytest.raises(StaleClaim):
        queue.finish(a, trajectories("a"))
    with pytest.raises(StaleClaim):
        queue.give_back(b)
    assert claim_all(queue, "w1") == []
    queue.release_worker("lost")
    for claim in claim_all(queue, "lost"):  # a new process of this name
        queue.finish(claim, trajectories(claim.uid))
    assert queue.statistics().done == 2


# ---- prompts that kill their workers ----


def lose(queue: PromptQueue, worker_id: str, claims: Sequence[Claim]) -> ReleaseResult:
    assert queue.fence_worker(worker_id) == list(claims)
    return queue.release_worker(worker_id)


def make_suspects(*suspects: str, others: tuple[str, ...] = ()) -> PromptQueue:
    """Prompts that have lost all workers but the last one, ahead of others that have lost none."""
    queue = make_queue(*suspects)
    for _ in range(MAX_LOSSES - 1):
        lose(queue, "before", claim_all(queue, "before"))
    queue.admit(prompts(*others))
    return queue


def test_a_prompt_is_dropped_with_the_last_worker_that_it_may_lose_and_its_neighbours_go_on() -> None:
    queue = make_suspects("a", "b", others=("c",))
    claims = queue.claim("w0", 3 * GROUP)
    assert [(claim.uid, claim.attempt) for claim in claims] == [("a", MAX_LOSSES), ("c", 1)]
    assert lose(queue, "w0", claims) == ReleaseResult(given_back=("c",), dropped=(claims[0],))
    now = queue.statistics()
    assert (now.dropped, now.pending, now.conserved) == ({WORKER_LOST: 1}, 2, True)
    assert queue.take(3) == TakeResult(num_missing=1)
    with pytest.raises(StaleClaim):
        queue.give_back(claims[0])


def test_a_worker_with_a_suspect_passes_over_the_others_which_keep_their_place() -> None:
    queue = make_suspects("a", "b", "c", others=("d", "e"))
    assert uids(queue.claim("w0", 2 * GROUP)) == ["a", "d"]
    assert uids(queue.claim("w1", GROUP)) == ["b"]
    assert queue.can_claim("w0", GROUP)
    assert uids(queue.claim("w2", 2 * GROUP)) == ["c", "e"]


def test_a_suspect_starts_beside_prompts_that_are_none() -> None:
    queue = make_suspects("a", others=("b",))
    (a,), (b,) = queue.claim("w1", GROUP), queue.claim("w0", GROUP)
    assert (a.uid, b.uid) == ("a", "b")
    queue.give_back(a)
    assert uids(queue.claim("w0", GROUP)) == ["a"]


@pytest.mark.parametrize("end", ["finish", "fail", "drop", "give_back", "lose"])
def test_a_suspect_waits_for_the_end_of_its_workers_other_one_and_no_longer(end: str) -> None:
    queue = make_suspects("a", "b")
    (a,) = queue.claim("w0", 2 * GROUP)
    assert not queue.can_claim("w0", GROUP)
    assert queue.claim("w0", GROUP) == []
    assert queue.has_startable_suspect
    assert queue.next_group_size == GROUP  # some other worker may have it
    if end == "finish":
        queue.finish(a, trajectories("a"))
    elif end == "lose":
        lose(queue, "w0", [a])
    elif end == "drop":
        queue.drop(a, "bad_data")
    else:
        getattr(queue, end)(a)
    assert uids(queue.claim("w0", GROUP)) == (["a"] if end in ("fail", "give_back") else ["b"])


def begin_round_of_suspects() -> PromptQueue:
    """A round of `reorder` that has begun: `a` and `b` are suspects, `x` and `y` are not."""
    queue = PromptQueue(Reorder(2, 4, max_deferrals=9), 2, ManualClock())
    queue.begin_round()
    queue.admit(prompts("a", "b", "x", "y"))
    for _ in range(MAX_LOSSES - 1):
        lose(queue, "before", queue.claim("before", 2 * GROUP))
    return queue


def claim_one_suspect_each(queue: PromptQueue) -> dict[str, Claim]:
    """Claims by uid, after `w0` has claimed the first prompt and `w1` the others."""
    return {claim.uid: claim for claim in (*queue.claim("w0", GROUP), *claim_all(queue, "w1"))}


def test_suspects_are_not_charged_where_nobody_can_tell_which_one_has_killed_their_worker() -> None:
    """One is deferred, and so the worker is given another one; then both go on."""
    queue = begin_round_of_suspects()
    claims = claim_one_suspect_each(queue)
    assert {claim.uid: claim.worker_id for claim in claims.values()} == {"a": "w0", "b": "w1", "x": "w1", "y": "w1"}
    queue.give_back(claims["b"])
    for uid in ("x", "y"):
        queue.finish(claims[uid], trajectories(uid))
    assert uids(list(queue.take(2).deferred)) == ["a"]
    queue.begin_round()
    assert uids(queue.claim("w0", GROUP)) == ["b"]
    assert uids(queue.fence_worker("w0")) == ["a", "b"]
    assert queue.release_worker("w0") == ReleaseResult(given_back=("a", "b"))
    (b,) = claim_all(queue, "w1")
    assert lose(queue, "w1", [b]).dropped == (b,)
    assert queue.snapshot().losses == {"a": MAX_LOSSES - 2}


def test_who_has_lost_the_same_workers_is_no_suspect_once_the_one_that_kills_them_is_dropped() -> None:
    queue = make_suspects("killer", "ongoing", "a", "b")
    killer, ongoing = queue.claim("w0", GROUP), queue.claim("w1", GROUP)
    assert uids(list(lose(queue, "w0", killer).dropped)) == ["killer"]
    assert queue.snapshot().losses == dict.fromkeys(("ongoing", "a", "b"), MAX_LOSSES - 2)
    assert not queue.has_startable_suspect
    claims = claim_all(queue, "w2")
    assert uids(claims) == ["a", "b"]
    assert lose(queue, "w2", claims).dropped == lose(queue, "w1", ongoing).dropped == ()
    assert uids(claim_all(queue, "w3")) == ["ongoing"]


def test_deferred_ones_are_no_suspects_either() -> None:
    queue = begin_round_of_suspects()
    claims = claim_one_suspect_each(queue)
    for uid in ("x", "y"):
        queue.finish(claims[uid], trajectories(uid))
    assert uids(list(queue.take(2).deferred)) == ["a", "b"]
    queue.release_worker("w1")  # it stops: nobody has a claim on b
    assert lose(queue, "w0", [claims["a"]]).dropped == (claims["a"],)
    assert queue.snapshot().losses == {"b": MAX_LOSSES - 2}


def test_a_round_that_must_contain_suspects_starts_them_all() -> None:
    """The starts of a long round are for its own prompts: what is passed over keeps its start."""
    queue = begin_round_of_suspects()
    a, x, y = queue.claim("w0", 3 * GROUP)
    (b,) = queue.claim("w1", GROUP)
    for claim in (x, y):
        queue.finish(claim, trajectories(claim.uid))
    assert len(queue.take(2).deferred) == 2
    for claim in (a, b):
        queue.release_worker(claim.worker_id)  # the workers stop
    queue.admit(prompts("c", "d"))
    assert queue.begin_round().kind == "long"
    (a,) = claim_all(queue, "w2")
    assert a.uid == "a"
    queue.finish(a, trajectories("a"))
    (b,) = claim_all(queue, "w2")
    queue.finish(b, trajectories("b"))
    assert [group.uid for group in queue.take(2).groups] == ["a", "b"]


def test_losses_are_known_after_a_restart_and_a_checkpoint_of_before_has_none() -> None:
    queue = make_suspects("a", "b", others=("c",))
    saved = msgspec.json.decode(msgspec.json.encode(queue.snapshot()), type=QueueSnapshot)
    assert saved.losses == dict.fromkeys("ab", MAX_LOSSES - 1)
    assert saved.without({"a"}, "x").losses == {"b": MAX_LOSSES - 1}
    restored = PromptQueue.restore(saved, Partial(16), 2, ManualClock())
    claims = claim_all(restored)
    assert uids(claims) == ["a", "c"]
    assert uids(list(lose(restored, "w0", claims).dropped)) == ["a"]
    plain = msgspec.json.decode(msgspec.json.encode(saved))
    del plain["losses"]
    assert msgspec.convert(plain, QueueSnapshot).losses == {}


def made_again(queue: PromptQueue, again: PromptQueue) -> PromptQueue:
    """`again`, which is new, becomes `queue` as in another process."""
    again.load_whole(msgspec.msgpack.decode(msgspec.msgpack.encode(queue.whole()), type=WholeQueue))
    return again


def test_a_queue_that_is_made_again_as_a_whole_knows_its_suspects() -> None:
    queue = made_again(make_suspects("a", "b", others=("c",)), make_queue())
    assert uids(claim_all(queue)) == ["a", "c"]


def grown(queue: PromptQueue) -> PromptQueue:
    """Larger than it was made, with prompts in all states that `partial` has."""
    queue.admit(prompts("old", "flat", "done", "late", "ongoing", "fenced", "fails", "waits"))
    queue.resize(Partial(9))
    queue.admit(prompts("more"))
    queue.version = 1
    claims = {claim.uid: claim for claim in (*queue.claim("w0", 5 * GROUP), *queue.claim("w1", 2 * GROUP))}
    queue.fence_worker("w1")
    queue.finish(claims["done"], [dataclasses.replace(each, min_version=2) for each in trajectories("done")])
    queue.finish(claims["old"], trajectories("old"))
    queue.take(1)
    queue.take(9)
    queue.finish(claims["flat"], [dataclasses.replace(each, metric=1.0) for each in trajectories("flat")])
    queue.finish(claims["late"], trajectories("late"))
    return queue


def in_a_long_round(queue: PromptQueue) -> PromptQueue:
    """Two prompts go on, of which their worker has not heard; one has failed, and one is done."""
    names = [f"n{number}" for number in range(8)]
    queue.admit(prompts(*names))
    queue.begin_round()
    claims = claim_all(queue)
    for claim in claims[:4]:
        queue.finish(claim, trajectories(claim.uid))
    queue.take(4)
    queue.begin_round()
    queue.fail(claims[4])
    queue.finish(claims[5], trajectories(claims[5].uid))
    return queue


def grown_partial() -> PromptQueue:
    return PromptQueue(Partial(8), 2, ManualClock(), StalenessBound(0, "drop"))


def reorder() -> PromptQueue:
    return PromptQueue(Reorder(4, 8, max_deferrals=9), 2, ManualClock())


@pytest.mark.parametrize(("grow", "make"), [(grown, grown_partial), (in_a_long_round, reorder)])
def test_a_queue_that_is_made_again_as_a_whole_goes_on_as_the_one_before(
    grow: Callable[[PromptQueue], PromptQueue], make: Callable[[], PromptQueue]
) -> None:
    def history(queue: PromptQueue) -> list[Any]:
        return [
            *(msgspec.msgpack.encode(queue.whole()), queue.statistics(), queue.snapshot(), queue.num_in_flight),
            *(queue.version, queue.policy, queue.can_claim("w0", 0), queue.claim("w0", 2 * GROUP)),
            *(queue.take(4), queue.discard_expired(), queue.release_worker("w1"), queue.release_worker("w0")),
            *(queue.begin_round(), queue.claim("w2", 100), queue.statistics(), queue.snapshot()),
        ]

    queue = grow(make())
    again = made_again(queue, make())
    again.require_conserved()
    assert history(again) == history(queue)


def test_a_queue_as_a_value_has_nothing_in_the_order_of_a_set() -> None:
    """The journal compares its bytes with those of another process, where a set has another order."""
    names = [f"n{number}" for number in range(16)]
    queue = PromptQueue(Reorder(8, 16, max_deferrals=9), 2, ManualClock())
    queue.admit(prompts(*names))
    queue.begin_round()
    for claim in claim_all(queue)[:8]:
        queue.finish(claim, trajectories(claim.uid))
    queue.take(8)
    assert queue.begin_round().kind == "long"
    for name in names:
        queue.fence_worker(name)
    whole = queue.whole()
    assert (whole.claims.fenced, whole.rounds.missing) == (sorted(names), sorted(names[8:]))


# ---- finish and take ----


@pytest.mark.parametrize(
    "group", [trajectories("a", 1), trajectories("a", 1) * 2, [], [*trajectories("a"), *trajectories("a", 1)]]
)
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
    queue = make_queue("a", "b", clock=clock)
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


def test_what_a_batch_lacks_may_be_admitted_in_parts() -> None:
    queue = make_queue("a", "b", capacity=2)
    claim_all(queue)
    assert queue.take(4) == TakeResult(num_missing=2)
    queue.admit(prompts("c"))
    queue.admit(prompts("d"))
    with pytest.raises(CapacityExceeded):
        queue.admit(prompts("e"))


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


# ---- one file ----


def test_only_one_file_moves_prompts_between_states() -> None:
    package = Path(lifecycle.__file__).parents[2]
    assert [path.name for path in package.rglob("*.py") if ".move(Event." in path.read_text()] == ["queue.py"]


def test_books_that_do_not_add_up_are_told_with_every_difference() -> None:
    queue = make_queue("a", "b", "c", "d")
    (first, *_) = claim_all(queue)
    queue.require_conserved()
    ledger = queue._ledger
    del queue._claims.ongoing[first.claim_id]
    ledger.done["b"] = ledger.enter(prompts("e")[0])
    ledger._in_flight -= {"c", "e"}
    ledger.taken += 3
    with pytest.raises(InternalError) as caught:
        queue.require_conserved()
    assert str(caught.value) == (
        "the prompt queue has lost or doubled prompts, so the run ends: prompt b is ongoing and done; "
        "prompt a is lost; prompt c is ongoing, but has left; "
        "5 prompts were admitted, but there are 3 in flight + 3 trained + 0 dropped"
    )
