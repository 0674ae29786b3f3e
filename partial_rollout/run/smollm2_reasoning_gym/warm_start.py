"""The recipe's supervised start: a few minutes of worked solutions on a GPU, the same bits from the same seed."""

from __future__ import annotations

import os
import random
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tqdm import trange

from partial_rollout.run.smollm2_reasoning_gym.problems import Habits, demonstrate, draw_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LEARNING_RATE = 3e-4
WARMUP_FRACTION = 0.05
POOL_EXAMPLES = 2048
"""Drawn at once and sorted by length, so that little of a batch is padding."""
IGNORE_LABEL = -100
Example = tuple[list[int], list[int]]


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_steps: int,
    batch_tokens: int,
    max_response_tokens: int,
    seed: int,
    device: str,
) -> float:
    """Minimise cross-entropy on response tokens for `num_steps` batches; returns the last loss, in nats a token.

    Computes in bfloat16 on a GPU, with float32 weights. The same seed gives the same weights on the same kind of device
    with the same torch and transformers.
    """
    with _deterministic(seed):
        network: Any = model  # transformers types `to` as a function of two models
        network.to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, LEARNING_RATE, total_steps=num_steps + 1, pct_start=WARMUP_FRACTION, cycle_momentum=False
        )
        batches = _batches(tokenizer, random.Random(seed), batch_tokens, max_response_tokens)
        loss = torch.tensor(0.0)
        progress = trange(num_steps, desc="supervised start", unit="step", disable=None)
        for step in progress:
            input_ids, labels = (part.to(device) for part in next(batches))
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
                loss = model(input_ids=input_ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 10 == 0:
                progress.set_postfix(loss=f"{loss.item():.3f}")
        network.to("cpu").eval()
        return loss.item()


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """Only kernels whose results do not depend on timing."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    before = torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def draw_examples(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random, number: int, max_response_tokens: int
) -> list[Example]:
    """Token ids of prompts, as verl renders them, with worked solutions; labels leave out the prompts."""
    fits = partial(_fits, tokenizer, max_response_tokens)
    before, after = _around_prompt(tokenizer)
    problems = [draw_problem(rng) for _ in range(number)]
    solutions = [demonstrate(problem, rng, Habits(), fits) for problem in problems]
    prompts = [before + problem.prompt + after for problem in problems]
    encoded = (tokenizer(texts, add_special_tokens=False)["input_ids"] for texts in (prompts, solutions))
    end: Any = tokenizer.eos_token_id
    return [
        (prompt + [*solution, end], [IGNORE_LABEL] * len(prompt) + [*solution, end])
        for prompt, solution in zip(*encoded, strict=True)
    ]


def _around_prompt(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template writes before and after a user's words; rendering every prompt takes minutes."""
    mark = "@@"
    messages = [{"role": "user", "content": mark}]
    before, _, after = str(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ).partition(mark)
    return before, after


def _fits(tokenizer: PreTrainedTokenizerBase, max_response_tokens: int, text: str) -> bool:
    if len(text) < max_response_tokens:
        return True  # a token has at least one character
    return len(tokenizer.encode(text, add_special_tokens=False)) < max_response_tokens


def _batches(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random, batch_tokens: int, max_response_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of about `batch_tokens`, with padding; few examples are drawn at once where batches are small."""
    number = min(POOL_EXAMPLES, max(1, batch_tokens // 8))
    while True:
        examples = draw_examples(tokenizer, rng, number, max_response_tokens)
        examples.sort(key=lambda example: len(example[0]))
        groups = list(_group_by_tokens(examples, batch_tokens))
        rng.shuffle(groups)
        for group in groups:
            yield _pad(group, tokenizer)


def _group_by_tokens(examples: list[Example], batch_tokens: int) -> Iterator[list[Example]]:
    group: list[Example] = []
    for example in examples:
        if group and (len(group) + 1) * len(example[0]) > batch_tokens:
            yield group
            group = []
        group.append(example)
    yield group


def _pad(group: list[Example], tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Padding stands at the right, where causal attention keeps it from all that counts."""
    width = max(len(ids) for ids, _ in group)
    pad_id: Any = tokenizer.pad_token_id
    input_ids = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids, _ in group])
    labels = torch.tensor([row + [IGNORE_LABEL] * (width - len(row)) for _, row in group])
    return input_ids, labels
