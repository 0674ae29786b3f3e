"""Which cause a GPU second is given to, and that no second is lost or counted twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from partial_rollout.advise.result import read_result
from partial_rollout.observability.comparison import lost_seconds
from partial_rollout.observability.events import StepEnded
from partial_rollout.observability.gpu_seconds import gpu_seconds, lost, num_gpus, step_causes
from partial_rollout.observability.record import RunRecord
from partial_rollout.observability.report import lost_rows, report_page

STORED = Path(__file__).resolve().parents[3] / "benchmarks/results/gpu/smollm2_h200.json"
STEP = {
    "timing_s/step": 20.0,
    "timing_s/gen": 12.0,
    "timing_s/drain": 2.0,
    "timing_s/old_log_prob": 2.0,
    "actor/entropy": 0.5,
    "timing_s/update_actor": 3.0,
    "timing_s/save_checkpoint": 0.5,
    "timing_s/update_weights": 0.75,
    "timing_s/resume": 0.25,
    "perf/total_num_tokens": 1000.0,
    "perf/throughput": 12.5,
    "partial_rollout/slot_utilisation": 0.75,
    "partial_rollout/reprefilled_tokens": 500.0,
}
CAUSES = {
    "generating": 6.5,
    "re-prefill": 1.0,
    "waiting for the longest": 2.5,
    "drain": 2.0,
    "training": 5.0,
    "checkpoint": 0.5,
    "updates": 1.0,
    "idle": 1.5,
}


def test_each_second_of_a_step_has_one_cause() -> None:
    assert step_causes(STEP) == pytest.approx(CAUSES)
    assert list(step_causes(STEP)) == list(CAUSES)
    assert sum(step_causes(STEP).values()) == pytest.approx(20.0)


def test_gpus_of_engines_alone_have_causes_of_their_own() -> None:
    """One of the four generates: drain, saving and updates stop all; while it generates the others train or wait."""
    separate = step_causes(STEP | {"partial_rollout/rollout_gpus": 1.0, "timing_s/gen": 10.0})
    assert sum(separate.values()) == pytest.approx(20.0)
    engine_s = 20.0 - 2.0 - 0.5 - 1.0
    assert separate == pytest.approx(
        {
            "generating": (0.75 * engine_s - 1.0) / 4,
            "re-prefill": 1.0 / 4,
            "waiting for the longest": 0.25 * engine_s / 4,
            "waiting for a batch": 10.0 * 3 / 4,
            "drain": 2.0,
            "training": 5.0 * 3 / 4,
            "checkpoint": 0.5,
            "updates": 1.0,
            "idle": 1.5 * 3 / 4,
        }
    )


def test_gpus_are_counted_from_verls_throughput_and_all_of_them_wait() -> None:
    assert num_gpus(STEP) == 4
    assert gpu_seconds([STEP, STEP]) == pytest.approx({cause: 8 * seconds for cause, seconds in CAUSES.items()})
    assert lost(gpu_seconds([STEP])) == pytest.approx(4 * (1.0 + 2.5 + 2.0 + 0.5 + 1.0 + 1.5))
    assert lost_seconds([STEP])["drain"] == pytest.approx(4 * 2.0 * 10)


def test_verls_own_modes_do_not_say_who_waited_and_the_estimate_never_exceeds_what_was_generated() -> None:
    verl = {name: value for name, value in STEP.items() if not name.startswith("partial_rollout")}
    assert step_causes(verl | {"timing_s/drain": 0.0})["generating, waiting included"] == 12.0
    much = step_causes(STEP | {"partial_rollout/reprefilled_tokens": 1e9})
    assert "generating" not in much
    assert much["re-prefill"] == pytest.approx(7.5)
    assert step_causes({}) == {}


def test_tokens_that_are_computed_again_cost_a_third_of_an_update_where_no_log_probs_are_computed() -> None:
    step = STEP | {"timing_s/old_log_prob": 0.01, "timing_s/update_actor": 6.0}
    assert step_causes(step)["re-prefill"] == pytest.approx(500 * 0.01 / 1000)
    del step["actor/entropy"]
    assert step_causes(step)["re-prefill"] == pytest.approx(500 * 6.0 / 3 / 1000)


def test_stored_jobs_account_for_every_second_and_the_report_shows_them() -> None:
    job = next(each for each in read_result(STORED)["jobs"] if "sync" not in each["mode"])
    record = RunRecord(job["mode"])
    for number, metrics in enumerate(job["steps"], 1):
        record.add(StepEnded(step=number, total=0, metrics=metrics))
    causes = gpu_seconds(record.series)
    assert sum(causes.values()) == pytest.approx(sum(num_gpus(step) * step["timing_s/step"] for step in record.series))
    rows = lost_rows(record.series)
    assert rows[-1][:2] == ("lost in all", f"{lost(causes):,.1f}")
    page = report_page([record])
    assert all(f"<td>{cell}</td>" in page for row in rows for cell in row)
