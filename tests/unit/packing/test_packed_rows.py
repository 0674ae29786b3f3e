"""The packer: what goes in comes out, and packed rows compute what padded ones do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from partial_rollout.errors import ConfigError, PackingError
from partial_rollout.packing import attention as varlen_attention
from partial_rollout.packing.attention import PackedRow, Sample, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCABULARY = 50
LENGTHS = [(5, 3), (9, 9), (1, 1), (14, 2)]
"""Tokens, and how many of them are the response."""


def sample(length: int, num_response: int, start: int = 1) -> Sample:
    tokens = torch.arange(start, start + length) % (VOCABULARY - 1) + 1
    mask = torch.ones(num_response, dtype=torch.int64)
    return Sample(tokens, {"response_mask": mask, "old_log_probs": -torch.rand(num_response)})


def samples(lengths: Sequence[tuple[int, int]] = LENGTHS) -> list[Sample]:
    return [sample(length, response, start=7 * number) for number, (length, response) in enumerate(lengths)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=8))
def test_unpack_undoes_pack(lengths: list[tuple[int, int]]):
    given_samples = samples(lengths)
    row = pack(given_samples)
    for before, tokens in zip(given_samples, unpack(row, row.input_ids), strict=True):
        assert torch.equal(before.tokens, tokens)
    for name in ("response_mask", "old_log_probs"):
        for before, value in zip(given_samples, unpack(row, row.fields[name]), strict=True):
            num_prompt = len(before.tokens) - len(before.response[name])
            assert torch.equal(before.response[name], value[num_prompt:])
            assert not value[:num_prompt].any()


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_a_packed_row_is_what_variable_length_attention_takes(lengths: list[int]):
    row = pack(samples([(length, 1) for length in lengths]))
    assert row.cu_seqlens.dtype == torch.int32
    assert row.cu_seqlens.tolist() == [sum(lengths[:end]) for end in range(len(lengths) + 1)]
    assert row.position_ids[0].tolist() == [position for length in lengths for position in range(length)]
    assert varlen_attention.sequence_lengths(row.position_ids) == lengths


@pytest.mark.parametrize(
    "broken",
    [
        [],
        [Sample(torch.tensor([], dtype=torch.int64), {})],
        [Sample(torch.tensor([1, 2]), {"response_mask": torch.ones(3)})],
        [Sample(torch.tensor([1, 2]), {"a": torch.ones(1), "b": torch.ones(2)})],
        [Sample(torch.tensor([1, 2]), {"a": torch.ones(1)}), Sample(torch.tensor([1]), {"b": torch.ones(1)})],
    ],
)
def test_what_cannot_be_packed_is_told(broken: list[Sample]):
    with pytest.raises(PackingError, match="packing: "):
        pack(broken)


# ---- packed against padded forward and backward of a real architecture ----


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        )
    )  # fmt: skip


def next_token_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs of tokens[1:], by the logits before them."""
    return logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


def one_by_one(model: Qwen3ForCausalLM, given_samples: Sequence[Sample]) -> list[torch.Tensor]:
    model.set_attn_implementation("eager")
    return [next_token_log_probs(model(s.tokens[None]).logits[0], s.tokens) for s in given_samples]


def padded(model: Qwen3ForCausalLM, given_samples: Sequence[Sample]) -> list[torch.Tensor]:
    model.set_attn_implementation("sdpa")
    tokens = torch.nn.utils.rnn.pad_sequence([s.tokens for s in given_samples], batch_first=True)
    logits = model(tokens, attention_mask=(tokens != 0).long()).logits
    return [next_token_log_probs(logits[i], s.tokens) if len(s.tokens) > 1 else logits[i, :0, 0]
            for i, s in enumerate(given_samples)]  # fmt: skip


def packed(model: Qwen3ForCausalLM, row: PackedRow, attention: str) -> list[torch.Tensor]:
    model.set_attn_implementation(attention)
    logits = model(row.input_ids, position_ids=row.position_ids, attention_mask=None, use_cache=False).logits
    parts = zip(unpack(row, logits), unpack(row, row.input_ids), strict=True)
    return [next_token_log_probs(part, tokens) for part, tokens in parts]


def gradients(model: Qwen3ForCausalLM, log_probs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Gradients of a sum that weighs every token differently."""
    model.zero_grad()
    values = torch.cat(list(log_probs))
    (values * torch.linspace(0.5, 2.0, len(values))).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("attention", ["eager", "sdpa", varlen_attention.NAME])
def test_packed_equals_padded(model: Qwen3ForCausalLM, attention: str):
    row = pack(samples())
    wanted, found = padded(model, samples()), packed(model, row, attention)
    torch.testing.assert_close(torch.cat(found), torch.cat(wanted), rtol=1e-5, atol=1e-5)
    wanted_gradients = gradients(model, padded(model, samples()))
    found_gradients = gradients(model, packed(model, row, attention))
    torch.testing.assert_close(found_gradients, wanted_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa", varlen_attention.NAME])
def test_no_sequence_of_a_row_sees_another(model: Qwen3ForCausalLM, attention: str):
    """Other neighbours, same log-probs, bit for bit apart from rounding: a plain causal mask would not give that."""
    alone = torch.cat(one_by_one(model, samples()[1:2]))
    for before in ((5, 3), (5, 3)):
        neighbours = [sample(*before, start=int(torch.randint(40, ())))]
        found = packed(model, pack([*neighbours, *samples()[1:2]]), attention)[1]
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


def test_one_by_one_attention_takes_packed_rows_only(model: Qwen3ForCausalLM):
    model.set_attn_implementation(varlen_attention.NAME)
    with pytest.raises(ConfigError, match="takes one packed row"):
        model(torch.ones(2, 4, dtype=torch.int64))
