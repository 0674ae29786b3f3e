from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from partial_rollout.run.quickstart.tokenizer import CHARACTERS, build_tokenizer
from partial_rollout.run.quickstart.warm_start import build_model, encode_prompt

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Saved, and loaded as verl does: by AutoTokenizer beside a Qwen3 config."""
    folder: Path = tmp_path_factory.mktemp("model")
    built = build_tokenizer(2048)
    built.save_pretrained(folder)
    build_model(built).config.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@given(text=st.text(alphabet=CHARACTERS).filter(lambda text: "<|" not in text))
def test_text_survives_one_token_per_character(tokenizer: PreTrainedTokenizerBase, text: str):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_other_characters_become_unknown(tokenizer: PreTrainedTokenizerBase):
    assert tokenizer.encode("é", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_end_and_padding_differ(tokenizer: PreTrainedTokenizerBase):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_the_model_has_exactly_the_tokenizers_embeddings(tokenizer: PreTrainedTokenizerBase):
    model = build_model(tokenizer)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer) == model.config.vocab_size
    assert model.get_output_embeddings().out_features == len(tokenizer)
    assert model.config.max_position_embeddings >= 1024


def test_verls_builder_renders_what_the_warm_start_saw(tokenizer: PreTrainedTokenizerBase):
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen3")
    assert builder.build_initial_tokens([{"role": "user", "content": "x+03"}]) == encode_prompt(tokenizer, "x+03")
    assert len(encode_prompt(tokenizer, "x+03")) == 23


def test_verls_builder_appends_turns(tokenizer: PreTrainedTokenizerBase):
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen3")
    before = [{"role": "user", "content": "x+03"}]
    ids = [*builder.build_initial_tokens(before), *tokenizer.encode("#a", add_special_tokens=False)]
    said = [*before, {"role": "assistant", "content": "#a"}]
    after = [*said, {"role": "user", "content": "b+01"}]
    merged = builder.merge_context_tokens(said, after, [*ids, tokenizer.eos_token_id]).token_ids
    assert tokenizer.decode(merged) == tokenizer.apply_chat_template(after, add_generation_prompt=True, tokenize=False)
