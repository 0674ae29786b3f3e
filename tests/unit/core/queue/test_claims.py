"""Claims that are ongoing for long: each is named once, and time held back is not counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.tail import Reorder
from tests.unit.core.queue.queues import GROUP, ManualClock, claim_all, make_queue, prompts, trajectories

if TYPE_CHECKING:
    from partial_rollout.types import Claim

LIMIT_S = 10.0


def with_a_finished_batch(clock: ManualClock) -> tuple[PromptQueue, Claim]:
    """In the first round of reorder `b` has finished, and the claim of `a` is ongoing."""
    queue = PromptQueue(Reorder(1, 2, max_deferrals=9), 2, clock)
    queue.admit(prompts("a", "b"))
    queue.begin_round()
    a, b = claim_all(queue)
    queue.finish(b, trajectories("b"))
    return queue, a


def test_a_claim_ongoing_for_longer_than_the_limit_is_named_once_with_its_age() -> None:
    clock = ManualClock()
    queue = make_queue("a", "b", clock=clock)
    (old,) = queue.claim("w0", GROUP)
    clock.now_s = 5.0
    (young,) = queue.claim("w1", GROUP)
    clock.now_s = 10.0
    assert queue.take_long_running(LIMIT_S) == []
    clock.now_s = 12.0
    assert queue.take_long_running(LIMIT_S) == [(old, 12.0)]
    clock.now_s = 16.0
    assert queue.take_long_running(LIMIT_S) == [(young, 11.0)]
    clock.now_s = 99.0
    assert queue.take_long_running(LIMIT_S) == []


def test_a_later_claim_of_the_same_prompt_is_named_again_by_its_own_age() -> None:
    clock = ManualClock()
    queue = make_queue("a", clock=clock)
    (first,) = queue.claim("w0", GROUP)
    clock.now_s = 11.0
    assert queue.take_long_running(LIMIT_S) == [(first, 11.0)]
    queue.give_back(first)
    clock.now_s = 20.0
    (second,) = queue.claim("w1", GROUP)
    clock.now_s = 30.0
    assert queue.take_long_running(LIMIT_S) == []
    clock.now_s = 31.0
    assert queue.take_long_running(LIMIT_S) == [(second, 11.0)]


def test_time_in_which_a_prompt_was_held_back_is_not_part_of_its_age() -> None:
    clock = ManualClock()
    queue, a = with_a_finished_batch(clock)
    clock.now_s = 6.0
    assert queue.take(1).deferred == (a,)
    clock.now_s = 100.0
    assert queue.take_long_running(LIMIT_S) == []
    assert queue.begin_round().kind == "long"
    clock.now_s = 104.0
    assert queue.take_long_running(LIMIT_S) == []
    assert queue.statistics().oldest_ongoing_s == 10.0
    clock.now_s = 105.0
    assert queue.take_long_running(LIMIT_S) == [(a, 11.0)]


def test_a_claim_that_was_named_and_held_back_is_not_named_again_when_it_goes_on() -> None:
    clock = ManualClock()
    queue, a = with_a_finished_batch(clock)
    clock.now_s = 11.0
    assert queue.take_long_running(LIMIT_S) == [(a, 11.0)]
    queue.take(1)
    queue.begin_round()
    clock.now_s = 99.0
    assert queue.statistics().ongoing == 1
    assert queue.take_long_running(LIMIT_S) == []


def test_a_held_back_prompt_whose_worker_was_lost_begins_with_an_age_of_0() -> None:
    clock = ManualClock()
    queue, _ = with_a_finished_batch(clock)
    clock.now_s = 6.0
    queue.take(1)
    queue.release_worker("w0")
    queue.begin_round()
    assert [claim.uid for claim in claim_all(queue, "w1")] == ["a"]
    clock.now_s = 9.0
    assert queue.statistics().oldest_ongoing_s == 3.0


def test_the_oldest_is_who_was_ongoing_for_longest_and_not_who_goes_on_first() -> None:
    """`a` was ongoing for a second and deferred twice, `b0` for a hundred and deferred once."""
    clock = ManualClock()
    queue = PromptQueue(Reorder(2, 3, max_deferrals=9), 2, clock)
    for fresh, ends, lasts_s in (("a x y", "x y", 1.0), ("b0 b1 b2", "b1 b2", 100.0)):
        queue.begin_round()
        queue.admit(prompts(*fresh.split()))
        claims = {claim.uid: claim for claim in claim_all(queue)}
        clock.now_s += lasts_s
        for uid in ends.split():
            queue.finish(claims[uid], trajectories(uid))
        queue.take(2)
    assert queue.begin_round().kind == "long"
    now = queue.statistics()
    assert (now.oldest_ongoing_uid, now.oldest_ongoing_s) == ("b0", 100.0)
