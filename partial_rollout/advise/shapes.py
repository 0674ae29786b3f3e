"""Models of known shapes, with made-up weights or none, and prompts whose responses have recorded lengths."""

from __future__ import annotations

import json
import multiprocessing
import random
import string
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import pandas as pd
from transformers import GenerationConfig, Qwen3Config

from partial_rollout.advise.workload import primed_lengths
from partial_rollout.run.quickstart.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from partial_rollout.advise.workload import Workload

DATA_SOURCE = "openai/gsm8k"
"""One that verl has a rule for, where a job scores responses."""
AGENT = "length_trace_agent"
LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 151_936
    tied: bool = True

    def config(self, max_positions: int) -> Qwen3Config:
        """The configuration that transformers and vLLM read."""
        return Qwen3Config(
            architectures=["Qwen3ForCausalLM"],
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=self.tied,
            max_position_embeddings=max_positions,
            bos_token_id=0,
            eos_token_id=3,
            pad_token_id=0,
        )


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, head_dim=32, vocabulary=256),
    "small": Shape(128, 256, 2, 4, 2, head_dim=32, vocabulary=512),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8),
    "4b": Shape(2560, 9728, 36, 32, 8),
    "8b": Shape(4096, 12288, 36, 32, 8, tied=False),
}
PROMPT_TOKENS = 256
"""Tokens of every prompt."""


def write_model(path: Path, shape: Shape, max_positions: int) -> PreTrainedTokenizerBase:
    """A folder with configuration and tokenizer; an engine makes the weights up with `load_format=dummy`.

    The tokenizer has one token a character, and fewer of them than the model, whose size decides what a step costs.
    """
    tokenizer = build_tokenizer(max_positions)
    shape.config(max_positions).save_pretrained(path)
    GenerationConfig(bos_token_id=0, eos_token_id=3, pad_token_id=0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return tokenizer


def write_weights(path: Path, shape: str, max_positions: int) -> None:
    """Random bf16 weights beside the configuration, made in a process that gives the GPU's memory back.

    `shape` is a name in `SHAPES`.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(_write_weights, path, shape, max_positions).result()


def _write_weights(path: Path, shape: str, max_positions: int) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(SHAPES[shape].config(max_positions))
    model.save_pretrained(path)


def write_inputs(folder: Path, shape: str, load: Workload, prompt_tokens: int) -> None:
    """Model, random weights and prompts of a benchmark's jobs, unless the folder has them from an earlier call.

    Raises:
        SystemExit: the folder has those of another shape or workload.
    """
    wanted, note = json.dumps([shape, asdict(load), prompt_tokens]), folder / "inputs.json"
    if note.exists():
        if note.read_text() != wanted:
            raise SystemExit(f"{folder} has the model and prompts of another shape or workload; name another folder")
        return
    tokenizer = write_model(folder / "model", SHAPES[shape], prompt_tokens + load.limit)
    write_weights(folder / "model", shape, prompt_tokens + load.limit)
    write_prompts(folder / "prompts.parquet", load, tokenizer, prompt_tokens, load.num_prompts)
    note.write_text(wanted)  # last, so that a folder that has it is whole


def write_prompts(path: Path, load: Workload, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int, num: int) -> None:
    """Different prompts of exactly `prompt_tokens` tokens, with the lengths of their responses, in verl's columns.

    The first batch is a primer: its responses are so short that its step loads what workers and engine load at first
    use, and takes no time otherwise. `num` prompts follow.
    """
    rng, traced = random.Random(load.seed), primed_lengths(load, num)
    around = len(_tokens(tokenizer, ""))
    if prompt_tokens <= around:
        raise SystemExit(f"--prompt-tokens={prompt_tokens} must be above the {around} of the chat template")
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": "".join(rng.choices(LETTERS, k=prompt_tokens - around))}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": row, "lengths": traced[row].tolist()},
            "agent_name": AGENT,
        }
        for row in range(len(traced))
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(path)


def _tokens(tokenizer: PreTrainedTokenizerBase, content: str) -> list[int]:
    messages = [{"role": "user", "content": content}]
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    return cast("list[int]", tokenizer.apply_chat_template(messages, **options))
