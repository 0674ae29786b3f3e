"""The quickstart's starting checkpoint: a tiny Qwen3 shown demonstrations for a few hundred steps."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
from tqdm import trange
from transformers import Qwen3Config, Qwen3ForCausalLM

from partial_rollout.run.quickstart.problem import Habits, demonstrate, draw_problem
from partial_rollout.run.quickstart.tokenizer import PAD, TURN_END

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

HIDDEN_SIZE = 128
NUM_LAYERS = 2
NUM_HEADS = 4
HEAD_DIM = 32
"""The smallest head that vLLM's CPU attention supports."""
MAX_POSITIONS = 2048
INITIALIZER_STD = 0.08
"""About hidden_size ** -0.5; Qwen3's 0.02 is meant for wide models and took four times as many steps here."""
LEARNING_RATE = 3e-3
WARMUP_FRACTION = 0.05
BATCH_TOKENS = 2048
POOL_EXAMPLES = 512
"""Drawn at once and sorted by length, so that little of a batch is padding."""
IGNORE_LABEL = -100


def build_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """A tiny random Qwen3 with exactly as many embeddings as `tokenizer` has tokens.

    verl masks logits outside the tokenizer in vLLM only, so spare embeddings would make log-probs differ.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=INITIALIZER_STD,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[TURN_END],
        pad_token_id=tokenizer.get_vocab()[PAD],
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_steps: int,
    habits: Habits,
    max_response_tokens: int,
    seed: int,
) -> float:
    """Minimise cross-entropy on response tokens for `num_steps` batches; returns the last loss, in nats a token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=num_steps, pct_start=WARMUP_FRACTION, cycle_momentum=False
    )
    batches = _batches(tokenizer, random.Random(seed), habits=habits, max_response_tokens=max_response_tokens)
    model.train()
    loss = torch.tensor(0.0)
    progress = trange(num_steps, desc="warm start", unit="step", disable=None)
    for _ in progress:
        input_ids, labels = next(batches)
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    return loss.item()


def encode_prompt(tokenizer: PreTrainedTokenizerBase, content: str) -> list[int]:
    """Token ids of a user turn and the opening of the answer, as verl renders them."""
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(str(text), add_special_tokens=False)


def _batches(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random, *, habits: Habits, max_response_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        examples = [_example(tokenizer, rng, habits, max_response_tokens) for _ in range(POOL_EXAMPLES)]
        examples.sort(key=lambda example: len(example[0]))
        groups = list(_group_by_tokens(examples))
        rng.shuffle(groups)
        for group in groups:
            yield _pad(group, tokenizer.get_vocab()[PAD])


def _example(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random, habits: Habits, max_response_tokens: int
) -> tuple[list[int], list[int]]:
    problem = draw_problem(rng)
    text = demonstrate(problem, rng, habits=habits, max_chars=max_response_tokens - 1)
    prompt = encode_prompt(tokenizer, problem.prompt)
    response = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return prompt + response, [IGNORE_LABEL] * len(prompt) + response


def _group_by_tokens(examples: list[tuple[list[int], list[int]]]) -> Iterator[list[tuple[list[int], list[int]]]]:
    group: list[tuple[list[int], list[int]]] = []
    for example in examples:
        if group and (len(group) + 1) * len(example[0]) > BATCH_TOKENS:
            yield group
            group = []
        group.append(example)
    yield group


def _pad(group: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids, _ in group)
    input_ids = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids, _ in group])
    labels = torch.tensor([row + [IGNORE_LABEL] * (width - len(row)) for _, row in group])
    return input_ids, labels
