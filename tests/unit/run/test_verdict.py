"""The quickstart's end: some steps without the flag, both runs side by side, and the page as the last line."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from partial_rollout.run.quickstart.verdict import (
    FIRST_START_S,
    FLAG,
    STEPS,
    num_baseline_steps,
    without_the_flag,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

JOB = """
import json, os, sys
from pathlib import Path
words = dict(word.split("=", 1) for word in sys.argv[1:])
flag = "+async_training.partial_rollout" in words
metrics = Path(os.environ["VERL_FILE_LOGGER_PATH"])
metrics.parent.mkdir(parents=True, exist_ok=True)
with metrics.with_name("started").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
step = {"timing_s/gen": 2.0 if flag else 6.0, "perf/total_num_tokens": 1000, "critic/score/mean": 0.5}
step |= {"partial_rollout/slot_utilisation": 0.5} if flag else {}
steps = range(1, int(words["trainer.total_training_steps"]) + 1)
rows = [{"step": n, "data": step | {"timing_s/step": step["timing_s/gen"] + n % 4}} for n in steps]
metrics.write_text("".join(json.dumps(row) + "\\n" for row in rows))
sys.exit(int(words.get("code", "0")))
"""
STAGES = """
import os
from pathlib import Path
from partial_rollout.observability.events import EventWriter, StageBegan
writer = EventWriter(Path(os.environ["VERL_FILE_LOGGER_PATH"]).parent / "events", "driver")
writer.write(StageBegan(number=1, total=5, name="configuration"))
writer.write(StageBegan(number=2, total=5, name="Ray"))
"""


def run(folder: Path, *words: str, most: int = 20, job: str = JOB) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", job, FLAG, *words]
    line = [sys.executable, "-m", "partial_rollout.run.quickstart.verdict", str(folder), "--baseline-steps", str(most)]
    variables = os.environ | {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
    return subprocess.run(
        [*line, "--", *command], env=variables, capture_output=True, text=True, timeout=60, check=False
    )


def starts(folder: Path) -> int:
    return len((folder / "started").read_text().splitlines())


def test_equal_steps_stand_side_by_side_and_the_page_is_the_last_line(tmp_path: Path) -> None:
    done = run(tmp_path, f"{STEPS}=60")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == str(tmp_path / "report.html")
    assert lines[-2].startswith("with it is faster than without the flag: equal tokens take 0.4")
    assert "the first 20 steps with and without the flag, same seed; 2 of each are not counted:" in lines
    assert next(line for line in lines if line.startswith("steps counted")).split() == ["steps", "counted", "18", "18"]
    page = (tmp_path / "report.html").read_text()
    assert "with it is faster than without the flag" in page
    assert (starts(tmp_path), starts(tmp_path / "baseline")) == (1, 1)
    again = run(tmp_path, f"{STEPS}=60")  # goes on: the baseline is there
    assert (starts(tmp_path), starts(tmp_path / "baseline")) == (2, 1)
    assert again.stdout.splitlines()[-1] == lines[-1]


def test_a_baseline_that_was_interrupted_is_run_again(tmp_path: Path) -> None:
    """Nothing could ever be said of the two steps that it had."""
    baseline = tmp_path / "baseline"
    baseline.mkdir()
    (baseline / "metrics.jsonl").write_text('{"step": 1, "data": {}}\n')
    (baseline / "checkpoints").mkdir()
    done = run(tmp_path, f"{STEPS}=60")
    assert done.returncode == 0, done.stderr
    assert "did not reach its end: it is removed, and starts again" in done.stdout
    assert starts(baseline) == 1
    assert not (baseline / "checkpoints").exists()
    assert "with it is faster than without the flag" in done.stdout


@pytest.mark.parametrize(
    ("total", "baseline", "told"), [(8, 4, "not enough steps to tell (2 and 2 counted"), (2, 0, "not enough")]
)
def test_too_few_steps_say_so(tmp_path: Path, total: int, baseline: int, told: str) -> None:
    done = run(tmp_path, f"{STEPS}={total}")
    assert done.returncode == 0, done.stderr
    assert told in done.stdout.splitlines()[-2]
    assert (tmp_path / "baseline").exists() == bool(baseline)
    assert f"now {baseline} steps of the same job without the flag" in done.stdout or not baseline


def test_a_run_that_fails_has_no_baseline_and_its_code_is_the_commands(tmp_path: Path) -> None:
    done = run(tmp_path, f"{STEPS}=60", "code=3")
    assert done.returncode == 3
    assert not (tmp_path / "baseline").exists()


def test_the_baseline_is_the_same_command_in_a_folder_of_its_own(tmp_path: Path) -> None:
    words = without_the_flag(["python", FLAG, "data.seed=7", f"{STEPS}=60"], tmp_path / "it's", 20)
    assert words[:3] == ["python", "data.seed=7", f"{STEPS}=60"]
    assert words[-1] == f"{STEPS}=20"
    assert f"partial_rollout.events='{tmp_path}/it\\'s/events'" in words
    assert not any(word.startswith("trainer.rollout_data_dir") for word in words)
    dumping = without_the_flag(["trainer.rollout_data_dir=/mine", f"{STEPS}=60"], tmp_path, 20)
    assert f"trainer.rollout_data_dir='{tmp_path}/rollouts'" in dumping
    assert num_baseline_steps(words, 20) == 6
    assert num_baseline_steps([f"{STEPS}=5000"], 20) == 20
    assert num_baseline_steps([], 20) == 20


def test_a_first_start_says_what_stages_took_elsewhere_and_the_second_run_what_they_took_here(tmp_path: Path) -> None:
    done = run(tmp_path, f"{STEPS}=12", job=STAGES + JOB)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("[")]
    first, second = (FIRST_START_S[name] for name in ("configuration", "Ray"))
    usual = [f"usually {least:.0f} to {most:.0f})" for least, most in (first, first, second, second)]
    assert [line.rpartition(" (")[2] for line in said[:4]] == usual
    assert said[4] == "[1/5] configuration ... (usually 0)"
