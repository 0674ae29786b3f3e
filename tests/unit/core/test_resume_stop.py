"""Stop strings over interruptions: a response ends where it would have ended in one request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from partial_rollout.core.interrupt import REPREFILLED, Context
from partial_rollout.core.resume import ABORTED, LENGTH, STOPPED, ResumableGeneration, Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT = [0, 1]
TEXTS = ["", "a", "b", "ab", "ba", "aab", "c"]
"""A tokenizer: the text of each token. One has none, as special tokens do."""


class Finder:
    """Looks for `stop` in the text of the tokens that it is given; the last `min_tokens` rule is vLLM's."""

    def __init__(self, stop: Sequence[str], min_tokens: int = 0) -> None:
        self.stop, self.min_tokens = stop, min_tokens
        self.text, self.num_tokens = "", 0

    def __call__(self, token_ids: Sequence[int]) -> int | None:
        for count, token_id in enumerate(token_ids, start=1):
            before = len(self.text)
            self.text += TEXTS[token_id]
            self.num_tokens += 1
            ends = [self.text.find(stop, max(0, before + 1 - len(stop))) for stop in self.stop]
            if self.num_tokens > self.min_tokens and len(self.text) > before and max(ends) >= 0:
                return count
        return None


def segment(tokens: list[int], reason: str, openings: int, stop_string: str | None = None) -> Segment:
    context = Context(0, REPREFILLED)
    return Segment(tokens, [-float(token) for token in tokens], reason, 0, openings, context, stop_string)


@given(
    stream=st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=40),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
    min_tokens=st.integers(0, 12),
    cuts=st.lists(st.integers(0, 6), max_size=20),
    late=st.integers(0, 3),
)
@settings(max_examples=300)
def test_a_response_ends_at_the_first_stop_string_wherever_it_is_interrupted(
    stream: list[int], stop: list[str], min_tokens: int, cuts: list[int], late: int
) -> None:
    """The engine sees one segment's text only; `late` tokens come after a stop string, before an abort arrives."""
    end = Finder(stop, min_tokens)(stream)
    expected = stream[:end]
    generation = ResumableGeneration(PROMPT, len(stream), min_tokens=min_tokens)
    generation.make_finder = lambda: Finder(stop, min_tokens)
    for openings, cut in enumerate([*cuts, len(stream) + 1]):
        request = generation.next_request()
        rest = stream[len(generation.token_ids) :]
        found = Finder(stop, request.min_tokens)(rest)
        if found is not None and found <= cut:
            is_done = generation.add(segment(rest[:found], STOPPED, openings, stop_string=stop[0]))
        elif cut < len(rest):
            is_done = generation.add(segment(rest[: cut + late][: len(rest)], ABORTED, openings))
        else:
            is_done = generation.add(segment(rest, STOPPED, openings))
        if is_done:
            break
    assert generation.token_ids == expected
    assert generation.log_probs == [-float(token) for token in expected]
    assert sum(span.num_tokens for span in generation.spans) == len(expected)
    assert sum(span.num_tokens for span in generation.context_spans) == len(expected)
    assert generation.stop_reason in (STOPPED, LENGTH)


def finding(stop: str) -> ResumableGeneration:
    generation = ResumableGeneration(PROMPT, 9)
    generation.make_finder = lambda: Finder([stop])
    return generation


def test_a_stop_string_that_spans_two_segments_cuts_tokens_log_probs_and_spans() -> None:
    generation = finding("abc")
    assert not generation.add(segment([2, 1], ABORTED, 0))
    assert generation.add(segment([2, 6, 1, 1], STOPPED, 1))
    assert (generation.token_ids, generation.num_cut, generation.stop_reason) == ([2, 1, 2, 6], 2, STOPPED)
    assert generation.log_probs == [-2.0, -1.0, -2.0, -6.0]
    assert [span.num_tokens for span in generation.spans] == [4]


def test_a_response_that_goes_on_after_a_restart_remembers_its_text() -> None:
    saved = finding("abc")
    saved.add(segment([2, 1], ABORTED, 0))
    generation = finding("abc")
    assert generation.adopt(saved.state())
    assert generation.add(segment([2, 6, 1], STOPPED, 1))
    assert generation.token_ids == [2, 1, 2, 6]


def test_a_stop_string_that_only_the_engine_found_does_not_end_the_response() -> None:
    """The engine's text began with the prompt, because the segment before ended within a character."""
    generation = finding("abc")
    generation.add(segment([2], ABORTED, 0))
    assert not generation.add(segment([2], STOPPED, 1, stop_string="abc"))
    assert generation.add(segment([2], STOPPED, 2))
    assert generation.token_ids == [2, 2, 2]


def test_a_response_that_was_not_interrupted_ends_where_the_engine_says() -> None:
    generation = ResumableGeneration(PROMPT, 9)
    generation.make_finder = lambda: (_ for _ in ()).throw(AssertionError("nobody has to look"))
    assert generation.add(segment([2, 1], STOPPED, 0))
    assert generation.token_ids == [2, 1]
    other = finding("c")  # the engine's text is not the one that is looked at
    assert other.add(segment([2, 1], STOPPED, 0, stop_string="b"))
    assert (other.token_ids, other.stop_reason) == ([2, 1], STOPPED)


def test_tokens_of_the_engines_last_step_past_the_stop_string_are_cut_without_an_interruption_too() -> None:
    """With drafts a step brings several tokens."""
    generation = finding("ab")
    assert generation.add(segment([6, 3, 1, 1], STOPPED, 0, stop_string="ab"))
    assert (generation.token_ids, generation.num_cut, generation.stop_reason) == ([6, 3], 2, STOPPED)
    assert generation.log_probs == [-6.0, -3.0]


def test_a_first_segment_that_was_aborted_after_a_stop_string_is_the_whole_response() -> None:
    """The engine had sampled it, and was interrupted before it said so."""
    generation = finding("ab")
    assert generation.add(segment([6, 3, 1], ABORTED, 0))
    assert (generation.token_ids, generation.stop_reason) == ([6, 3], STOPPED)


def test_a_stop_string_cuts_a_response_without_log_probs() -> None:
    generation = finding("ab")
    assert generation.add(replace(segment([6, 3, 1], ABORTED, 0), log_probs=None))
    assert (generation.token_ids, generation.log_probs) == ([6, 3], None)
