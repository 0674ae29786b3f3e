"""A batch that is taken again: exactly its prompts in its order, or how many of them must be admitted before."""

from __future__ import annotations

from dataclasses import replace

from partial_rollout.core.queue.queue import PromptQueue
from partial_rollout.core.queue.staleness import StalenessBound
from partial_rollout.core.queue.tail import Partial, Wait
from tests.unit.core.queue.queues import ManualClock, claim_all, make_queue, prompts, trajectories, uids


def test_the_wanted_groups_are_taken_in_their_order_and_no_others() -> None:
    queue = make_queue("a", "b", "c")
    for claim in claim_all(queue):
        queue.finish(claim, trajectories(claim.uid))
    assert [group.uid for group in queue.take(2, ("c", "a")).groups] == ["c", "a"]
    assert queue.statistics().done == 1
    queue.require_conserved()


def test_others_that_are_done_do_not_stand_for_the_wanted_ones() -> None:
    queue = make_queue("a", "b", "c")
    first, *others = claim_all(queue)
    for claim in others:
        queue.finish(claim, trajectories(claim.uid))
    assert queue.can_take(2)
    assert not queue.can_take(2, ("a", "b"))
    assert queue.take(2, ("a", "b")).num_missing == 0
    queue.finish(first, trajectories("a"))
    assert [group.uid for group in queue.take(2, ("a", "b")).groups] == ["a", "b"]


def test_wanted_prompts_that_are_not_in_flight_may_be_admitted_beyond_the_capacity() -> None:
    queue = make_queue("a", "b", capacity=2)
    dropped, _ = claim_all(queue)
    queue.drop(dropped, "prompt_too_long")
    assert queue.can_take(2, ("b", "d"))
    result = queue.take(2, ("b", "d"))
    assert (result.groups, result.num_missing) == ((), 1)
    assert queue.take(2, ("a", "b", "c", "d")).num_missing == 3
    queue.admit(prompts("c", "d"))
    assert queue.take(2, ("b", "d")).num_missing == 0


def test_wanted_prompts_that_became_too_old_are_missing() -> None:
    """A group past the bound is not done again: whoever waited for it would wait for ever."""
    queue = PromptQueue(Partial(4), 2, ManualClock(), StalenessBound(1, "drop"))
    queue.admit(prompts("a", "b"))
    a, b = claim_all(queue)
    queue.finish(a, trajectories("a"))
    assert queue.take(2, ("a", "b")).num_missing == 0
    queue.version = 2
    assert queue.take(2, ("a", "b")).num_missing == 1
    queue.finish(b, [replace(each, min_version=2) for each in trajectories("b")])
    assert [group.uid for group in queue.take(1).expired] == ["a"]
    assert queue.take(1, ("a",)).num_missing == 1
    assert queue.discard_expired() == ["a"]
    assert queue.take(1, ("a",)).num_missing == 1


def test_as_many_may_start_as_before_after_a_wanted_prompt_was_missing() -> None:
    queue = make_queue("a", capacity=4)
    assert queue.take(1, ("b",)).num_missing == 1
    queue.admit(prompts("b", "c", "d"))
    assert uids(claim_all(queue)) == ["a", "b", "c", "d"]


def test_a_wanted_prompt_starts_though_the_round_has_as_many_as_it_wanted() -> None:
    """`c` stood in for `a`, which was dropped when the batch was taken first, and has finished now."""
    queue = PromptQueue(Wait(2), 2, ManualClock())
    queue.begin_round()
    queue.admit(prompts("a", "b"))
    for claim in claim_all(queue):
        queue.finish(claim, trajectories(claim.uid))
    assert [queue.take(2, ("b", "c")).num_missing for _ in range(2)] == [1, 1]
    queue.admit(prompts("c"))
    (c,) = claim_all(queue)
    queue.finish(c, trajectories("c"))
    assert [group.uid for group in queue.take(2, ("b", "c")).groups] == ["b", "c"]
    queue.begin_round()
    queue.admit(prompts("d"))
    assert [claim.uid for claim in claim_all(queue)] == ["d"]
