"""Every mode has the same work: prompts of one length, recorded response lengths."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from transformers import AutoConfig, AutoTokenizer

from partial_rollout.advise import shapes
from partial_rollout.advise.shapes import SHAPES, write_model, write_prompts
from partial_rollout.advise.workload import PRIMER_TOKENS, workload

BATCH = workload("tiny", "long_tail").batch


@pytest.fixture
def tokenizer(tmp_path):
    return write_model(tmp_path / "model", SHAPES["tiny"], 128)


def rendered(tokenizer, row) -> list[int]:
    return tokenizer.apply_chat_template(list(row), add_generation_prompt=True, tokenize=True, return_dict=False)


def test_prompts_are_different_and_of_one_length(tokenizer, tmp_path):
    write_prompts(tmp_path / "a.parquet", workload("tiny", "long_tail"), tokenizer, 40, 9)
    prompts = pd.read_parquet(tmp_path / "a.parquet")["prompt"]
    tokens = [rendered(tokenizer, row) for row in prompts]
    assert {len(each) for each in tokens} == {40}
    assert len({tuple(each) for each in tokens}) == len(prompts) == 9 + BATCH


def test_lengths_are_recorded_and_the_same_for_the_same_seed(tokenizer, tmp_path):
    for name in ("a", "b"):
        write_prompts(tmp_path / name, workload("tiny", "long_tail"), tokenizer, 40, 50)
    first, second = (
        pd.read_parquet(tmp_path / name)["extra_info"].map(lambda x: list(x["lengths"])) for name in ("a", "b")
    )
    assert first.tolist() == second.tolist()
    assert max(map(max, first)) == workload("tiny", "long_tail").limit


def test_the_first_batch_is_a_primer(tokenizer, tmp_path):
    write_prompts(tmp_path / "a", workload("tiny", "long_tail"), tokenizer, 40, 5)
    lengths = [max(each["lengths"]) for each in pd.read_parquet(tmp_path / "a")["extra_info"]]
    assert (max(lengths[:BATCH]), len(lengths)) == (PRIMER_TOKENS, BATCH + 5)
    assert max(lengths[BATCH:]) > PRIMER_TOKENS


def test_uniform_lengths_are_equal_and_the_heavy_tail_is_longer(tokenizer, tmp_path):
    write_prompts(tmp_path / "u", workload("8b", "uniform"), tokenizer, 40, 20)
    info = pd.read_parquet(tmp_path / "u")["extra_info"]
    assert {length for each in info.iloc[32:] for length in each["lengths"]} == {1024}
    assert (workload("8b", "heavy_tail").limit, workload("8b", "long_tail").limit) == (32_768, 4096)


def test_a_prompt_shorter_than_the_template_is_refused(tokenizer, tmp_path):
    with pytest.raises(SystemExit, match="--prompt-tokens=10 must be above"):
        write_prompts(tmp_path / "a", workload("tiny", "uniform"), tokenizer, 10, 1)


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_model_folder_can_be_read_back(name, tmp_path):
    write_model(tmp_path, SHAPES[name], 4352)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.hidden_size, config.max_position_embeddings) == (SHAPES[name].hidden, 4352)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) <= config.vocab_size


def test_inputs_are_written_once_and_not_taken_for_another_workload(tmp_path, monkeypatch):
    written: list[str] = []
    monkeypatch.setattr(shapes, "write_weights", lambda *_: written.append("weights"))
    load = workload("tiny", "long_tail")
    for _ in range(2):
        shapes.write_inputs(tmp_path, "tiny", load, 64)
    assert written == ["weights"]
    with pytest.raises(SystemExit, match="another shape or workload"):
        shapes.write_inputs(tmp_path, "tiny", replace(load, seed=1), 64)
