"""When a step has drafts: by what they brought, and by how much longer steps took with them."""

from __future__ import annotations

import pytest

from partial_rollout.rollout.draft_gate import LEAST_RATIOS, LIKE, PROBE, RATIOS, DraftGate


def test_drafts_are_made_where_they_bring_more_than_they_cost():
    gate = DraftGate(drafts=3)
    gate.note(checked=2048, tokens=2048)
    assert [gate.is_open(requests) for requests in (1, 16, 256)] == [False, False, False]
    gate.note(checked=512, tokens=3 * 512)
    assert [gate.is_open(requests) for requests in (16, 64, 256)] == [True, True, False]
    gate.note(checked=0, tokens=0)
    gate.note(checked=10_000, tokens=30_000)
    assert gate.is_open(256)
    assert not DraftGate(drafts=5).is_open(64)


def test_what_drafts_bring_is_seen_now_and_then_where_they_do_not_pay():
    gate = DraftGate(drafts=3)
    opened = [gate.is_open(256) for _ in range(2 * PROBE + 2)]
    assert [step for step, is_open in enumerate(opened) if is_open] == [PROBE, 2 * PROBE + 1]


def test_where_drafts_pay_a_step_now_and_then_has_none_to_see_what_it_takes():
    gate = DraftGate(drafts=3)
    gate.note(checked=2048, tokens=3 * 2048)
    opened = [gate.is_open(16) for _ in range(2 * PROBE + 2)]
    assert [step for step, is_open in enumerate(opened) if not is_open] == [PROBE, 2 * PROBE + 1]


def test_where_steps_have_drafts_by_turns_none_is_a_probe():
    gate = DraftGate(drafts=3)
    assert [gate.is_open(requests) for _ in range(2 * PROBE) for requests in (16, 256)] == [True, False] * 2 * PROBE


def probed(gate: DraftGate, requests: int, times: int, *, drafts_s: float, without_s: float, has_drafts: bool) -> None:
    """Steps of one way, and after each `LIKE` of them one of the other way."""
    took = {True: drafts_s, False: without_s}
    for _ in range(times):
        for _ in range(LIKE):
            gate.took(requests, took[has_drafts], has_drafts=has_drafts)
        gate.took(requests, took[not has_drafts], has_drafts=not has_drafts)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_the_price_is_what_steps_took(has_drafts):
    gate = DraftGate(drafts=3)
    believed = gate.price(16)
    times = {"drafts_s": 0.013, "without_s": 0.010, "has_drafts": has_drafts}
    probed(gate, 16, LEAST_RATIOS - 1, **times)
    assert gate.price(16) == believed == pytest.approx(1.072)
    probed(gate, 16, 1, **times)
    assert gate.price(16) == gate.price(31) == pytest.approx(1.3)
    assert gate.price(32) == pytest.approx(1 + 32 * 0.0045)  # other numbers of requests were not measured
    gate.note(checked=2048, tokens=2560)
    assert not gate.is_open(16)


def test_the_newest_probes_count_and_one_that_is_far_off_does_not():
    gate = DraftGate(drafts=3)
    probed(gate, 16, RATIOS, drafts_s=0.020, without_s=0.010, has_drafts=False)
    probed(gate, 16, RATIOS - 1, drafts_s=0.011, without_s=0.010, has_drafts=False)
    probed(gate, 16, 1, drafts_s=60.0, without_s=0.010, has_drafts=False)
    assert gate.price(16) == pytest.approx(1.1)


def test_a_step_after_few_of_the_other_way_or_of_another_size_says_nothing():
    gate = DraftGate(drafts=3)
    for _ in range(RATIOS):
        for _ in range(LIKE - 1):
            gate.took(16, 0.010, has_drafts=False)
        gate.took(16, 0.030, has_drafts=True)
        for _ in range(LIKE):
            gate.took(16, 0.010, has_drafts=False)
        gate.took(64, 0.030, has_drafts=True)
    assert gate.price(16) == pytest.approx(1.072)
    assert gate.price(64) == pytest.approx(1.288)


def test_of_steps_that_go_on_the_other_way_the_first_counts():
    gate = DraftGate(drafts=3)
    for _ in range(LEAST_RATIOS - 1):
        probed(gate, 16, 1, drafts_s=0.013, without_s=0.010, has_drafts=False)
        gate.took(16, 0.099, has_drafts=True)
    assert gate.price(16) == pytest.approx(1.072)
