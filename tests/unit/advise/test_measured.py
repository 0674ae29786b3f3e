"""What whole jobs took: rates of generation, and steps in which slots fill, counted apart."""

from __future__ import annotations

from partial_rollout.advise.measured import (
    STALENESS,
    drafted,
    filling_steps,
    generation,
    parts,
    rates_table,
    ratios_by_repeat,
    slots_in_use,
)
from partial_rollout.advise.workload import workload


def test_steps_in_which_slots_fill_are_counted_apart():
    def step(depth, running, seconds=1.0, again=0):
        named = {"depth": depth, "mean_running": running, "response_tokens": 100, "reprefilled_tokens": again}
        return {f"partial_rollout/{name}": value for name, value in named.items()} | {"timing_s/gen": seconds}

    load = workload("tiny", "long_tail", batch=5, group=2)
    first, steps = [step(2, 1), step(2, 1)], [step(2, 5), step(3, 7), step(3, 10, 3.0, 5), step(3, 6)]
    job = {"mode": "flag", "first_steps": first, "steps": steps}
    assert filling_steps(job) == 4
    rows = parts([job], load)["flag"]
    assert rows["filling"] == {
        "num_steps": 4, "gen_s": 1, "slots_in_use": 14 / 40, "reprefilled_per_1000_tokens": 0,
    }  # fmt: skip
    assert rows["full"] == {"num_steps": 2, "gen_s": 2, "slots_in_use": 36 / 40, "reprefilled_per_1000_tokens": 25}
    job |= {"ends_s": [1, 2, 3, 4, 7, 8], "samples": [[2.5, 2], [3.5, 4], [4.5, 8], [5.0, 0], [6.0, 10]]}
    rows = parts([job], load)["flag"]
    assert (rows["filling"]["slots_by_gauge"], rows["full"]["slots_by_gauge"]) == (0.3, 0.9)
    verls = {"mode": "sync", "first_steps": [{"timing_s/gen": 9.0}], "steps": [{"timing_s/gen": 2.0}]}
    assert filling_steps(verls) == 1
    assert parts([verls], load)["sync"]["full"] == {"num_steps": 1, "gen_s": 2}


def test_the_ratio_of_times_is_told_of_each_repeat():
    def job(mode, repeat, *seconds):
        return {"mode": mode, "repeat": repeat, "steps": [{"timing_s/gen": each} for each in seconds]}

    jobs = [job("sync", 0, 2, 4), job("flag", 0, 3), job("sync", 1, 5), job("flag", 1, 4), job("flag", 2, 9)]
    assert ratios_by_repeat(jobs, "sync") == {"sync": [1, 1], "flag": [1, 0.8]}


def test_the_table_has_rates_and_staleness_of_each_mode():
    def job(mode, *steps):
        names = ("timing_s/gen", "perf/total_num_tokens", f"{STALENESS}/mean", f"{STALENESS}/max")
        return {"mode": mode, "steps": [dict(zip(names, step, strict=False)) for step in steps]}

    load = workload("tiny", "long_tail", batch=5, group=2)
    jobs = [job("sync", (10, 1100), (10, 1100)), job("partial_rollout", (4, 900, 1.0, 1), (6, 1300, 1.5, 3))]
    lines = rates_table(generation(jobs, load, prompt_tokens=10), jobs).splitlines()
    assert lines[0].count("|") == lines[1].count("|") == 8
    assert lines[2:] == [
        "| sync | 2 | 10.0 | 100 | 1.00 |  |  |",
        "| partial_rollout | 2 | 5.0 | 200 | 0.50 | 1.2 | 3 |",
    ]


def test_generation_is_compared_for_equal_response_tokens_of_pairs_of_steps():
    def job(mode, *steps):
        return {"mode": mode, "steps": [{"timing_s/gen": s, "perf/total_num_tokens": n} for s, n in steps]}

    load = workload("tiny", "long_tail", batch=5, group=2)
    sync, ours = job("sync", (10, 1100), (10, 1100), (90, 9000)), job("partial_rollout", (4, 900), (6, 1300))
    rows = generation([sync, ours], load, prompt_tokens=10)
    assert rows["sync"] == {"num_steps": 2, "seconds": 20, "tokens_per_s": 100, "time_ratio_to_sync": 1}
    assert rows["partial_rollout"] == {"num_steps": 2, "seconds": 10, "tokens_per_s": 200, "time_ratio_to_sync": 0.5}


def test_slots_in_use_are_those_of_the_measured_steps_while_any_runs():
    samples = [[1.0, 1], [6.0, 8], [7.0, 0], [8.0, 4]]
    assert slots_in_use({"ends_s": [2.0, 5.0, 9.0], "samples": samples}, 8) == 0.75
    assert slots_in_use({"ends_s": [2.0], "samples": samples}, 8) is None


def test_what_drafts_brought_is_counted_from_the_first_sample_to_the_last():
    samples = [[1.0, 4, 100.0, 50.0, 900.0], [2.0, 4, 130.0, 70.0, 950.0], [3.0, 4, 200.0, 200.0, 1400.0]]
    assert drafted({"samples": samples}) == {"tokens_a_checked_step": 2.5, "share_of_checked_tokens": 0.5}
    assert drafted({"samples": samples[:1]}) == {}
    assert drafted({"samples": [[1.0, 4], [2.0, 4]]}) == {}
    assert slots_in_use({"ends_s": [0.0, 0.0, 0.0], "samples": samples}, 8) == 0.5
