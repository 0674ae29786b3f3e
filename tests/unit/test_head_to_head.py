"""What the comparison with verl's modes reads of a job, on files made by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.head_to_head import FAULTS, MODES, TELLS, Watched, options_of

if TYPE_CHECKING:
    from pathlib import Path


class Job:
    """Stands for a process."""

    code: int | None = None

    def poll(self) -> int | None:
        return self.code


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    job: Any = Job()
    (tmp_path / "log").touch()
    return Watched(job, tmp_path / "log", tmp_path / "metrics", "mark")


def end_step(watched: Watched, step: int) -> None:
    with watched.metrics.open("a") as file:
        file.write(json.dumps({"step": step, "data": {"training/global_step": step}}) + "\n")


def test_a_wait_ends_with_the_step_that_it_waits_for(watched: Watched) -> None:
    end_step(watched, 1)
    end_step(watched, 2)
    assert watched.wait(60.0, 2)
    assert list(watched.steps) == [1, 2]


def test_a_wait_ends_with_the_job_and_with_its_bound(watched: Watched) -> None:
    assert watched.wait(0.0, 2)
    job: Any = watched.job
    job.code = 1
    assert not watched.wait(60.0, 2)


def test_the_lines_that_tell_of_a_fault_are_read_once(watched: Watched) -> None:
    watched.log.write_text("step:1 reward:0.5\nActorDiedError: The actor died unexpectedly\n")
    assert watched.goes_on()
    assert watched.goes_on()
    assert [line for _, line in watched.told] == ["ActorDiedError: The actor died unexpectedly"]


@pytest.mark.parametrize("line", ["engine 0 was killed", "EngineDeadError", "trainer waits for a batch since 9 s"])
def test_what_tells(line: str) -> None:
    assert TELLS.search(line)
    assert not TELLS.search("step:3 - critic/score/mean:0.2")


@pytest.mark.parametrize("fault", FAULTS)
def test_only_our_mode_is_given_settings_of_ours(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.e2e.conftest.with_lengths", lambda *_: ["rows"])
    ours, *verls = (options_of(fault, mode, tmp_path, tmp_path) for mode in MODES)
    assert any("partial_rollout" in option for option in ours)
    assert not any("partial_rollout" in option for options in verls for option in options)
