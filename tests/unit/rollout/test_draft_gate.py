"""When a step has drafts: by what they brought, and by how much longer steps took with them."""

from __future__ import annotations

import pytest

from partial_rollout.rollout.draft_gate import EXCESSES, LEAST_EXCESSES, MOST_PROBES, PERIOD, PROBED, USUAL, DraftGate


def test_drafts_are_made_where_they_bring_more_than_they_cost():
    gate = DraftGate(drafts=3)
    gate.note(checked=2048, tokens=2048)
    assert [gate.is_open(requests) for requests in (1, 16, 256)] == [False, False, False]
    gate.note(checked=64, tokens=3 * 64)
    assert [gate.is_open(requests) for requests in (16, 64, 256)] == [True, True, False]
    gate.note(checked=0, tokens=0)
    gate.note(checked=10_000, tokens=30_000)
    assert gate.is_open(256)
    assert not DraftGate(drafts=5).is_open(64)


@pytest.mark.parametrize(("requests", "steps"), [(256, 1), (16, 2), (5, 7), (1, MOST_PROBES)])
def test_where_drafts_do_not_pay_some_requests_have_them_now_and_then(requests, steps):
    gate = DraftGate(drafts=3)
    gate.note(checked=1024, tokens=1024)
    opened = [gate.is_open(requests) for _ in range(2 * PERIOD + MOST_PROBES + 1)]
    probes = [step for step, is_open in enumerate(opened) if is_open]
    assert probes == [*range(PERIOD, PERIOD + steps), *range(2 * PERIOD + 1, 2 * PERIOD + 1 + steps)]
    assert steps == MOST_PROBES or steps * requests >= PROBED


def test_where_drafts_pay_a_step_now_and_then_has_none_to_see_what_it_takes():
    gate = DraftGate(drafts=3)
    gate.note(checked=2048, tokens=3 * 2048)
    opened = [gate.is_open(16) for _ in range(2 * PERIOD + 2)]
    assert [step for step, is_open in enumerate(opened) if not is_open] == [PERIOD, 2 * PERIOD + 1]


@pytest.mark.parametrize("requests", [1, 2, 4, 16, 64])
def test_drafts_that_have_become_right_are_noticed_with_few_requests_too(requests):
    """The second epoch of a long tail, after a first one without a match."""
    gate = DraftGate(drafts=3)
    gate.note(checked=2048, tokens=2048)
    probed(gate, requests, EXCESSES, drafts_s=0.013, without_s=0.010, has_drafts=False)
    steps, in_a_row = 0, 0
    while in_a_row <= MOST_PROBES:
        is_open = gate.is_open(requests)
        gate.note(checked=requests * is_open, tokens=3 * requests * is_open)
        steps, in_a_row = steps + 1, in_a_row + 1 if is_open else 0
    assert steps < 4 * PERIOD


def test_where_steps_have_drafts_by_turns_none_is_a_probe():
    gate = DraftGate(drafts=3)
    assert [gate.is_open(requests) for _ in range(2 * PERIOD) for requests in (16, 256)] == [True, False] * 2 * PERIOD


def probed(gate: DraftGate, requests: int, times: int, *, drafts_s: float, without_s: float, has_drafts: bool) -> None:
    """Steps of one kind, and after each `USUAL` of them one of the other."""
    took = {True: drafts_s, False: without_s}
    for _ in range(times):
        for _ in range(USUAL):
            gate.took(requests, took[has_drafts], has_drafts=has_drafts)
        gate.took(requests, took[not has_drafts], has_drafts=not has_drafts)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_the_price_is_what_steps_took(has_drafts):
    gate = DraftGate(drafts=3)
    believed = gate.price(16)
    times = {"drafts_s": 0.013, "without_s": 0.010, "has_drafts": has_drafts}
    probed(gate, 16, LEAST_EXCESSES - 1, **times)
    assert gate.price(16) == believed == pytest.approx(1.072)
    assert not gate.has_measured(16)
    probed(gate, 16, 1, **times)
    assert gate.has_measured(16)
    assert gate.price(16) == pytest.approx(1.3)
    gate.note(checked=2048, tokens=2560)
    assert not gate.is_open(16)


def test_other_numbers_of_requests_go_by_the_nearest_that_was_measured():
    gate = DraftGate(drafts=3)
    probed(gate, 16, EXCESSES, drafts_s=0.013, without_s=0.010, has_drafts=False)
    assert [gate.price(requests) for requests in (8, 24, 32)] == pytest.approx([1.15, 1.45, 1.6])
    probed(gate, 64, EXCESSES, drafts_s=0.016, without_s=0.010, has_drafts=False)
    assert [gate.price(requests) for requests in (16, 64, 128)] == pytest.approx([1.3, 1.6, 2.2])


@pytest.mark.parametrize("few", [1, 4, 32])
@pytest.mark.parametrize("drafts_s", [0.009, 0.010, 0.013])
def test_what_a_step_of_few_requests_takes_is_not_taken_for_each_of_many(few, drafts_s):
    """In a job on a GPU a step of 175 requests was said to take -4.76 times as long."""
    gate = DraftGate(drafts=3)
    believed = gate.price(175)
    probed(gate, few, EXCESSES, drafts_s=drafts_s, without_s=0.010, has_drafts=False)
    assert [gate.has_measured(few), gate.has_measured(175)] == [True, False]
    assert gate.price(few) == pytest.approx(drafts_s / 0.010)
    assert gate.price(175) == believed
    probed(gate, few, EXCESSES, drafts_s=0.030, without_s=0.010, has_drafts=False)
    assert gate.price(175) == pytest.approx(5.0)


@pytest.mark.parametrize("measured", [1, 4, 16, 31, 128])
def test_what_drafts_save_does_not_grow_with_the_requests(measured):
    gate = DraftGate(drafts=3)
    probed(gate, measured, EXCESSES, drafts_s=0.004, without_s=0.010, has_drafts=False)
    prices = [gate.price(requests) for requests in range(1, 2 ** measured.bit_length())]
    assert 0.399 < min(prices) <= max(prices) < 1


def test_fewer_requests_than_were_measured_go_by_those_alone():
    gate = DraftGate(drafts=3)
    probed(gate, 64, EXCESSES, drafts_s=0.0101, without_s=0.010, has_drafts=False)
    assert gate.price(20) == pytest.approx(1 + 0.01 * 20 / 64)


@pytest.mark.parametrize("order", [(16, 256), (256, 16)])
def test_of_two_measured_numbers_that_are_as_near_the_smaller_counts(order):
    gate, took_s = DraftGate(drafts=3), {16: 0.016, 256: 0.020}
    for requests in order:
        probed(gate, requests, EXCESSES, drafts_s=took_s[requests], without_s=0.010, has_drafts=False)
    assert gate.price(64) == pytest.approx(1 + 0.6 * 32 / 16)


def test_drafts_that_bring_as_much_as_they_cost_are_made():
    gate = DraftGate(drafts=3)
    gate.tokens_a_step = gate.price(16)
    assert gate.is_open(16)


def test_the_newest_probes_count_and_one_that_is_far_off_does_not():
    gate = DraftGate(drafts=3)
    probed(gate, 16, EXCESSES, drafts_s=0.020, without_s=0.010, has_drafts=False)
    probed(gate, 16, EXCESSES - 1, drafts_s=0.011, without_s=0.010, has_drafts=False)
    probed(gate, 16, 1, drafts_s=60.0, without_s=0.010, has_drafts=False)
    assert gate.price(16) == pytest.approx(1.1)


def test_a_step_after_few_of_the_other_kind_or_of_another_size_says_nothing():
    gate = DraftGate(drafts=3)
    for _ in range(EXCESSES):
        for _ in range(USUAL - 1):
            gate.took(16, 0.010, has_drafts=False)
        gate.took(16, 0.030, has_drafts=True)
        for _ in range(USUAL):
            gate.took(16, 0.010, has_drafts=False)
        gate.took(64, 0.030, has_drafts=True)
    assert gate.price(16) == pytest.approx(1.072)
    assert gate.price(64) == pytest.approx(1.288)


def test_of_steps_that_go_on_with_the_other_kind_the_first_counts():
    gate = DraftGate(drafts=3)
    for _ in range(LEAST_EXCESSES - 1):
        probed(gate, 16, 1, drafts_s=0.013, without_s=0.010, has_drafts=False)
        gate.took(16, 0.099, has_drafts=True)
    assert gate.price(16) == pytest.approx(1.072)
