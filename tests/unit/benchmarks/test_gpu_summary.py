"""Ratios of modes: time for equal useful tokens, measured steps only."""

from __future__ import annotations

import pytest

from benchmarks.gpu.summary import curve_tables, full_rates, summarise, table
from tests.unit.benchmarks.support import block, sample, step


def test_a_ratio_is_of_the_time_for_equal_useful_tokens():
    rows = summarise([block("sync", step(10, 1000)), block("partial_abort", step(6, 800), step(6, 1600))])
    assert rows["sync"]["time_ratio"] == 1
    assert rows["partial_abort"]["time_ratio"] == pytest.approx((12 / 2400) / (10 / 1000))


def test_warm_up_steps_are_left_out():
    rows = summarise([block("sync", step(100, 1, warmup=True), step(10, 1000)), block("sync", step(20, 1000))])
    assert (rows["sync"]["num_steps"], rows["sync"]["useful_tokens_per_s"]) == (2, pytest.approx(2000 / 30))


def test_a_mode_without_a_measured_step_has_no_row():
    assert list(summarise([block("sync", step(10, 1, warmup=True)), block("partial_abort")])) == []


def test_what_was_generated_and_not_taken_is_told_beside():
    rows = summarise([block("sync", step(10, 1000)), block("reorder", step(10, 1000, generated_tokens=500))])
    assert (rows["reorder"]["time_ratio"], rows["reorder"]["generated_time_ratio"]) == (1, 2)


def test_the_bound_is_what_an_engine_generates_without_interruptions():
    rows = summarise([block("sync", step(10, 400)), block("uninterrupted", step(10, 1, generated_tokens=1000))])
    assert rows["sync"]["share_of_bound"] == pytest.approx(0.4)


def test_a_bound_without_versions_has_no_staleness():
    bound = step(10, 1)
    del bound["staleness_steps/max"]
    assert "staleness_max" not in summarise([block("uninterrupted", bound)])["uninterrupted"]


def test_overhead_is_drain_and_resume():
    rows = summarise([block("sync", step(10, 1, drain_ms=150, resume_ms=50))])
    assert rows["sync"]["overhead_share"] == pytest.approx(0.02)


def test_only_samples_with_full_slots_make_the_full_rate():
    full = [sample(second, 4, 100 * second) for second in range(12)]
    empty = [sample(second, 1, 1200 + second) for second in range(12, 40)]
    assert full_rates(full + empty, 4) == [100]


def test_slots_in_use_are_the_engine_s():
    rows = summarise([block("sync", step(1, 1), samples=[sample(0, 4, 0), sample(1, 1, 0)])])
    assert rows["sync"]["slots_in_use"] == pytest.approx(0.625)


def test_samples_of_warm_up_steps_are_left_out():
    samples = [sample(second, 4, 0) for second in (1, 2)] + [sample(3, 2, 0)]
    steps = [step(2, 1, warmup=True, ended_s=2.5), step(2, 1, ended_s=4.5)]
    assert summarise([block("sync", *steps, samples=samples)])["sync"]["slots_in_use"] == 0.5


def test_tables_have_a_cell_for_every_column():
    rows = summarise([block("sync", step(10, 1)), block("reorder", step(10, 1, **{"slots/num": 8.0}))])
    curve = {"cell": [{"mode": "abort", "decode_ms": 1.5}], "interruption": []}
    for text in (table(rows), curve_tables(curve)):
        assert len({line.count("|") for line in text.splitlines()}) == 1
