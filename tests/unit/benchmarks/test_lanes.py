"""Benchmark jobs side by side: cores are never shared, and one failure costs no other result."""

from __future__ import annotations

import os
import subprocess
import threading
from functools import partial

import pytest

from benchmarks.lanes import CORES_EACH, Lane, make_lanes, run_all


def test_lanes_share_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {9, 4, 5, 7, 6})
    assert [lane.cores for lane in make_lanes(2)] == [(4, 5), (6, 7)]
    assert make_lanes(1) == [Lane()]


@pytest.mark.parametrize("number", [0, -1, 3])
def test_more_lanes_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(2 * CORES_EACH + 1)))
    with pytest.raises(SystemExit, match="--at-once"):
        make_lanes(number)


def test_a_pinned_command_sees_its_cores_only() -> None:
    core = min(os.sched_getaffinity(0))
    command = Lane((core,)).pinned(["python3", "-c", "import os; print(*os.sched_getaffinity(0))"])
    assert subprocess.check_output(command, text=True).split() == [str(core)]
    assert Lane().pinned(["true"]) == ["true"]


def test_jobs_at_the_same_time_have_lanes_of_their_own() -> None:
    lanes = [Lane((0,)), Lane((1,))]
    both = threading.Barrier(2, timeout=20)

    for _ in range(2):
        seen: list[Lane] = []

        def job(lane: Lane, seen: list[Lane] = seen) -> None:
            both.wait()
            seen.append(lane)

        run_all([job, job], lanes)
        assert sorted(seen, key=lambda lane: lane.cores) == lanes


def test_a_failed_job_is_told_after_all_others_have_ended() -> None:
    ended: list[int] = []

    def job(number: int, _lane: Lane) -> None:
        if number == 1:
            raise subprocess.CalledProcessError(3, "the second job")
        ended.append(number)

    with pytest.raises(SystemExit, match="the second job"):
        run_all([partial(job, number) for number in range(4)], [Lane()])
    assert sorted(ended) == [0, 2, 3]


def test_a_lane_of_gpus_shows_its_jobs_no_others():
    assert Lane(gpus=(2, 3)).environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert Lane().environment == {}


def test_an_error_ends_the_jobs_beside_it_and_those_that_wait() -> None:
    seen: list[str] = []
    both = threading.Barrier(2, timeout=20)

    def waits(lane: Lane) -> None:
        """The third one too, which may take the broken one's lane before anybody knows of the error."""
        seen.append("ended" if lane.ended.wait(20) else "forgotten")

    def long(lane: Lane) -> None:
        both.wait()
        waits(lane)

    def broken(_lane: Lane) -> None:
        both.wait()
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        run_all([long, broken, waits, lambda _lane: seen.append("started")], [Lane((0,)), Lane((1,))])
    assert set(seen) == {"ended"}
