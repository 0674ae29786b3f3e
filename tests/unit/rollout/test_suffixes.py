"""What a drafter takes for the next tokens, and what it keeps."""

from __future__ import annotations

import gc
from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from partial_rollout.rollout import suffixes as suffixes_module
from partial_rollout.rollout.suffixes import BLOCK, KEPT_TEXTS, PLACES, Prompt, Suffixes

PROMPT = [1, 2, 3]
TEXT = [10, 11, 12, 13, 14, 15, 16, 17]


def told(suffixes: Suffixes, prompt: list[int], response: list[int]):
    """A text of the prompt that has got a response."""
    text = suffixes.begin(prompt)
    suffixes.extend(text, response)
    return text


def ended(suffixes: Suffixes, prompt: list[int], response: list[int]) -> None:
    suffixes.end(told(suffixes, prompt, response))
    suffixes.tidy()


def test_a_response_drafts_what_followed_the_same_tokens_in_itself():
    suffixes = Suffixes(drafts=3)
    assert suffixes.draft(told(suffixes, PROMPT, [5, 6, 7, 8, 9, 5, 6])) == [7, 8, 9]


def test_a_response_drafts_from_its_prompt():
    suffixes = Suffixes(drafts=2)
    assert suffixes.draft(told(suffixes, [5, 6, 7, 8, *PROMPT], [5, 6])) == [7, 8]


def test_a_sibling_is_read_as_far_as_it_is():
    suffixes = Suffixes(drafts=3)
    first, second = told(suffixes, PROMPT, TEXT[:5]), told(suffixes, PROMPT, TEXT[:3])
    assert suffixes.draft(second) == [13, 14, 14]
    suffixes.extend(first, TEXT[5:])
    assert suffixes.draft(second) == [13, 14, 15]


def test_the_first_token_of_a_later_response_is_drafted_from_the_end_of_the_prompt():
    suffixes = Suffixes(drafts=3)
    ended(suffixes, PROMPT, TEXT)
    assert suffixes.draft(suffixes.begin(PROMPT)) == TEXT[:3]


def test_the_longest_suffix_counts_and_of_equal_ones_the_newest():
    suffixes = Suffixes(drafts=1)
    for response in ([7, 8, 9, 20], [4, 8, 9, 30], [5, 8, 9, 40]):
        ended(suffixes, PROMPT, response)
    assert suffixes.draft(told(suffixes, PROMPT, [7, 8, 9])) == [20]
    assert suffixes.draft(told(suffixes, PROMPT, [6, 8, 9])) == [40]


def test_a_draft_goes_on_in_another_text_where_the_first_ends():
    suffixes = Suffixes(drafts=4)
    ended(suffixes, PROMPT, [12, 13, 14, 15])
    ended(suffixes, PROMPT, [9, 10, 11, 12, 13])
    assert suffixes.draft(told(suffixes, PROMPT, [9, 10])) == [11, 12, 13, 14]


def test_a_request_belongs_to_the_longest_known_prompt_that_it_begins_with():
    suffixes = Suffixes(drafts=2)
    ended(suffixes, [1, 2, 3, 4], [20, 21, 22])
    ended(suffixes, [1, 2], TEXT)
    assert suffixes.draft(suffixes.begin([1, 2, 3, 4, 20])) == [21, 22]


def test_a_prompt_is_known_whatever_its_length_and_the_requests():
    for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 5):
        suffixes, prompt = Suffixes(drafts=2), [number % 7 for number in range(length)]
        ended(suffixes, prompt, TEXT * BLOCK)
        for more in (0, 1, BLOCK, BLOCK + 1, 3 * BLOCK):
            text = suffixes.begin([*prompt, *(TEXT * BLOCK)[:more]])
            assert len(text.prompt.tokens) == length
            suffixes.end(text)


def test_a_request_is_compared_with_prompts_that_begin_as_it_does():
    """A conversation of many turns brings prompts of thousands of lengths."""

    class Compared(OrderedDict):
        number = 0

        def get(self, *key):
            Compared.number += 1
            return super().get(*key)

    suffixes = Suffixes(drafts=2)
    for number in range(300):
        ended(suffixes, [number] * (BLOCK + number), TEXT)
    suffixes._prompts = Compared(suffixes._prompts)
    ended(suffixes, [1000] * 600, TEXT)
    assert Compared.number == 0
    suffixes.begin([7] * (BLOCK + 7))
    assert Compared.number == 1


def test_a_large_group_that_leaves_for_a_step_is_known_when_it_comes_back():
    suffixes = Suffixes(drafts=2)
    responses = [[*TEXT, 100 + number] for number in range(2 * KEPT_TEXTS)]
    for text in [told(suffixes, PROMPT, response) for response in responses]:
        suffixes.end(text)
    suffixes.tidy()
    for response in responses:
        suffixes.begin([*PROMPT, *response])
        suffixes.tidy()
    assert len(suffixes._prompts) == 1


def test_three_epochs_of_a_large_group_are_kept():
    suffixes, group = Suffixes(drafts=2), 2 * KEPT_TEXTS
    for epoch in range(4):
        for text in [told(suffixes, PROMPT, [epoch, number, *TEXT]) for number in range(group)]:
            suffixes.end(text)
        suffixes.tidy()
    (prompt,) = suffixes._prompts.values()
    assert {text.tokens[len(PROMPT)] for text in prompt.texts} == {1, 2, 3}
    assert len(prompt.texts) == 3 * group


def test_nothing_is_left_of_prompts_that_are_forgotten():
    suffixes = Suffixes(drafts=2, most_tokens=50)
    for number in range(20):
        ended(suffixes, [number] * (BLOCK + number % 3), TEXT)
    last = suffixes.begin([7, 7])
    suffixes._most_tokens = 0
    suffixes.tidy()
    assert [dict(lengths) for lengths in suffixes._lengths.values()] == [{2: 1}]
    assert suffixes.num_tokens == len(last.tokens) + 2


def test_other_prompts_say_nothing():
    suffixes = Suffixes(drafts=2)
    ended(suffixes, [1, 2, 4], TEXT)
    assert suffixes.draft(told(suffixes, PROMPT, TEXT[:3])) == [12, 12]


def test_a_response_that_went_away_unfinished_is_the_same_text_when_it_comes_back():
    suffixes = Suffixes(drafts=2)
    ended(suffixes, PROMPT, TEXT[:4])
    tokens = suffixes.num_tokens
    back = suffixes.begin([*PROMPT, *TEXT[:4]])
    assert suffixes.num_tokens == tokens
    suffixes.extend(back, TEXT[4:])
    assert suffixes.draft(told(suffixes, PROMPT, TEXT[:3])) == TEXT[3:5]


def test_of_several_beginnings_of_a_response_the_longest_is_its_text():
    suffixes = Suffixes(drafts=2)
    ended(suffixes, PROMPT, TEXT[:5])
    ended(suffixes, PROMPT, TEXT[:3])
    longest = suffixes.begin([*PROMPT, *TEXT[:6]])
    assert longest.tokens.tolist() == [*PROMPT, *TEXT[:6]]
    assert [len(each.tokens) for each in longest.prompt.texts] == [9, 6]


def test_a_request_goes_on_with_no_other_response_than_its_own():
    suffixes = Suffixes(drafts=1)
    ended(suffixes, PROMPT, TEXT[:4])
    ended(suffixes, PROMPT, [20, 21, 22, 23, 24])
    back = suffixes.begin([*PROMPT, 20, 21, 22, 23, 24, 25])
    other = suffixes.begin([*PROMPT, 30, 31, 32, 33, 34])
    assert [each.tokens.tolist()[3:] for each in back.prompt.texts] == [TEXT[:4], [20, 21, 22, 23, 24, 25]]
    assert other.prompt.tokens.tolist() == [*PROMPT, 30, 31, 32, 33, 34]


def test_siblings_that_are_equal_so_far_have_texts_of_their_own():
    suffixes = Suffixes(drafts=2)
    for _ in range(2):
        suffixes.end(told(suffixes, PROMPT, TEXT[:4]))
    first, second = (suffixes.begin([*PROMPT, *TEXT[:4]]) for _ in range(2))
    suffixes.extend(first, TEXT[4:6])
    suffixes.extend(second, TEXT[4:6])
    assert first.tokens == second.tokens
    assert first.tokens.tolist() == [*PROMPT, *TEXT[:6]]


def test_a_running_sibling_that_is_behind_keeps_its_text():
    suffixes = Suffixes(drafts=2)
    behind = told(suffixes, PROMPT, TEXT[:2])
    back = suffixes.begin([*PROMPT, *TEXT[:4]])
    assert back is not behind
    assert behind.tokens.tolist() == [*PROMPT, *TEXT[:2]]


def test_a_response_that_moves_to_another_row_keeps_its_text():
    suffixes = Suffixes(drafts=2)
    old = told(suffixes, PROMPT, TEXT)
    suffixes.end(old)
    new = suffixes.begin([*PROMPT, *TEXT])
    suffixes.tidy()
    assert new is old
    assert suffixes.draft(told(suffixes, PROMPT, TEXT[:2])) == TEXT[2:4]


def test_places_of_prompts_that_are_not_open_are_kept_as_long_as_there_is_room():
    suffixes = Suffixes(drafts=2, most_noted=30)
    text = told(suffixes, PROMPT, TEXT)
    suffixes.end(text)
    suffixes.tidy()
    assert text.prompt.places
    ended(suffixes, [4, 5, 6], TEXT)
    ended(suffixes, [7, 8, 9], TEXT)
    assert not text.prompt.places
    assert suffixes.draft(told(suffixes, PROMPT, TEXT[:2])) == TEXT[2:4]


def test_a_response_whose_places_were_forgotten_has_all_of_them_when_it_comes_back():
    suffixes = Suffixes(drafts=1, most_noted=0)
    text = told(suffixes, PROMPT, [7, 8, 9, 20])
    suffixes.end(text)
    suffixes.tidy()
    ended(suffixes, [4, 5, 6], TEXT)
    assert not text.prompt.places
    assert suffixes.begin([*PROMPT, 7, 8, 9, 20]) is text
    suffixes.extend(text, [4, 8, 9, 30, 6, 7, 8, 9])
    assert suffixes.draft(text) == [20]


def test_prompts_that_were_used_longest_ago_are_forgotten_first():
    suffixes = Suffixes(drafts=1, most_tokens=45)
    for number in (1, 2, 1, 3):
        ended(suffixes, [number, 50, 51], TEXT[: 6 + number])
    assert suffixes.num_tokens <= 45
    assert suffixes.draft(told(suffixes, [1, 50, 51], TEXT[:2])) == [12]
    assert suffixes.draft(told(suffixes, [2, 50, 51], TEXT[:2])) == [11]


def test_what_is_open_is_never_forgotten():
    suffixes = Suffixes(drafts=1, most_tokens=5)
    first = told(suffixes, [1, 50, 51], TEXT)
    ended(suffixes, [2, 50, 51], TEXT)
    assert suffixes.draft(told(suffixes, [1, 50, 51], TEXT[:2])) == [12]
    assert first.is_open


def test_of_a_prompt_the_oldest_responses_are_forgotten():
    suffixes = Suffixes(drafts=1)
    for number in range(KEPT_TEXTS + 2):
        ended(suffixes, PROMPT, [100 + number, 200 + number, 300 + number])
    gone, kept = (told(suffixes, PROMPT, [100 + number, 200 + number]) for number in (0, KEPT_TEXTS))
    assert suffixes.draft(gone) == [200]
    assert suffixes.draft(kept) == [300 + KEPT_TEXTS]


def test_of_a_suffix_that_is_everywhere_only_the_newest_places_are_looked_at(monkeypatch):
    looked = []
    monkeypatch.setattr(suffixes_module, "_common", lambda *given: looked.append(given) or 0)
    suffixes = Suffixes(drafts=1)
    suffixes.draft(told(suffixes, PROMPT, [7] * 10_000))
    assert len(looked) == PLACES


def test_places_of_forgotten_responses_go_while_their_prompt_stays_open():
    suffixes = Suffixes(drafts=1)
    before = told(suffixes, PROMPT, TEXT)
    for number in range(400):
        text = told(suffixes, PROMPT, [1000 + 10 * number + each for each in range(10)])
        suffixes.end(before)
        suffixes.tidy()
        before = text
    assert len(before.prompt.places) <= 2 * before.prompt.num_tokens + 10
    assert len(before.prompt.noted) <= 3 * KEPT_TEXTS


def test_places_of_forgotten_responses_lead_nowhere_and_older_ones_are_still_found():
    suffixes = Suffixes(drafts=1)
    told(suffixes, PROMPT, [50, 51, 60])
    ended(suffixes, PROMPT, [50, 51, 61])
    last = told(suffixes, PROMPT, [50, 51])
    assert suffixes.draft(last) == [61]
    for number in range(KEPT_TEXTS - 2):
        ended(suffixes, PROMPT, [1000 + number])
    assert suffixes.draft(last) == [60]


def test_prompts_are_told_apart_by_all_of_their_tokens():
    # The first two are one number to the base 1,000,003, and the others begin or end alike.
    prompts = [[1, 1_000_008], [2, 5], [1], [2], [5], [1, 1_000_008, 5], [0, 2, 5], [2, 5, 0], [2 << 8, 5 << 8]]
    suffixes = Suffixes(drafts=1)
    texts = [suffixes.begin(prompt) for prompt in prompts]
    assert [each.prompt.tokens.tolist() for each in texts] == prompts
    for text, prompt in zip(texts, prompts, strict=True):
        assert suffixes.begin(prompt).prompt is text.prompt


def test_newer_places_of_other_pairs_hide_none_of_a_pair():
    suffixes, most = Suffixes(drafts=1), 2**31 - 1
    others = [0, most, 7, most, most, 7, 0, 0, 7, 1, most - 1, 7] * PLACES
    assert suffixes.draft(told(suffixes, PROMPT, [most, 0, 8, *others, most, 0])) == [8]


def test_the_garbage_collector_visits_nothing_for_each_token():
    suffixes = Suffixes(drafts=1)
    text = suffixes.begin(PROMPT)
    before = len(gc.get_objects())
    suffixes.extend(text, range(100, 5100))
    assert len(text.prompt.places) > 5000
    assert len(gc.get_objects()) - before < 100


def test_a_forgotten_prompt_leaves_memory_without_the_garbage_collector():
    def prompts() -> int:
        return sum(isinstance(each, Prompt) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        suffixes, before = Suffixes(drafts=1, most_tokens=30), prompts()
        for number in range(20):
            ended(suffixes, [number, 50, 51], TEXT)
        assert prompts() - before == len(suffixes._prompts) < 3
    finally:
        gc.enable()


def test_prompts_whose_responses_left_together_do_not_lose_their_places_at_once():
    suffixes = Suffixes(drafts=2, most_noted=30)
    gone = [told(suffixes, [number, 50, 51], TEXT) for number in range(6)]
    last = told(suffixes, [7, 8, 9], TEXT)
    for text in gone:
        suffixes.end(text)
    suffixes.tidy()
    assert all(text.prompt.places for text in gone)
    suffixes.end(last)
    suffixes.tidy()
    assert [bool(text.prompt.places) for text in gone] == [False] * 2 + [True] * 4
    for number in range(6):
        ended(suffixes, [20 + number, 8, 9], [1])
    assert sum(prompt.num_noted for prompt in suffixes._noted.values()) <= 30


def test_places_are_bounded_where_each_response_has_a_longer_prompt_of_its_own():
    suffixes = Suffixes(drafts=1, most_noted=2000)
    for number in range(400):
        size = 10 + number
        ended(suffixes, list(range(1000 * number, 1000 * number + size)), [1])
    assert sum(prompt.num_noted for prompt in suffixes._noted.values()) <= 2000 + size


def test_requests_that_begin_with_a_short_prompt_are_prompts_of_their_own():
    suffixes = Suffixes(drafts=1)
    suffixes.begin([1])
    texts = [told(suffixes, [1, *range(10 * number, 10 * number + 5)], TEXT) for number in range(2, 30)]
    assert len({id(each.prompt) for each in texts}) == len(texts)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_comes_a_draft_is_of_one_length_and_of_known_tokens_and_memory_is_bounded(data):
    suffixes, most = Suffixes(drafts=3, most_tokens=60), 60
    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=6)
    open_texts = []
    for _ in range(data.draw(st.integers(1, 25))):
        act = data.draw(st.sampled_from(("begin", "extend", "end", "draft")))
        if act == "begin":
            open_texts.append(suffixes.begin(data.draw(tokens)))
            assert len(set(map(id, open_texts))) == len(open_texts)
        elif open_texts:
            text = data.draw(st.sampled_from(open_texts))
            if act == "extend":
                suffixes.extend(text, data.draw(tokens))
            elif act == "end":
                open_texts.remove(text)
                suffixes.end(text)
                suffixes.tidy()
            else:
                draft = suffixes.draft(text)
                assert len(draft) == 3
                assert set(draft) <= {token for each in text.prompt.texts for token in each.tokens} | set(
                    text.prompt.tokens
                )
        assert suffixes.num_tokens == sum(prompt.num_tokens for prompt in suffixes._prompts.values())
        if not open_texts:
            assert suffixes.num_tokens <= most
