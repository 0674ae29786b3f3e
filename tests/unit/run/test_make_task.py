from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import enable_progress_bar

from partial_rollout.errors import DataError
from partial_rollout.run.quickstart.make_task import (
    MAX_RESPONSE_TOKENS,
    TaskParameters,
    main,
    make_task,
    ship,
    shipped_weights,
)
from partial_rollout.run.quickstart.measure import Sample, sample, summarize
from partial_rollout.run.quickstart.problem import Habits, Problem, draw_problem
from partial_rollout.run.quickstart.reward import DATA_SOURCE, compute_score
from partial_rollout.run.task_files import TaskFiles

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

SMALL = TaskParameters(num_train=20, num_val=4, warm_start_steps=2)
GSM8K_COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    files = TaskFiles(tmp_path_factory.mktemp("task"))
    assert make_task(files.root, SMALL)
    return files


def test_rows_have_the_columns_of_gsm8k(made: TaskFiles):
    train, val = pd.read_parquet(made.train), pd.read_parquet(made.val)
    assert list(train.columns) == GSM8K_COLUMNS
    assert (len(train), len(val)) == (20, 4)
    row = train.iloc[7].to_dict()
    assert row["data_source"] == DATA_SOURCE
    assert row["extra_info"]["index"] == 7
    assert [message["role"] for message in row["prompt"]] == ["user"]
    assert compute_score(DATA_SOURCE, "#" + row["reward_model"]["ground_truth"], Problem(
        row["extra_info"]["question"][0], row["extra_info"]["num_places"]).answer) == 1.0  # fmt: skip


def test_the_checkpoint_loads_and_samples(made: TaskFiles):
    model = AutoModelForCausalLM.from_pretrained(made.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    rng = random.Random(0)
    samples = sample(model, tokenizer, [draw_problem(rng) for _ in range(3)], max_new_tokens=4)
    assert all(1 <= item.num_tokens <= 4 for item in samples)


def test_the_shipped_checkpoint_is_that_of_the_default_task_and_knows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """If this fails after a change of the task: python -m partial_rollout.run.quickstart.make_task --ship."""
    assert shipped_weights(TaskParameters()) is not None
    files = TaskFiles(tmp_path)
    enable_progress_bar()  # as it is in a new process
    assert make_task(files.root, TaskParameters(num_train=4, num_val=2))
    assert "Writing model shards" not in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(files.model, dtype=torch.float32).eval()
    rng = random.Random(0)
    problems = [draw_problem(rng) for _ in range(128)]
    torch.manual_seed(0)
    samples = sample(model, AutoTokenizer.from_pretrained(files.model), problems, max_new_tokens=MAX_RESPONSE_TOKENS)
    assert 0.2 < summarize(samples, max_new_tokens=MAX_RESPONSE_TOKENS).reward < 0.6  # 0.34 when it was shipped


def test_a_shipped_checkpoint_that_was_changed_or_is_of_other_parameters_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "w.safetensors"
    assert shipped_weights(SMALL, path) is None
    ship(SMALL, path)
    assert shipped_weights(replace(SMALL, num_train=9), path) == path.read_bytes()
    for other in (replace(SMALL, seed=1), replace(SMALL, warm_start_steps=3), replace(SMALL, habits=Habits(redo=0.2))):
        assert shipped_weights(other, path) is None
    assert caplog.text == ""
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert shipped_weights(SMALL, path) is None
    assert "is not the file that was shipped" in caplog.text


def test_a_second_start_reuses_what_is_there(made: TaskFiles):
    before = {path: path.stat().st_mtime_ns for path in made.root.rglob("*")}
    assert not make_task(made.root, SMALL)
    assert {path: path.stat().st_mtime_ns for path in made.root.rglob("*")} == before


def test_other_parameters_or_a_missing_part_are_made_anew(tmp_path: Path):
    files = TaskFiles(tmp_path / "task")
    assert make_task(files.root, SMALL)
    assert make_task(files.root, replace(SMALL, num_val=3))
    assert len(pd.read_parquet(files.val)) == 3
    files.train.unlink()
    assert make_task(files.root, replace(SMALL, num_val=3))
    files.manifest.write_text("{")
    assert make_task(files.root, replace(SMALL, num_val=3))
    assert json.loads(files.manifest.read_text())["num_val"] == 3


def test_the_same_seed_makes_the_same_rows(made: TaskFiles, tmp_path: Path):
    make_task(tmp_path, SMALL)
    assert TaskFiles(tmp_path).train.read_bytes() == made.train.read_bytes()


def test_bad_input_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(DataError, match="--num-train must be at least 1, not 0"):
        TaskParameters(num_train=0)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="cannot write the task"):
        main(["--out", str(tmp_path / "file")])


def test_summary_counts_tail_and_truncation():
    problem = Problem("a", 3)
    samples = [Sample(problem, "#d", 10)] * 30 + [Sample(problem, "", 100)] * 10
    summary = summarize(samples, max_new_tokens=100)
    assert (summary.median, summary.longest, summary.truncated, summary.reward) == (10, 100, 10, 0.75)
    assert summary.tail_ratio == 10
