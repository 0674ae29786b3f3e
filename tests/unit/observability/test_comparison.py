"""Runs side by side: ratios, their spread, and what too few steps do not say; stored jobs give the stored ratios."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout import compare as compare_command
from partial_rollout import report as report_command
from partial_rollout.advise.result import read_result
from partial_rollout.errors import DataError
from partial_rollout.observability.charts import MAX_POINTS, Line, bar_chart, line_chart
from partial_rollout.observability.comparison import Estimate, as_text, compare, table, verdict
from partial_rollout.observability.events import EventWriter, Fault, StepEnded, Warned
from partial_rollout.observability.record import RunRecord
from partial_rollout.observability.report import CHARTS, lost_rows, report_at_end, report_page

if TYPE_CHECKING:
    from collections.abc import Iterator

STORED = Path(__file__).resolve().parents[3] / "benchmarks/results/gpu"
BASE = "sync"
VERL = {"timing_s/step": 10.0, "timing_s/gen": 6.0, "perf/total_num_tokens": 1000.0, "critic/score/mean": 0.5}
STEP, REWARD = "timing_s/step", "critic/score/mean"


def run(name: str, count: int, *, wobble: float = 0.0, changed: dict[str, float] | None = None) -> RunRecord:
    """A run whose pairs of steps are in turn longer and shorter."""
    record = RunRecord(name)
    for number in range(1, count + 1):
        metrics: dict[str, float | None] = {**VERL, **(changed or {})}
        metrics[STEP] = (metrics[STEP] or 0.0) + wobble * (-1) ** ((number - 1) // 2)
        record.add(StepEnded(step=number, total=count, metrics=metrics))
    return record


def stored_jobs(name: str) -> tuple[dict[str, Any], list[RunRecord]]:
    """A stored result and its jobs, the base first."""
    stored = read_result(STORED / f"{name}.json")
    jobs = sorted(stored["jobs"], key=lambda each: each["mode"] != BASE)
    return stored, [_record(job) for job in jobs]


def _record(job: dict[str, Any]) -> RunRecord:
    record = RunRecord(job["mode"])
    for number, metrics in enumerate([*job.get("first_steps", []), *job["steps"]], 1):
        record.add(StepEnded(step=number, total=0, metrics=metrics))
    return record


def within(estimates: dict[str, Estimate], expected: dict[str, float]) -> Iterator[bool]:
    for name, estimate in estimates.items():
        assert estimate.low is not None
        assert estimate.high is not None
        yield estimate.low <= expected[name] <= estimate.high


def test_a_faster_run_is_faster_and_one_that_wobbles_is_not_told_apart() -> None:
    base = run("sync", 24, wobble=1.0)
    fast, same = run("fast", 24, wobble=1.0, changed={STEP: 5.0}), run("same", 24, wobble=4.0, changed={STEP: 9.8})
    runs = compare([base, fast, same])
    assert runs[1].time.value == pytest.approx(0.5, abs=0.02)
    assert runs[1].equal_steps.value == pytest.approx(0.5, abs=0.02)
    assert verdict(runs[1], runs[0]).startswith("fast is faster than sync: equal tokens take 0.5")
    assert "are not told apart in speed by these steps: 0.9" in verdict(runs[2], runs[0])
    assert verdict(runs[1], runs[0]).endswith("rewards are not told apart (difference 0.00 (0.00 to 0.00))")
    assert compare([base, fast]) == runs[:2]


def test_too_few_steps_say_nothing_and_none_is_an_error() -> None:
    few = compare([run("sync", 11), run("fast", 30, changed={STEP: 5.0})])
    assert few[0].num_steps == 8
    assert "not enough steps to tell (28 and 8 counted, of each 10 are needed)" in verdict(few[1], few[0])
    assert "0.50 (too few steps)" in as_text(table(few))
    with pytest.raises(DataError, match="short has 3 steps: at least 4 are needed"):
        compare([run("sync", 12), run("short", 3)])
    image = RunRecord("image")
    for number in range(1, 9):
        image.add(StepEnded(step=number, total=8, metrics={"reward/mean": 1.0}))
    with pytest.raises(DataError, match="timing_s/step"):
        compare([image, image])


@pytest.mark.parametrize("title", [title for title, _ in CHARTS.values()])
def test_a_title_fits_into_its_chart(title: str) -> None:
    """A longer one is cut at the right end, in page and report."""
    assert len(title) <= 58


def test_what_modes_of_verl_lose_is_a_lower_bound() -> None:
    """Modes of verl do not say how long they waited for the longest response."""
    ours = run("ours", 24, changed={"partial_rollout/slot_utilisation": 0.5})
    rows = {row[0].strip(): row[1:] for row in table(compare([run("sync", 24), ours]))}
    assert rows["lost in all"] == ["not known: at least 40.00", "70.00"]
    assert lost_rows(run("sync", 24).series)[-1][1] == "not known: at least 96.0"


def test_staleness_is_told_of_verls_modes_too_and_of_none_that_does_not_say_it():
    _, records = stored_jobs("jobs_8b_h200")
    named = {record.name: record for record in [*records, run("silent", 24)]}
    names = ("sync", "colocate_async", "partial_reuse_kv_prefetch_3", "silent")
    rows = {row[0]: row[1:] for row in table(compare([named[name] for name in names]))}
    assert rows["staleness, steps"] == ["0.0", "0.9", "1.9", ""]  # the README leaves out more of the first steps


def test_a_higher_reward_is_told() -> None:
    runs = compare([run("sync", 24), run("better", 24, changed={REWARD: 0.7})])
    assert verdict(runs[1], runs[0]).endswith("its reward is higher by 0.20 (0.20 to 0.20) than that of sync")


def test_stored_jobs_with_a_real_model_give_the_stored_ratios_for_equal_steps() -> None:
    stored, records = stored_jobs("smollm2_h200")
    found = {each.name: each.equal_steps for each in compare(records, skip=0)}
    expected = {row["mode"]: row["time_ratio"] for row in stored["summary"]}
    assert {mode: ratio.value for mode, ratio in found.items()} == pytest.approx(expected, abs=1e-4)
    assert all(within(found, expected))


@pytest.mark.parametrize("name", ["jobs_4b_h200", "jobs_8b_h200"])
def test_stored_jobs_of_all_modes_give_the_stored_ratios_for_equal_tokens(name: str) -> None:
    """The stored ratios of generation leave out prompt tokens, which these steps do not name."""
    stored, records = stored_jobs(name)
    for row in compare(records):
        if "generation" in stored:
            expected = stored["generation"][row.name][f"time_ratio_to_{BASE}"]
            assert row.generation.value == pytest.approx(expected, abs=0.02)
        else:
            rate = stored["summary"][row.name][f"token_rate_ratio_to_{BASE}"]
            assert row.time.value == pytest.approx(1 / rate, abs=0.01)


def test_a_chart_has_every_run_and_thins_out_a_long_one() -> None:
    long = Line("long <run>", "#000000", range(10_000), [float(n % 7) for n in range(10_000)], window=10)
    svg = line_chart("reward", [long, Line("short", "#ffffff", [1, 2], [-1.0, 2.0])])
    lines = re.findall(r'<polyline points="([^"]*)"', svg)
    assert [len(points.split()) for points in lines] == [MAX_POINTS, 2]
    assert "long &lt;run&gt;" in svg
    assert line_chart("nothing", [Line("none", "#000000", [], [])]) == ""
    assert bar_chart("seconds", {"a": {"x": 1.0}, "b": {"y": 3.0}}).count("<rect") == 2 * 2 + 2
    assert bar_chart("seconds", {}) == ""


def test_a_page_needs_no_network_and_shows_text_as_text() -> None:
    record = run("a", 12)
    record.add(Warned(text="<script>alert(1)</script>"))
    record.add(Fault(role="engine core", name="replica 1", text="killed", action="started again"))
    page = report_page([record])
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "engine core replica 1" in page
    assert not re.findall(r"//\w", page)
    both = report_page([record, run("b", 12, changed={STEP: 5.0})])
    assert "b is faster than a" in both
    assert both.count("<svg") == 4


def test_the_commands_write_pages_and_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        writer = EventWriter(folder / "events", "trainer")
        for step in run(folder.name, 14, wobble=1.0).steps.values():
            writer.write(step)
        writer.close()
    words = [str(folder) for folder in folders]
    assert compare_command.main([*words, "--report", str(tmp_path / "c.html")]) == 0
    assert "b and a are not told apart in speed" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "c.html").read_text()
    assert report_command.main(words[:1]) == 0
    assert (folders[0] / "report.html").exists()
    report_at_end(folders[1] / "events")
    assert (folders[1] / "report.html").exists()
    assert compare_command.main(words[:1]) == 2
    assert "give at least two runs" in capsys.readouterr().err
    assert report_command.main([str(tmp_path / "nowhere")]) == 2
    assert "neither events nor metrics" in capsys.readouterr().err


def test_what_to_try_next_is_told_of_each_run_that_has_something_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of verl's own modes; and never to make the comparison that is being made."""
    idle = {f"partial_rollout/{name}": value for name, value in (("slot_utilisation", 0.5), ("queue/pending", 0.0))}
    busy = {**idle, "partial_rollout/slot_utilisation": 0.9}
    runs = {"sync": run("sync", 14), "idle": run("idle", 14, changed=idle), "busy": run("busy", 14, changed=busy)}
    for name, record in runs.items():
        writer = EventWriter(tmp_path / name / "events", "trainer")
        for step in record.steps.values():
            writer.write(step)
        writer.close()
    assert compare_command.main([str(tmp_path / name) for name in runs]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next to try")]
    assert len(told) == 1
    assert told[0].startswith("next to try with idle: in steps 3 to 14 requests filled 50% of the slots")
    page = report_page(list(runs.values()))
    assert page.count("<th>next</th>") == 1
    assert "partial_rollout.compare A B" not in page
    assert "partial_rollout.compare A B" in report_page([runs["sync"]])


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report_at_end(tmp_path / "nowhere/events")
    assert "could not be written" in caplog.text
