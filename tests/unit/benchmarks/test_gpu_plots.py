"""Pictures are drawn from whatever a run has stored, whole or cut off."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from benchmarks.bench_rollout import summarise
from benchmarks.gpu.plots import as_blocks, draw, draw_rates, draw_slots, draw_steps, place
from benchmarks.gpu.summary import by_trace
from tests.unit.benchmarks.support import block, sample, step


def result(*, modes: tuple[str, ...], cells: list[dict]) -> dict:
    samples = [sample(second, 4 - second % 3, 50 * second) for second in range(20)]
    blocks = [block(mode, step(4, 100), step(5, 100), samples=samples) for mode in modes]
    about = {"engine": {"shape": "tiny"}, "devices": []}
    return {**about, "blocks": blocks, "summary": by_trace(blocks), "curve": {"cell": cells}}


@pytest.mark.parametrize(
    ("modes", "cells", "kinds"),
    [
        (("sync", "partial_abort", "uninterrupted"), [{"concurrency": 8, "context": 96, "decode_ms": 2.0}], 4),
        (("partial_abort",), [], 3),
        ((), [{"concurrency": 8, "context": 96, "decode_ms": 2.0}], 1),
    ],
)
def test_pictures(tmp_path, modes, cells, kinds):
    paths = draw(result(modes=modes, cells=cells), tmp_path, "x")
    assert len(paths) == kinds
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_what_is_drawn_of_blocks():
    """Requests as a share of a batch's slots, every measured step with the mean, and the bound."""
    steps = [step(1, 8, warmup=True), step(4, 100), step(6, 90)]
    samples = [sample(second, 4 - second % 3, 50 * second) for second in range(20)]
    blocks = [block(mode, *steps, samples=samples, slots=8) for mode in ("sync", "uninterrupted")]
    found = {"blocks": blocks, "summary": by_trace(blocks)["long_tail"]}
    slots, steps, rates = (axes_of(each, found) for each in (draw_slots, draw_steps, draw_rates))
    assert slots.get_legend_handles_labels()[1] == ["sync", "uninterrupted"]
    assert list(slots.lines[0].get_ydata()[:4]) == [4 / 8, 3 / 8, 2 / 8, 4 / 8]
    assert (list(steps.lines[0].get_ydata()), list(steps.lines[1].get_ydata())) == ([4, 6], [5])
    heights = [bar.get_height() for bar in rates.patches]
    assert heights == [row["useful_tokens_per_s"] for row in found["summary"].values()]
    (bound,) = rates.lines
    assert set(bound.get_ydata()) == {found["summary"]["uninterrupted"]["generated_tokens_per_s"]}
    assert all(axes.get_ylabel() for axes in (slots, steps, rates))


def axes_of(drawn, found: dict):
    axes = Figure().add_subplot()
    drawn(axes, found)
    return axes


def whole_jobs() -> dict:
    """The first one was cut off before its first step ended, the last one before a measured step did."""
    steps = [{"timing_s/gen": wall_s, "timing_s/step": 6.0, "perf/total_num_tokens": 100} for wall_s in (4.0, 5.0)]
    faster = [{**step, "perf/total_num_tokens": 200} for step in steps]
    samples = [[float(second), 8 - second % 3] for second in range(40)]
    whole = {"repeat": 0, "slots_in_use": 0.5, "ends_s": [10.0, 16.0, 22.0, 28.0], "steps": steps, "samples": samples}
    jobs = [{**whole, "mode": "sync"}, {**whole, "mode": "colocate_async", "steps": faster}]
    nowhere = {**jobs[0], "ends_s": [], "steps": [], "samples": []}
    cut = {**whole, "mode": "partial_rollout", "ends_s": [10.0], "steps": []}
    load = {"batch": 2, "group": 4, "skip": 2}
    about = {"engine": {"shape": "tiny"}, "devices": [], "workload": load, "options": {"trace": "long_tail"}}
    return {**about, "jobs": [nowhere, *jobs, cut], "summary": summarise(jobs)}


def test_pictures_of_whole_jobs(tmp_path):
    paths = draw(whole_jobs(), tmp_path, "x")
    assert [path.name for path in paths] == [f"{kind}_long_tail_x.png" for kind in ("slots", "steps", "rates")]


def test_without_samples_there_is_no_picture_of_slots(tmp_path):
    jobs = whole_jobs()
    for job in jobs["jobs"]:
        job["samples"] = []
    paths = draw(jobs, tmp_path, "x")
    assert [path.name for path in paths] == [f"{kind}_long_tail_x.png" for kind in ("steps", "rates")]


def test_rates_of_whole_jobs_are_those_of_generation_where_it_has_them():
    jobs = whole_jobs()
    assert as_blocks(jobs)["summary"]["long_tail"]["colocate_async"]["time_ratio"] == 0.5
    rates = {
        "sync": {"tokens_per_s": 7.0, "time_ratio_to_sync": 1.0},
        "colocate_async": {"tokens_per_s": 9.0, "time_ratio_to_sync": 0.8},
    }
    rows = as_blocks({**jobs, "generation": rates})["summary"]["long_tail"]
    assert [(row["useful_tokens_per_s"], row["time_ratio"]) for row in rows.values()] == [(7.0, 1.0), (9.0, 0.8)]


def test_the_mean_of_a_whole_jobs_steps_is_that_of_pairs():
    """As in the tables: the odd last one is drawn and not counted, unless there is no other."""
    jobs = whole_jobs()
    measured = {"sync": (4.0, 5.0), "colocate_async": (60.0, 8.0, 62.0), "partial_rollout": (7.0,)}
    jobs["jobs"] = [{**jobs["jobs"][1], "mode": mode} for mode in measured]
    for job in jobs["jobs"]:
        job["ends_s"] = [10.0 * number for number in range(1, 6)]
        job["steps"] = [{"timing_s/gen": wall_s} for wall_s in measured[job["mode"]]]
    jobs["summary"] = {mode: {"tokens_per_s": 1.0} for mode in measured}
    found = as_blocks(jobs)
    lines = axes_of(draw_steps, {**found, "summary": found["summary"]["long_tail"]}).lines
    assert [tuple(line.get_ydata()) for line in lines[::2]] == list(measured.values())
    assert [list(line.get_ydata()) for line in lines[1::2]] == [[4.5], [34.0], [7.0]]


def test_a_picture_says_on_what_it_was_measured():
    about = result(modes=(), cells=[])
    assert place(about) == "tiny, CPU"
    assert place({**about, "devices": ["H200", "H200"]}) == "tiny, 2 x H200"
    one = {"engine": {"shape": "tiny", "tensor_parallel": 1}, "devices": ["H200", "H200"]}
    assert place({**about, **one}) == "tiny, 1 x H200"
    jobs = {**whole_jobs(), "devices": ["H200", "H200"]}
    assert place(as_blocks(jobs)) == "tiny, 2 x H200"
    alone = [{**job, "gpus": [1]} for job in jobs["jobs"]]
    assert place(as_blocks({**jobs, "jobs": alone})) == "tiny, 1 x H200"


def test_a_whole_job_is_a_block_with_all_its_steps():
    """Also of those that were not measured it is known when they ended."""
    found = as_blocks(whole_jobs())
    block = found["blocks"][1]
    assert (block["mode"], block["trace"], block["slots"], block["samples"][1]) == ("sync", "long_tail", 8, [1.0, 7, 7])
    assert [tuple(step[name] for name in ("ended_s", "warmup", "wall_s")) for step in block["steps"]] == [
        *((10.0, True, 0.0), (16.0, True, 0.0), (22.0, False, 4.0), (28.0, False, 5.0))
    ]
    assert {mode: row["time_ratio"] for mode, row in found["summary"]["long_tail"].items()} == {
        "sync": 1.0,
        "colocate_async": 0.5,
    }
