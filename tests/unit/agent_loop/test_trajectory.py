"""A restarted trajectory is answered from its saved generate calls, as long as it asks what it asked before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partial_rollout.agent_loop.trajectory import Trajectories, Trajectory
from partial_rollout.core.interrupt import FRESH, Context
from partial_rollout.core.resume import ResumableGeneration, Segment
from partial_rollout.errors import TooStale
from partial_rollout.types import Claim, ContextSpan, VersionSpan


def generation(*prompt_ids: int, budget: int = 8) -> ResumableGeneration:
    return ResumableGeneration(list(prompt_ids), budget)


def claim(uid: str, claim_id: int = 1, *, attempt: int = 1) -> Claim:
    return Claim(uid, claim_id, "w", num_trajectories=2, global_step=1, attempt=attempt)


def segment(*token_ids: int, end: str = "completed") -> Segment:
    return Segment(list(token_ids), [-0.5] * len(token_ids), end, version=3, openings=0, context=Context(3, FRESH))


def in_trajectory(
    trajectories: Trajectories, *generations: ResumableGeneration, session: int = 0, attempt: int = 1
) -> Trajectory:
    """A trajectory that makes these generate calls."""
    trajectory = trajectories.start(claim("a", attempt=attempt), session)
    for each in generations:
        trajectories.record(trajectory, each)
    return trajectory


def two_turns() -> Trajectories:
    """The first answer is complete, the second was interrupted after one token."""
    trajectories, first, second = Trajectories(), generation(1, 2), generation(1, 2, 5, 9)
    in_trajectory(trajectories, first, second)
    first.add(segment(5))
    second.add(segment(6, end="aborted"))
    return trajectories


def test_saved_calls_are_answered_and_the_last_one_goes_on() -> None:
    saved = two_turns().states()
    trajectories, first, second, third = Trajectories(), generation(1, 2), generation(1, 2, 5, 9), generation(7)
    trajectories.restore(saved)
    in_trajectory(trajectories, first, second, third)
    assert (first.token_ids, first.stop_reason) == ([5], "completed")
    request = second.next_request()
    assert (request.prompt_ids, request.max_tokens, request.is_resumption) == ([1, 2, 5, 9, 6], 7, True)
    assert (second.num_interruptions, second.num_reprefilled_tokens, second.min_version) == (1, 0, 3)
    assert third.token_ids == []
    assert {key: states[:2] for key, states in trajectories.states().items()} == saved


def test_from_the_first_other_question_on_all_is_generated_anew() -> None:
    trajectories, other, second = Trajectories(), generation(1, 3), generation(1, 2, 5, 9)
    trajectories.restore(two_turns().states())
    in_trajectory(trajectories, other, second)
    assert (other.token_ids, second.token_ids) == ([], [])


def test_another_trajectory_is_not_answered() -> None:
    trajectories, first = Trajectories(), generation(1, 2)
    trajectories.restore(two_turns().states())
    in_trajectory(trajectories, first, session=1)
    assert first.token_ids == []
    assert list(trajectories.states()) == ["a_1"]


def test_a_group_with_a_token_past_the_bound_goes_on_with_no_trajectory() -> None:
    trajectories, call = Trajectories(), generation(1, 2)
    trajectory = in_trajectory(trajectories, call)
    call.add(segment(5, end="aborted"))
    sibling_without_tokens = in_trajectory(trajectories, generation(1), session=1)
    another_prompt = trajectories.start(claim("b", 2), 0)
    trajectories.require_fresh(trajectory)
    trajectories.oldest_version = 3
    trajectories.require_fresh(trajectory)
    trajectories.oldest_version = 4
    for each in (trajectory, sibling_without_tokens):
        with pytest.raises(TooStale, match="prompt a has tokens of version 3, allowed: 4"):
            trajectories.require_fresh(each)
    trajectories.require_fresh(another_prompt)
    call.add(replace(segment(6, end="aborted"), version=9))  # a new token does not make up for the old one
    with pytest.raises(TooStale, match="tokens of version 3"):
        trajectories.require_fresh(trajectory)


def test_a_claim_that_ends_late_does_not_take_the_trajectories_of_the_next_one() -> None:
    trajectories = two_turns()
    trajectories.record(trajectories.start(claim("a", 2), 0), generation(7))
    trajectories.forget(1)
    assert trajectories.states() == {"a_0": [generation(7).state()]}


def test_an_ended_group_is_forgotten() -> None:
    trajectories = two_turns()
    trajectories.forget(1)
    trajectories.forget(99)
    assert trajectories.states() == {}


@pytest.mark.parametrize(("budget", "tokens", "reason"), [(1, [6], "length"), (2, [6], None), (0, [], None)])
def test_tokens_are_taken_over_within_the_budget_of_now(budget: int, tokens: list[int], reason: str | None) -> None:
    saved, later = generation(1), generation(1, budget=max(1, budget))
    saved.add(segment(6, *([7] if budget == 0 else []), end="aborted"))
    assert later.adopt(saved.state()) is bool(tokens)
    assert (later.token_ids, later.stop_reason) == (tokens, reason)


def test_tokens_sampled_otherwise_are_generated_anew_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    saved = two_turns().states()
    trajectories = Trajectories()
    trajectories.restore(saved | {"a_1": saved["a_0"]})
    calls = [ResumableGeneration([1, 2], 8, settings="logprobs=False") for _ in range(2)]
    with caplog.at_level("WARNING", logger="partial_rollout"):  # other tests import verl, which raises the root's level
        for session, call in enumerate(calls):
            in_trajectory(trajectories, call, session=session)
    assert [call.token_ids for call in calls] == [[], []]
    (record,) = caplog.records
    assert "now it is (logprobs=False)" in record.getMessage()


def test_saved_calls_that_the_replay_has_not_reached_are_in_the_next_checkpoint() -> None:
    saved = two_turns().states()
    trajectories = Trajectories()
    trajectories.restore(saved)
    in_trajectory(trajectories, generation(1, 2))
    assert trajectories.states() == saved


def test_a_further_attempt_begins_afresh() -> None:
    trajectories, again = Trajectories(), generation(1, 2)
    trajectories.restore(two_turns().states())
    in_trajectory(trajectories, generation(1, 2))
    trajectories.forget(1)
    in_trajectory(trajectories, again)
    assert again.token_ids == []


def test_a_further_attempt_does_not_use_saved_calls_of_which_its_worker_has_a_copy() -> None:
    """Past a staleness bound they would be too old again."""
    trajectories, again = Trajectories(), generation(1, 2)
    trajectories.restore(two_turns().states())
    trajectories.oldest_version = 4
    in_trajectory(trajectories, again, attempt=2)
    assert again.token_ids == []
    assert trajectories.unclaimed() == frozenset()


def test_saved_calls_are_forgotten_once_any_worker_has_started_their_trajectory() -> None:
    calls = two_turns().states()["a_0"]
    trajectories = Trajectories()
    trajectories.restore({"a_0": calls, "b_0": calls, "c_0": calls})
    in_trajectory(trajectories, generation(1, 2))
    assert trajectories.unclaimed() == {"b_0", "c_0"}
    trajectories.keep_unclaimed({"a_0", "c_0"})
    assert trajectories.unclaimed() == {"c_0"}
    assert trajectories.states() == {"a_0": calls}


# ---- what becomes of its summary ----


def test_turns_add_up_and_equal_versions_merge() -> None:
    first, second, unfinished = (generation(token) for token in range(3))
    first.add(Segment([5] * 5, None, "aborted", 3, 0, Context(3, FRESH)))
    first.add(Segment([5] * 2, None, "completed", 4, 1, Context(3, "keep_kv", num_reused_tokens=3)))
    second.add(Segment([5] * 7, None, "completed", 4, 1, Context(4, FRESH)))
    unfinished.add(Segment([5], None, "aborted", 5, 1, Context(5, FRESH)))
    trajectory = in_trajectory(Trajectories(), first, second, unfinished)
    assert trajectory.num_interruptions == 1
    assert trajectory.num_reprefilled_tokens == 1 + 5 - 3
    assert trajectory.version_spans == (VersionSpan(3, 5), VersionSpan(4, 9))
    assert trajectory.context_spans == (
        ContextSpan(3, FRESH, 5),
        ContextSpan(3, "keep_kv", 2),
        ContextSpan(4, FRESH, 7),
    )
