from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import pytest

from partial_rollout.errors import DataError
from partial_rollout.run.data import dapo_math, gsm8k
from partial_rollout.run.data.source import load_rows

if TYPE_CHECKING:
    from pathlib import Path

QUESTION = {"question": "2 + 1,000?", "answer": "Add.\n#### 1,002"}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "gsm8k" / "main"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        pd.DataFrame([QUESTION] * 3).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return tmp_path / "gsm8k"


def test_gsm8k_rows_have_verls_columns(copy: Path, tmp_path: Path):
    gsm8k.main(["--out", str(tmp_path / "out"), "--source", str(copy)])
    row = pd.read_parquet(tmp_path / "out/train.parquet").iloc[2].to_dict()
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1002"}
    assert row["extra_info"]["index"] == 2
    assert row["prompt"][0]["content"].startswith("2 + 1,000? Let's think")
    assert "agent_name" not in row


def test_tool_rows_carry_the_agent_and_the_tools_arguments(copy: Path, tmp_path: Path):
    gsm8k.main(["--out", str(tmp_path / "out"), "--source", str(copy), "--tool"])
    row = pd.read_parquet(tmp_path / "out/test.parquet").iloc[0].to_dict()
    assert row["agent_name"] == "tool_agent"
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    kwargs = row["extra_info"]["tools_kwargs"]["calc_gsm8k_reward"]
    assert kwargs["create_kwargs"]["ground_truth"] == "1002"
    assert row["extra_info"]["need_tools_kwargs"]


def test_dapo_keeps_one_copy_of_each_problem(tmp_path: Path):
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "Solve."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "8f9e"},
    }
    other = {**row, "prompt": [{"role": "user", "content": "Prove."}]}
    source = tmp_path / "all.parquet"
    pd.DataFrame([row, row, other, row]).to_parquet(source)
    dapo_math.main(["--out", str(tmp_path), "--train", str(source), "--val", str(source)])
    frame = pd.read_parquet(tmp_path / "train.parquet")
    assert [messages[0]["content"] for messages in frame["prompt"]] == ["Solve.", "Prove."]
    assert [extra["index"] for extra in frame["extra_info"]] == [0, 1]


@pytest.mark.parametrize("missing", ["/nowhere/gsm8k", "./nowhere", "nowhere.parquet"])
def test_a_missing_path_is_named(missing: str):
    with pytest.raises(DataError, match="does not exist"):
        load_rows(missing, "train")


def test_other_mistakes_are_told(tmp_path: Path, copy: Path):
    with pytest.raises(DataError, match=r"must hold one file validation\*.*found: none"):
        load_rows(str(copy), "validation")
    text = tmp_path / "train.txt"
    text.touch()
    with pytest.raises(DataError, match="must be one of .parquet"):
        load_rows(str(text), "train")
    with pytest.raises(DataError, match="no '#### <number>'"):
        gsm8k.final_answer("forty-two")
    with pytest.raises(DataError, match="no column 'question'; its columns are: text"):
        gsm8k.convert(0, {"text": ""}, split="train", tool=False)
    with pytest.raises(SystemExit, match="error: /nowhere does not exist"):
        dapo_math.main(["--out", str(tmp_path), "--train", "/nowhere"])


def test_without_a_network_the_way_out_is_told():
    with pytest.raises(DataError, match="give the directory with --source"):
        load_rows("nobody/no-such-data-set", "train")
