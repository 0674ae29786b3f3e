"""Cases of algorithms and models: what counts as run, and what is told of one that does not run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from partial_rollout.doctor import diagnose
from tests.e2e import conftest, matrix
from tests.e2e.cases import CASES, Case
from tests.e2e.conftest import FLAG, Job
from tests.e2e.matrix import run_case, table

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

COUNTS = ("pending", "ongoing", "deferred", "done", "num_dropped")


def step(number: int, *, interrupted: int = 1, admitted: int = 8) -> dict[str, Any]:
    named = dict.fromkeys((f"queue/{name}" for name in COUNTS), 0) | {"queue/admitted": admitted, "queue/taken": 8}
    named |= {"interrupted": interrupted, "resumed_trajectories": interrupted}
    return {"training/global_step": number} | {f"partial_rollout/{name}": value for name, value in named.items()}


def job(*steps: dict[str, Any], code: int = 0, output: str = "") -> Job:
    return Job(code, output, list(steps), [], [])


WHOLE = job(step(1), step(2), step(3))
AGAIN = job(step(4), step(5), step(6))
FAILED = job(code=1, output="noise\nImportError: no torchvision\nerror: training failed: ImportError: no torchvision\n")


@pytest.mark.parametrize(
    ("jobs", "row"),
    [
        ([WHOLE, AGAIN], {"runs": True, "steps": 6, "interrupted": 6, "resumed": 6, "restarts": 1, "error": ""}),
        ([WHOLE, FAILED, WHOLE], {"runs": False, "restarts": 1, "verl": "runs without the flag"}),
        (
            [FAILED, FAILED],
            {"runs": False, "restarts": 0, "error": "error: training failed: ImportError: no torchvision"}
            | {"verl": "error: training failed: ImportError: no torchvision"},
        ),
        ([job(step(1), step(2)), WHOLE], {"runs": False, "error": "other steps than 1 to 3"}),
        ([job(step(1), step(2), step(3, admitted=9)), WHOLE], {"runs": False, "error": "a prompt was lost"}),
        (
            [job(*(step(n, interrupted=0) for n in (1, 2, 3))), WHOLE],
            {"runs": False, "error": "nothing was interrupted and resumed"},
        ),
    ],
)
def test_a_case_runs_if_all_its_jobs_do_with_interruptions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, jobs: list[Job], row: dict[str, Any]
):
    left, given = list(jobs), []

    def run_job(_task: Path, _folder: Path, *overrides: str) -> Job:
        given.append(overrides)
        return left.pop(0)

    monkeypatch.setattr(conftest, "run_job", run_job)
    monkeypatch.setattr(conftest, "with_lengths", lambda *_: [])
    case = Case("it", lambda _: [["a.b=1", "partial_rollout.c=2"]] * 2)
    found = run_case(case, tmp_path, tmp_path / "case")
    assert {name: found[name] for name in row} == row
    assert left == []
    assert all(FLAG in words for words in given[: found["restarts"] + 1])
    if not found["runs"]:
        assert FLAG not in given[-1]
        assert "partial_rollout.c=2" not in given[-1]
        assert "a.b=1" in given[-1]
    assert "| it |" in table([found])


@pytest.mark.parametrize("name", CASES)
def test_a_case_s_command_line_is_accepted(name: str, tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "rows.parquet").touch()
    shared = [f"data.{part}_files={tmp_path / 'rows.parquet'}" for part in ("train", "val")]
    shared += [f"actor_rollout_ref.model.path={tmp_path / 'model'}", "data.train_batch_size=8"]
    shared += ["actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    for overrides in {tuple(words) for words in CASES[name].jobs(str(tmp_path / "model"))}:
        report = diagnose(["--config-name", "quickstart_cpu", *shared, *overrides, FLAG])
        assert report.blocked == []


def test_cases_are_stored_one_by_one_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    row = dict.fromkeys(matrix.SHOWN, "x")
    monkeypatch.setattr(matrix, "run_case", lambda case, *_: row | {"case": case.what})
    monkeypatch.setattr(matrix, "_task", lambda *_: tmp_path)
    for name in ("lora", "gae"):
        matrix.main(["--cases", name, "--json", str(tmp_path / "matrix.json"), "--work", str(tmp_path)])
    assert list(matrix.read_result(tmp_path / "matrix.json")["rows"]) == ["gae", "lora"]
