"""The drafter as vLLM calls it: rows of a batch that requests leave, enter and move between."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partial_rollout.rollout import drafts as drafts_module
from partial_rollout.rollout.draft_gate import FIRST_TOKENS, LEAST_EXCESSES, PERIOD, USUAL
from partial_rollout.rollout.drafts import SuffixDrafts

DRAFTS, LONGEST = 3, 200
CONFIG = SimpleNamespace(
    speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS),
    model_config=SimpleNamespace(max_model_len=LONGEST),
    compilation_config=SimpleNamespace(cudagraph_capture_sizes=[]),
)


@pytest.fixture(autouse=True)
def _log_as_it_is(monkeypatch):
    """What a drafter sets up is for a process of its own."""
    monkeypatch.setattr(drafts_module, "configure_logging", lambda: None)


GRAPHS = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8, 16])


def drafter_of(config) -> SuffixDrafts:
    """A drafter by whose clock nothing takes longer than at first believed."""
    drafter = SuffixDrafts(config, clock=lambda: 0.0)
    drafter._gate.took = lambda *_, **__: None
    return drafter


class Batch:
    """The rows of an engine that has a fixed text for each request, so that greedy drafts are right or wrong.

    As in vLLM, the last row moves to the place of one that leaves.
    """

    def __init__(self, drafter: SuffixDrafts, rows: int = 8):
        self.drafter = drafter
        self.requests: list[tuple[list[int], int]] = []  # what a request has at its end, and how many tokens it has
        self.drafts: list[list[int]] = []
        self.prefills: list[int] = []  # steps in which the request of the row gets no token yet
        self.token_ids = np.zeros((rows, LONGEST), dtype=np.int32)
        self.steps = self.brought = 0

    def add(self, prompt: list[int], response: list[int], prefills: int = 0) -> None:
        self.requests.append(([*prompt, *response], len(prompt)))
        self.drafts.append([])
        self.prefills.append(prefills)

    def remove(self, row: int) -> tuple[list[int], int]:
        """The request of the row leaves; what it has."""
        request, last = self.requests[row], (self.requests.pop(), self.drafts.pop(), self.prefills.pop())
        if row < len(self.requests):
            self.requests[row], self.drafts[row], self.prefills[row] = last
        return request

    def step(self) -> None:
        """One step: each request gets its drafts that are right, and one token; those that are whole leave."""
        sampled = []
        for row, (text, length) in enumerate(self.requests):
            right = next(
                (n for n, token in enumerate(self.drafts[row]) if text[length + n : length + n + 1] != [token]), 3
            )
            is_prefilled, self.prefills[row] = self.prefills[row] > 0, max(0, self.prefills[row] - 1)
            new = [] if is_prefilled else text[length : length + min(right, len(self.drafts[row])) + 1]
            self.requests[row] = (text, length + len(new))
            self.token_ids[row, : length + len(new)] = text[: length + len(new)]
            sampled.append(new)
        self.steps, self.brought = self.steps + len(sampled), self.brought + sum(map(len, sampled))
        lengths = np.array([length for _, length in self.requests], dtype=np.int32)
        given = ([list(tokens) for tokens in sampled], lengths.copy(), self.token_ids.copy())
        self.drafts = self.drafter.propose(sampled, lengths, self.token_ids, slot_mappings=None)
        # The arrays are the engine's own: a drafter that changed them would change responses.
        assert sampled == given[0]
        assert np.array_equal(lengths, given[1])
        assert np.array_equal(self.token_ids, given[2])
        for row in reversed(range(len(self.requests))):
            if len(self.requests[row][0]) == self.requests[row][1]:
                self.remove(row)

    def run(self) -> float:
        """To the end of all requests; the tokens that a step brought."""
        self.steps = self.brought = 0
        while self.requests:
            self.step()
        return self.brought / self.steps


def text(seed: int, length: int = 60) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def begun(requests: int) -> Batch:
    """Requests that have got 20 tokens each."""
    batch = Batch(drafter_of(CONFIG))
    for number in range(requests):
        batch.add(text(100 + number), text(number))
    for _ in range(20):
        batch.step()
    return batch


def test_in_a_second_epoch_nearly_all_drafts_are_right():
    batch = Batch(drafter_of(CONFIG))
    found = []
    for _ in range(2):
        for number in range(5):
            batch.add(text(100 + number, 10 + number), text(number, 40 + 5 * number))
        found.append(batch.run())
    assert found[0] == 1.0
    assert found[1] > 3.0


def test_what_a_request_got_before_it_left_is_known_when_it_comes_back_in_another_row():
    batch = begun(3)
    whole, length = batch.remove(0)
    for _ in range(5):
        batch.step()
    tokens = batch.drafter._suffixes.num_tokens
    batch.add(whole[:length], whole[length:])
    batch.step()
    # Each of the three requests has got one token, and no text was made for the one that came back.
    assert batch.drafter._suffixes.num_tokens == tokens + 3
    batch.run()
    batch.add(text(100), text(0))
    assert batch.run() > 3.0


def test_places_are_kept_over_an_interruption_after_which_rows_come_back_over_several_steps():
    batch = begun(6)
    suffixes = batch.drafter._suffixes
    suffixes._most_noted = 100
    noted = dict.fromkeys(suffixes._noted.values())
    away = [batch.remove(0) for _ in range(6)]
    for whole, length in away:
        batch.add(whole[:length], whole[length:])
        batch.step()
        assert all(prompt.places for prompt in noted)


def test_requests_that_leave_are_closed_and_forgotten_where_there_is_no_room():
    batch = Batch(drafter_of(CONFIG))
    batch.drafter._suffixes._most_tokens = 100
    for number in range(6):
        batch.add(text(100 + number), text(number, 10 + 3 * number))
    batch.run()
    batch.add(text(200), [1, 2])  # a step after which the other rows are seen to be gone
    batch.run()
    batch.drafter.propose([], np.zeros(0, dtype=np.int32), batch.token_ids)
    assert not any(prompt.is_open for prompt in batch.drafter._suffixes._prompts.values())
    assert batch.drafter._suffixes.num_tokens <= 100


def test_a_row_that_is_prefilled_has_no_draft():
    drafter = drafter_of(CONFIG)
    token_ids = np.zeros((2, LONGEST), dtype=np.int32)
    token_ids[0, :3] = [1, 2, 3]
    drafts = drafter.propose([[3], []], np.array([3, 0], dtype=np.int32), token_ids)
    assert [len(draft) for draft in drafts] == [DRAFTS, 0]


def test_a_request_that_is_nearly_as_long_as_it_may_be_has_no_draft():
    batch = Batch(drafter_of(CONFIG))
    batch.add(text(1, 10), text(2, LONGEST - 10))
    batch.add(text(1, 10), text(2, LONGEST - 10))
    lengths = []
    while batch.requests:
        batch.step()
        lengths += [length for (_, length), draft in zip(batch.requests, batch.drafts, strict=True) if draft]
    assert max(lengths) < LONGEST - DRAFTS - 1


def test_drafts_that_are_wrong_end_and_begin_again_where_they_are_right():
    batch = Batch(drafter_of(CONFIG), rows=80)
    gate = batch.drafter._gate
    assert gate.tokens_a_step == FIRST_TOKENS
    for number in range(60):
        batch.add(text(1000 + number, 10), text(number, 150))
    batch.step()
    assert all(batch.drafts)
    while batch.requests and any(batch.drafts):
        batch.step()
    seen = gate.tokens_a_step
    assert seen < 1.3
    for _ in range(5):
        batch.step()
        assert not any(batch.drafts)
    assert gate.tokens_a_step == seen  # rows without drafts say nothing of them
    batch.run()
    assert not gate.is_open(60)
    for number in range(20):
        batch.add(text(1000 + number, 10), text(number, 150))
        batch.run()
    assert gate.is_open(60)


def test_the_time_of_a_step_counts_where_no_request_begins_in_it():
    """By a clock that each step moves: steps of one request take 10 ms, and longer if one is prefilled or begins."""
    now, noted = [0.0], []
    batch = Batch(SuffixDrafts(CONFIG, clock=lambda: now[0]))
    batch.drafter._gate.took = lambda requests, seconds, *, has_drafts: noted.append((requests, seconds, has_drafts))

    def step(seconds: float) -> None:
        now[0] += seconds
        batch.step()

    batch.add(text(100, 10), text(0, 150))
    step(5.0)  # it begins
    for _ in range(USUAL):
        step(0.01)
    batch.add(text(101, 10), text(1, 150), prefills=1)
    step(0.5)  # the second is prefilled
    step(0.25)  # and begins
    batch.drafter._gate.is_open = lambda requests: False
    for _ in range(2):
        step(0.02)
    found = [(requests, round(seconds, 3), has_drafts) for requests, seconds, has_drafts in noted]
    assert found == [(1, 0.01, True)] * USUAL + [(2, 0.02, True), (2, 0.02, False)]


@pytest.mark.parametrize(("longer", "is_open"), [(1.5, True), (6.0, False)])
def test_drafts_that_are_right_end_where_steps_with_them_take_too_long(longer, is_open):
    """Four right tokens a step by a clock that says how long a step with drafts takes."""
    now = [0.0]
    batch = Batch(SuffixDrafts(CONFIG, clock=lambda: now[0]))
    batch.drafter._gate.note(checked=2048, tokens=3 * 2048)
    drafted = []
    while len(drafted) < (LEAST_EXCESSES + 3) * PERIOD:
        if not batch.requests:
            for number in range(3):
                batch.add(text(100 + number, 10), text(number, 150))
        now[0] += 0.01 * (longer if any(batch.drafts) else 1)
        batch.step()
        drafted.append(any(batch.drafts))
    assert (sum(drafted[-PERIOD:]) > PERIOD // 2) == is_open


@pytest.mark.parametrize(("measured", "how"), [(4, "measured"), (8, "estimated")])
def test_a_line_in_the_log_says_how_many_steps_had_drafts_and_what_they_took(monkeypatch, caplog, measured, how):
    monkeypatch.setattr(drafts_module, "TOLD", 6)
    monkeypatch.setattr(logging.getLogger("partial_rollout"), "propagate", True)
    drafter = drafter_of(SimpleNamespace(**{**vars(CONFIG), "compilation_config": GRAPHS}))
    drafter._gate._excesses[measured.bit_length()].extend([0.25] * LEAST_EXCESSES)
    opened = iter([True, False, True, True])
    drafter._gate.is_open = lambda requests: next(opened)
    with caplog.at_level("INFO", logger="partial_rollout"):
        drafter._kind(5)
        for _ in range(4):
            drafter._kind(3)
        assert not caplog.messages
        drafter._kind(5)
    (line,) = caplog.messages
    assert line.startswith(
        "drafts in 6 steps: 3 steps had them, 1 had none since they would cost more time than they save, "
    )
    assert line.endswith(
        "2 had none since the step would be larger than the largest CUDA graph; a step of 5 requests with drafts "
        f"brings each 1.30 tokens and takes 2.25 times as long ({how})"
    )


def test_rows_that_are_prefilled_do_not_count_as_requests_of_the_step():
    """60 of 80 rows run: few enough for drafts that bring 1.3 tokens, where 80 would not be."""
    batch = Batch(drafter_of(CONFIG), rows=80)
    for number in range(80):
        batch.add(text(1000 + number, 10), text(number), prefills=2 * (number >= 60))
    batch.step()
    assert [len(draft) for draft in batch.drafts] == [DRAFTS] * 60 + [0] * 20
    batch.step()
    batch.step()
    assert not any(batch.drafts)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whoever_enters_and_leaves_a_row_has_its_own_text_and_whole_drafts_of_known_tokens(data):
    """Few tokens and few prompts, so that requests look alike."""
    tokens = st.lists(st.integers(1, 3), min_size=1, max_size=12)
    prompts = data.draw(st.lists(tokens, min_size=1, max_size=3))
    batch = Batch(drafter_of(CONFIG))
    away: list[tuple[list[int], int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        for _ in range(data.draw(st.integers(0, 3))):
            if batch.requests and data.draw(st.booleans()):
                away.append(batch.remove(data.draw(st.integers(0, len(batch.requests) - 1))))
            elif len(batch.requests) < len(batch.token_ids):
                back = away and data.draw(st.booleans())
                whole, length = away.pop() if back else (data.draw(st.sampled_from(prompts)), None)
                new = whole[length:] if back else data.draw(tokens)
                batch.add(whole[:length], new, prefills=data.draw(st.integers(0, 2)))
        before = list(zip(batch.requests, batch.prefills, strict=True))
        batch.step()
        for row, ((whole, _), prefills) in enumerate(before):
            if prefills or row >= len(batch.requests) or batch.requests[row][0] is not whole:
                continue
            own = batch.drafter._rows[row].text
            found = [*own.prompt.tokens, *own.tokens[len(own.prompt.head) :]]
            assert found == whole[: batch.requests[row][1]]
            assert len(batch.drafts[row]) == DRAFTS
            assert set(batch.drafts[row]) <= {1, 2, 3}


def test_a_request_that_moves_to_the_row_of_one_as_long_is_not_taken_for_it():
    batch = Batch(drafter_of(CONFIG))
    for number in range(2):
        batch.add(text(100 + number, 10), text(number))
    for _ in range(8):
        batch.step()
    batch.remove(0)
    batch.step()
    prompts = batch.drafter._suffixes._prompts.values()
    (prompt,) = (each for each in prompts if each.tokens.tolist() == text(100, 10))
    assert [each.tokens[10:].tolist() for each in prompt.texts] == [text(0)[:8]]


def test_steps_that_are_larger_than_the_largest_graph_have_no_drafts():
    batch = Batch(drafter_of(SimpleNamespace(**{**vars(CONFIG), "compilation_config": GRAPHS})))
    for number in range(5):
        batch.add(text(100 + number, 10), text(number))
    batch.step()
    assert not any(batch.drafts)
    batch.remove(4)
    batch.step()
    assert [len(draft) for draft in batch.drafts] == [DRAFTS] * 4


def test_a_row_in_which_another_request_is_prefilled_frees_the_text_of_the_one_before():
    drafter = drafter_of(CONFIG)
    token_ids = np.zeros((4, LONGEST), dtype=np.int32)
    token_ids[0, :4] = [1, 2, 3, 7]
    drafter.propose([[7]], np.array([4], dtype=np.int32), token_ids)
    token_ids[0, :4] = [50, 51, 52, 53]
    token_ids[1, :5] = [1, 2, 3, 7, 8]
    drafter.propose([[], [8]], np.array([4, 5], dtype=np.int32), token_ids)
    (prompt,) = drafter._suffixes._prompts.values()
    assert [each.tokens.tolist() for each in prompt.texts] == [[1, 2, 3, 7, 8]]
