"""A restarted trajectory is answered from its saved generate calls, as long as it asks what it asked before."""

from __future__ import annotations

import asyncio

import pytest

from partial_rollout.agent_loop.journal import Journals
from partial_rollout.core.interrupt import FRESH, Context
from partial_rollout.core.resume import ResumableGeneration, Segment
from partial_rollout.errors import TooStale
from partial_rollout.types import Claim


def generation(*prompt_ids: int, budget: int = 8) -> ResumableGeneration:
    return ResumableGeneration(list(prompt_ids), budget)


def claim(uid: str, claim_id: int = 1, *, goes_on: bool = False) -> Claim:
    return Claim(uid, claim_id, "w", num_trajectories=2, global_step=1, attempt=1, goes_on=goes_on)


def segment(*token_ids: int, end: str = "completed") -> Segment:
    return Segment(list(token_ids), [-0.5] * len(token_ids), end, version=3, openings=0, context=Context(3, FRESH))


async def in_trajectory(
    journals: Journals, *generations: ResumableGeneration, session: int = 0, goes_on: bool = True
) -> None:
    """A task of its own, as each trajectory is."""

    async def run() -> None:
        journals.start(claim("a", goes_on=goes_on), session)
        for each in generations:
            journals.record(each)

    await asyncio.create_task(run())


async def two_turns() -> Journals:
    """The first answer is complete, the second was interrupted after one token."""
    journals, first, second = Journals(), generation(1, 2), generation(1, 2, 5, 9)
    await in_trajectory(journals, first, second)
    first.add(segment(5))
    second.add(segment(6, end="aborted"))
    return journals


async def test_saved_calls_are_answered_and_the_last_one_goes_on() -> None:
    saved = (await two_turns()).states()
    journals, first, second, third = Journals(), generation(1, 2), generation(1, 2, 5, 9), generation(7)
    journals.restore(saved)
    await in_trajectory(journals, first, second, third)
    assert (first.token_ids, first.stop_reason) == ([5], "completed")
    request = second.next_request()
    assert (request.prompt_ids, request.max_tokens, request.is_resumption) == ([1, 2, 5, 9, 6], 7, True)
    assert (second.num_interruptions, second.num_reprefilled_tokens, second.min_version) == (1, 0, 3)
    assert third.token_ids == []
    assert {key: states[:2] for key, states in journals.states().items()} == saved


async def test_from_the_first_other_question_on_all_is_generated_anew() -> None:
    journals, other, second = Journals(), generation(1, 3), generation(1, 2, 5, 9)
    journals.restore((await two_turns()).states())
    await in_trajectory(journals, other, second)
    assert (other.token_ids, second.token_ids) == ([], [])


async def test_another_trajectory_is_not_answered() -> None:
    journals, first = Journals(), generation(1, 2)
    journals.restore((await two_turns()).states())
    await in_trajectory(journals, first, session=1)
    journals.record(generation(1, 2))  # no trajectory at all: validation
    assert first.token_ids == []
    assert list(journals.states()) == ["a_1"]


async def test_a_group_with_a_token_past_the_bound_goes_on_with_no_trajectory() -> None:
    journals, other = Journals(), generation(1)

    async def run(session: int, call: ResumableGeneration) -> None:
        journals.start(claim("a"), session)
        journals.record(call)
        call.add(segment(5, end="aborted"))
        journals.require_fresh()
        journals.oldest_version = 3
        journals.require_fresh()
        journals.oldest_version = 4
        with pytest.raises(TooStale, match="prompt a has tokens of version 3, allowed: 4"):
            journals.require_fresh()

    async def sibling_without_tokens() -> None:
        journals.start(claim("a"), 1)
        journals.record(other)
        with pytest.raises(TooStale):
            journals.require_fresh()

    async def another_prompt() -> None:
        journals.start(claim("b", 2), 0)
        journals.require_fresh()

    await asyncio.create_task(run(0, generation(1, 2)))
    await asyncio.create_task(sibling_without_tokens())
    await asyncio.create_task(another_prompt())
    journals.require_fresh()  # no trajectory at all: validation


async def test_a_claim_that_ends_late_does_not_take_the_journal_of_the_next_one() -> None:
    journals = await two_turns()

    async def again() -> None:
        journals.start(claim("a", 2), 0)
        journals.record(generation(7))

    await asyncio.create_task(again())
    journals.forget(1)
    assert journals.states() == {"a_0": [generation(7).state()]}


async def test_an_ended_group_is_forgotten() -> None:
    journals = await two_turns()
    journals.forget(1)
    journals.forget(99)
    assert journals.states() == {}


@pytest.mark.parametrize(("budget", "tokens", "reason"), [(1, [6], "length"), (2, [6], None), (0, [], None)])
def test_tokens_are_taken_over_within_the_budget_of_now(budget: int, tokens: list[int], reason: str | None) -> None:
    saved, later = generation(1), generation(1, budget=max(1, budget))
    saved.add(segment(6, *([7] if budget == 0 else []), end="aborted"))
    assert later.adopt(saved.state()) is bool(tokens)
    assert (later.token_ids, later.stop_reason) == (tokens, reason)


async def test_tokens_sampled_otherwise_are_generated_anew_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    saved = (await two_turns()).states()
    journals = Journals()
    journals.restore(saved | {"a_1": saved["a_0"]})
    calls = [ResumableGeneration([1, 2], 8, settings="logprobs=False") for _ in range(2)]
    with caplog.at_level("WARNING", logger="partial_rollout"):  # other tests import verl, which raises the root's level
        for session, call in enumerate(calls):
            await in_trajectory(journals, call, session=session)
    assert [call.token_ids for call in calls] == [[], []]
    (record,) = caplog.records
    assert "now it is (logprobs=False)" in record.getMessage()


async def test_saved_calls_that_the_replay_has_not_reached_are_in_the_next_checkpoint() -> None:
    saved = (await two_turns()).states()
    journals = Journals()
    journals.restore(saved)
    await in_trajectory(journals, generation(1, 2))
    assert journals.states() == saved


async def test_a_further_attempt_begins_afresh() -> None:
    journals, again = Journals(), generation(1, 2)
    journals.restore((await two_turns()).states())
    await in_trajectory(journals, generation(1, 2))
    journals.forget(1)
    await in_trajectory(journals, again)
    assert again.token_ids == []


async def test_another_worker_does_not_use_saved_calls_a_second_time() -> None:
    """Its copy of them is there; and past a staleness bound they would be too old again."""
    journals, again = Journals(), generation(1, 2)
    journals.restore((await two_turns()).states())
    journals.oldest_version = 4
    await in_trajectory(journals, again, goes_on=False)
    assert again.token_ids == []
    assert journals.unclaimed() == frozenset()


async def test_saved_calls_are_forgotten_once_any_worker_has_started_their_trajectory() -> None:
    calls = (await two_turns()).states()["a_0"]
    journals = Journals()
    journals.restore({"a_0": calls, "b_0": calls, "c_0": calls})
    await in_trajectory(journals, generation(1, 2))
    assert journals.unclaimed() == {"b_0", "c_0"}
    assert journals.keep_unclaimed({"a_0", "c_0"}) == {"c_0": calls}
    assert journals.unclaimed() == {"c_0"}
    assert journals.states() == {"a_0": calls}
