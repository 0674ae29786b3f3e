from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partial_rollout.core.interrupt import FRESH, REPREFILLED, Context
from partial_rollout.core.resume import ABORTED, LENGTH, STOPPED, ResumableGeneration, Segment
from partial_rollout.errors import EngineDead, EngineError, InternalError, ResumeStalled
from partial_rollout.types import ContextSpan, VersionSpan

PROMPT = [1, 2, 3]


def segment(tokens, stop_reason=ABORTED, *, version=0, openings=0, log_probs=True, context=None):
    probs = [-float(t) for t in tokens] if log_probs else None
    return Segment(list(tokens), probs, stop_reason, version, openings, context or Context(version, REPREFILLED))


def engine_answer(stream, start, max_tokens, stop_at, cut):
    """What an engine that always samples `stream` returns: up to `cut` tokens, or less if it stops by itself."""
    end = min(start + max_tokens, stop_at + 1, len(stream))
    if start + cut < end:
        return stream[start : start + cut], ABORTED
    return stream[start:end], STOPPED


@given(
    stream=st.lists(st.integers(10, 99), min_size=1, max_size=40),
    budget=st.integers(1, 40),
    stop_at=st.integers(0, 60),
    cuts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2)), max_size=30),
)
def test_any_interruptions_give_the_uninterrupted_response(stream, budget, stop_at, cuts):
    expected = stream[: min(budget, stop_at + 1, len(stream))]
    generation = ResumableGeneration(PROMPT, budget)
    version, requests = 0, 0
    schedule = [*cuts, (len(stream) + 1, 0)]
    for openings, (cut, step) in enumerate(schedule):
        version += step
        request = generation.next_request()
        requests += 1
        assert request.prompt_ids == PROMPT + generation.token_ids
        assert request.max_tokens == budget - len(generation.token_ids) >= 1
        assert request.is_resumption == (requests > 1)
        tokens, reason = engine_answer(stream, len(generation.token_ids), request.max_tokens, stop_at, cut)
        if generation.add(segment(tokens, reason, version=version, openings=openings)):
            break
    assert generation.finished
    assert generation.token_ids == expected
    assert generation.log_probs == [-float(t) for t in expected]
    assert generation.num_interruptions == requests - 1
    assert sum(span.num_tokens for span in generation.spans) == len(expected)
    versions = [span.version for span in generation.spans]
    assert versions == sorted(set(versions))
    assert (generation.min_version, generation.max_version) == (versions[0], versions[-1])


def test_an_interruption_on_the_last_token_of_the_budget_is_the_end():
    generation = ResumableGeneration(PROMPT, 3)
    assert generation.add(segment([5, 6, 7]))
    assert (generation.stop_reason, generation.num_interruptions) == (LENGTH, 0)
    with pytest.raises(InternalError, match="length"):
        generation.next_request()


def test_an_interruption_right_after_a_stop_token_is_the_end():
    generation = ResumableGeneration(PROMPT, 9, stop_token_ids=frozenset({7}))
    assert generation.add(segment([5, 7]))
    assert generation.stop_reason == STOPPED


def test_a_stop_token_before_min_tokens_does_not_stop():
    generation = ResumableGeneration(PROMPT, 9, min_tokens=4, stop_token_ids=frozenset({7}))
    assert not generation.add(segment([5, 7]))
    assert generation.next_request().min_tokens == 2


def test_min_tokens_shrinks_and_never_falls_below_zero():
    generation = ResumableGeneration(PROMPT, 9, min_tokens=3)
    assert generation.next_request().min_tokens == 3
    generation.add(segment([5, 6]))
    assert generation.next_request().min_tokens == 1
    generation.add(segment([5, 6]))
    assert generation.next_request().min_tokens == 0


def test_reprefilled_tokens_are_prompt_and_response_so_far_per_resumption():
    generation = ResumableGeneration(PROMPT, 9)
    generation.add(segment([5, 6], openings=0))
    generation.add(segment([], openings=1))
    generation.add(segment([7], STOPPED, openings=2))
    assert generation.num_reprefilled_tokens == 3 + 2  # the one that was cut before its first token does not count


def test_what_an_engine_still_had_is_not_reprefilled():
    generation = ResumableGeneration(PROMPT, 9)
    generation.add(segment([5, 6]))
    generation.add(segment([7], STOPPED, openings=1, context=Context(0, "reuse_kv", num_reused_tokens=4)))
    assert generation.num_reprefilled_tokens == 1


def test_every_token_knows_how_its_context_came_about():
    generation = ResumableGeneration(PROMPT, 9)
    generation.add(segment([], version=3, context=Context(3, FRESH)))
    generation.add(segment([5, 6], version=4, openings=1, context=Context(4, REPREFILLED)))
    generation.add(segment([7], version=5, openings=2, context=Context(4, "keep_kv", num_reused_tokens=5)))
    generation.add(segment([8], version=6, openings=3, context=Context(4, "keep_kv", num_reused_tokens=6)))
    generation.add(segment([9], STOPPED, version=7, openings=4, context=Context(7, REPREFILLED)))
    spans = [ContextSpan(4, FRESH, 2), ContextSpan(4, "keep_kv", 2), ContextSpan(7, REPREFILLED, 1)]
    assert generation.context_spans == generation.state().context_spans == spans
    assert generation.spans == [VersionSpan(4, 2), VersionSpan(5, 1), VersionSpan(6, 1), VersionSpan(7, 1)]


def test_neighbouring_segments_of_one_version_are_one_span():
    generation = ResumableGeneration(PROMPT, 9)
    generation.add(segment([5, 6], version=4))
    generation.add(segment([7], version=4, openings=1))
    generation.add(segment([8], STOPPED, version=6, openings=2))
    assert generation.spans == [VersionSpan(4, 3), VersionSpan(6, 1)]


def test_an_empty_response_reports_the_version_it_met():
    generation = ResumableGeneration(PROMPT, 9)
    generation.add(segment([], STOPPED, version=4))
    assert (generation.min_version, generation.max_version, generation.spans) == (4, 4, [])


def test_two_empty_interruptions_after_one_opening_are_a_stall():
    generation = ResumableGeneration(PROMPT, 9)
    generation.add(segment([5], openings=3))
    generation.add(segment([], openings=3))
    with pytest.raises(ResumeStalled, match="opening 3 of the gate, at 1 of 9"):
        generation.add(segment([], openings=3))


@pytest.mark.parametrize(
    "later",
    [(segment([6], openings=3), segment([], openings=3)), (segment([], openings=4), segment([], openings=5))],
)
def test_progress_or_a_new_opening_is_no_stall(later):
    generation = ResumableGeneration(PROMPT, 9)
    for part in (segment([], openings=3), *later):
        assert not generation.add(part)


def test_an_empty_interruption_needs_no_log_probs():
    generation = ResumableGeneration(PROMPT, 9)
    generation.add(segment([], log_probs=False))
    generation.add(segment([5], openings=1))
    generation.add(segment([], log_probs=False, openings=2))
    generation.add(segment([6], STOPPED, openings=3))
    assert generation.log_probs == [-5.0, -6.0]


def test_without_log_probs_there_are_none():
    generation = ResumableGeneration(PROMPT, 9)
    generation.add(segment([5], log_probs=False))
    generation.add(segment([6], STOPPED, log_probs=False, openings=1))
    assert generation.log_probs is None


@pytest.mark.parametrize("reason", [STOPPED, LENGTH, "stop"])
def test_a_response_may_end_by_itself_or_at_its_limit(reason):
    generation = ResumableGeneration(PROMPT, 9)
    assert generation.add(segment([5], reason))
    assert generation.stop_reason == reason


@pytest.mark.parametrize("reason", ["error", "repetition", None])
def test_any_other_end_is_an_error_of_this_request_and_never_a_response(reason):
    generation = ResumableGeneration(PROMPT, 9)
    generation.add(segment([5]))
    with pytest.raises(EngineError, match=f"ended a request with {reason!r} after 1 of 9 tokens") as caught:
        generation.add(segment([6], reason, openings=1))
    assert not isinstance(caught.value, EngineDead)
    assert (generation.token_ids, generation.finished) == ([5], False)


def test_segments_that_cannot_be_are_refused():
    generation = ResumableGeneration(PROMPT, 2)
    with pytest.raises(InternalError, match="exceeds the budget of 2"):
        generation.add(segment([5, 6, 7]))
    with pytest.raises(InternalError, match="1 log-probs for 2 tokens"):
        generation.add(Segment([5, 6], [-1.0], ABORTED, 0, 0, Context(0, FRESH)))
    generation.add(segment([5]))
    with pytest.raises(InternalError, match="some have none"):
        generation.add(segment([6], log_probs=False))
    generation.add(segment([6], STOPPED))
    with pytest.raises(InternalError, match="after the generation ended"):
        generation.add(segment([]))


def test_a_budget_below_one_is_refused():
    with pytest.raises(InternalError, match="max_new_tokens=0"):
        ResumableGeneration(PROMPT, 0)


def test_a_state_stays_what_it_was_when_the_caller_writes_to_its_prompt():
    prompt = [1, 2]
    generation = ResumableGeneration(prompt, 8)
    state = generation.state()
    prompt.append(9)
    generation.prompt_ids.append(8)
    assert (generation.prompt_ids, state.prompt_ids) == ([1, 2, 8], [1, 2])


def interrupted_generation():
    """Interrupted twice, with five of its nine tokens."""
    generation = ResumableGeneration(PROMPT, 9, settings="temperature=1.0")
    generation.add(segment([5, 6], version=3, context=Context(3, FRESH)))
    generation.add(segment([7, 8, 9], version=4, openings=1))
    return generation


@pytest.mark.parametrize("made", [interrupted_generation, lambda: ResumableGeneration(PROMPT, 9)])
def test_who_adopts_a_state_goes_on_as_the_one_that_was_saved(made):
    saved = made()
    other = ResumableGeneration(PROMPT, 9, settings=saved.settings)
    assert other.adopt(saved.state())
    assert other.state() == saved.state()
    for generation in (saved, other):
        assert generation.next_request().is_resumption == bool(generation.token_ids)
        generation.add(segment([1], STOPPED, version=6, openings=2))
    assert other.state() == saved.state()
    assert (other.min_version, other.max_version) == (saved.min_version, saved.max_version)


def test_a_state_of_another_question_is_not_adopted():
    state = interrupted_generation().state()
    for other in (ResumableGeneration([*PROMPT, 4], 9, settings=state.settings), ResumableGeneration(PROMPT, 9)):
        assert other.adopt(state) is False
        assert other.token_ids == []


@pytest.mark.parametrize(("budget", "end"), [(4, None), (5, LENGTH), (6, None)])
def test_of_adopted_tokens_no_more_are_taken_than_the_budget_of_now(budget, end):
    state = interrupted_generation().state()
    generation = ResumableGeneration(PROMPT, budget, settings=state.settings)
    assert generation.adopt(state) is (budget >= 5)
    assert (len(generation.token_ids), generation.stop_reason) == (5 if budget >= 5 else 0, end)


def test_an_adopted_end_stays_what_it_was_where_the_budget_ends_with_it():
    saved = interrupted_generation()
    saved.add(segment([1], STOPPED, version=5, openings=2))
    generation = ResumableGeneration(PROMPT, 6, settings=saved.settings)
    assert generation.adopt(saved.state())
    assert generation.stop_reason == STOPPED


def test_what_was_saved_does_not_grow_with_the_responses_that_go_on_from_it():
    saved = interrupted_generation()
    state = saved.state()
    then = deepcopy(state)
    other = ResumableGeneration(PROMPT, 9, settings=saved.settings)
    other.adopt(state)
    for generation, version in ((saved, 4), (other, 5)):
        generation.add(segment([1], version=version, openings=2))
        assert state == then
