"""Jobs whose responses are known: the most likely tokens, by weights that training does not change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import LONG, SHORT

if TYPE_CHECKING:
    from pathlib import Path

SAME_WEIGHTS = [
    "actor_rollout_ref.actor.optim.lr=0.0",
    "actor_rollout_ref.rollout.top_k=1",
    "actor_rollout_ref.rollout.load_format=dummy",
]
"""Each token is the most likely one: whatever interrupts a response, it must be the one of the first weights.

Engines begin with random weights, so that nothing but weights that were sent to them makes it right.
"""


def check_responses(model: Path, dumps: Path) -> None:
    """Each dumped response is what `model` generates without an interruption, token by token; some were interrupted."""
    rows = [json.loads(line) for file in dumps.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert any(len(row["weight_versions"]) > 1 for row in rows)
    lengths = [sum(count for _, count in row["weight_versions"]) for row in rows]
    assert set(lengths) == {SHORT, LONG}
    wanted = _greedy(model, sorted({row["input"] for row in rows}))
    texts = [wanted[row["input"]][length] for row, length in zip(rows, lengths, strict=True)]
    assert [row for row, text in zip(rows, texts, strict=True) if row["output"] != text] == []


def _greedy(folder: Path, prompts: list[str]) -> dict[str, dict[int, str]]:
    """The most likely responses of both lengths; an end of text, which the jobs ignore, ends none."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    contents = [prompt.removeprefix("user\n").removesuffix("\nassistant\n") for prompt in prompts]
    messages = [[{"role": "user", "content": content}] for content in contents]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokens, past, found = torch.tensor(ids), None, []  # all prompts have the same length
    with torch.inference_mode():
        for _ in range(LONG):
            output = model(tokens, past_key_values=past, use_cache=True)
            past, tokens = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
            found.append(tokens)
    responses = torch.cat(found, 1)
    decoded = {n: tokenizer.batch_decode(responses[:, :n], skip_special_tokens=True) for n in (SHORT, LONG)}
    return {prompt: {n: texts[row] for n, texts in decoded.items()} for row, prompt in enumerate(prompts)}
