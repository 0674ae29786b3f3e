"""Attention of packed rows without flash-attention: what it computes, and what it refuses."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from partial_rollout.errors import ConfigError
from partial_rollout.packing import attention as varlen_attention

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTHS = (3, 5)
NUM_TOKENS = sum(LENGTHS)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
SIZES: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip


def heads(seed: int) -> torch.Tensor:
    """(1, heads, T, head_dim)."""
    return torch.randn(1, 2, NUM_TOKENS, 4, generator=torch.Generator().manual_seed(seed))


def attend(**options: Any) -> torch.Tensor:
    options = {"position_ids": POSITIONS} | options
    output, _ = varlen_attention.attend(torch.nn.Module(), heads(0), heads(1), heads(2), None, **options)
    return output


@pytest.mark.parametrize("scaling", [None, 0.5, 0.1])
def test_the_scale_is_the_models(scaling: float | None):
    query, key, value = heads(0), heads(1), heads(2)
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[3] ** -0.5)
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    allowed = (sequence[:, None] == sequence).tril()
    wanted = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value
    torch.testing.assert_close(attend(scaling=scaling), wanted.transpose(1, 2))


@pytest.fixture(params=[True, False], ids=["cudnn", "no cudnn"])
def is_allowed(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")], ids=["right", "failed"])
def test_no_kernel_is_taken_that_plans_for_every_new_length(
    monkeypatch: pytest.MonkeyPatch, is_allowed: bool, error: Exception | None
):
    scaled, enabled = torch.nn.functional.scaled_dot_product_attention, []

    def spy(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        if error is not None:
            raise error
        return scaled(*tensors, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    with nullcontext() if error is None else pytest.raises(RuntimeError, match="out of memory"):
        attend()
    assert enabled == [False] * (len(LENGTHS) if error is None else 1)
    assert torch.backends.cuda.cudnn_sdp_enabled() == is_allowed


def one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """What torch's kernel computes, as its documentation says; (T, heads, head_dim)."""
    ends, same_ends, most, same_most = rest
    assert ends is same_ends
    assert ends.dtype == torch.int32
    assert most == same_most == int(ends.diff().max())
    assert options["window_size"] == (-1, 0)
    assert query.shape == key.shape == value.shape
    outputs = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        q, k, v = (part[start:end].transpose(0, 1) for part in (query, key, value))
        scores = q @ k.transpose(1, 2) * (options["scale"] or q.shape[2] ** -0.5)
        outputs.append((scores + torch.full_like(scores, -torch.inf).triu(1)).softmax(-1) @ v)
    return torch.cat(outputs, dim=1).transpose(0, 1)


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("kv_heads", [2, 4], ids=["grouped", "as many"])
def test_one_kernel_for_all_sequences_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, scaling: float | None, kv_heads: int
):
    query, key, value = (torch.cat([heads(seed), heads(seed + 3)], dim=1) for seed in range(3))
    arguments: Any = (torch.nn.Module(), query, key[:, :kv_heads], value[:, :kv_heads], None)
    wanted, _ = varlen_attention.attend(*arguments, position_ids=POSITIONS, scaling=scaling)
    monkeypatch.setattr(varlen_attention, "_varlen_kernel", lambda: one_by_one)
    monkeypatch.setattr(varlen_attention, "one_kernel_for_all", lambda query: True)
    found, _ = varlen_attention.attend(*arguments, position_ids=POSITIONS, scaling=scaling)
    torch.testing.assert_close(found, wanted)


def test_a_cpu_takes_sequences_one_by_one():
    assert not varlen_attention.one_kernel_for_all(heads(0).bfloat16())


@pytest.mark.parametrize("name", ["sliding_window", "softcap", "s_aux"])
def test_what_would_be_left_out_is_refused(name: str):
    attend(**{name: None})
    with pytest.raises(ConfigError, match=f"has no {name}, .* use attn_implementation=sdpa"):
        attend(**{name: torch.tensor(4)})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: MistralForCausalLM(MistralConfig(sliding_window=4, **SIZES)), "sliding_window"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(layer_types=["full_attention"], **SIZES)), "softcap"),
    ],
    ids=["mistral", "gemma2"],
)
def test_a_model_that_needs_more_is_refused(model: Any, name: str):
    built = model()
    built.set_attn_implementation(varlen_attention.NAME)
    with pytest.raises(ConfigError, match=f"has no {name}"):
        built(torch.ones_like(POSITIONS), position_ids=POSITIONS, use_cache=False)


def test_a_mistral_without_a_window_is_not():
    built = MistralForCausalLM(MistralConfig(sliding_window=None, **SIZES))
    built.set_attn_implementation(varlen_attention.NAME)
    assert built(torch.ones_like(POSITIONS), position_ids=POSITIONS, use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize(
    "positions",
    [POSITIONS.expand(3, 1, -1), POSITIONS[0], POSITIONS + 1, POSITIONS[:, 1:], POSITIONS.expand(2, -1)],
    ids=["multimodal", "1-D", "cut by sequence parallelism", "too few", "two rows"],
)
def test_positions_that_do_not_tell_the_sequences_are_refused(positions: torch.Tensor):
    with pytest.raises(ConfigError, match=r"takes positions \(1, 8\) that begin with 0, not"):
        attend(position_ids=positions)
