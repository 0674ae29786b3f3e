"""Response lengths and reward of a quickstart checkpoint, sampled with plain transformers.

`python -m partial_rollout.run.quickstart.measure --task DIR [--model DIR] [--num-samples N]`
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from partial_rollout.run.quickstart.make_task import MAX_RESPONSE_TOKENS
from partial_rollout.run.quickstart.problem import Problem, draw_problem
from partial_rollout.run.quickstart.reward import is_right
from partial_rollout.run.quickstart.warm_start import encode_prompt
from partial_rollout.run.task_files import TaskFiles

BATCH_SIZE = 128


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled response; `num_tokens` counts the end token."""

    problem: Problem
    text: str
    num_tokens: int

    @property
    def reward(self) -> float:
        """1.0 if right."""
        return float(is_right(self.text, self.problem.answer))


@dataclass(frozen=True, slots=True)
class Summary:
    """Lengths in tokens and mean reward."""

    num_samples: int
    median: float
    p95: float
    longest: int
    truncated: int
    reward: float

    @property
    def tail_ratio(self) -> float:
        """95th percentile over median."""
        return self.p95 / self.median


def sample(
    model: Any, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], *, max_new_tokens: int
) -> list[Sample]:
    """One response of a `transformers` causal model per problem, at temperature 1; prompts must be of equal length."""
    prompts = torch.tensor([encode_prompt(tokenizer, problem.prompt) for problem in problems])
    with torch.inference_mode():
        output = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
        )
    responses = output[:, prompts.shape[1] :].tolist()
    return [_sample(tokenizer, problem, ids) for problem, ids in zip(problems, responses, strict=True)]


def _sample(tokenizer: PreTrainedTokenizerBase, problem: Problem, ids: list[int]) -> Sample:
    end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
    return Sample(problem, str(tokenizer.decode(ids[:end], skip_special_tokens=True)), end)


def summarize(samples: list[Sample], max_new_tokens: int) -> Summary:
    """Distribution of lengths and the mean reward."""
    lengths = [item.num_tokens for item in samples]
    return Summary(
        num_samples=len(samples),
        median=statistics.median(lengths),
        p95=statistics.quantiles(lengths, n=20)[-1],
        longest=max(lengths),
        truncated=sum(length >= max_new_tokens for length in lengths),
        reward=statistics.mean(item.reward for item in samples),
    )


def main() -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", type=Path, required=True, help="directory that make_task wrote")
    parser.add_argument("--model", type=Path, help="another checkpoint in Hugging Face format")
    parser.add_argument("--num-samples", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    directory = options.model or TaskFiles(options.task).model
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TaskFiles(options.task).model)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    samples: list[Sample] = []
    for _ in tqdm(range(0, options.num_samples, BATCH_SIZE), desc="sampling", unit="batch"):
        problems = [draw_problem(rng) for _ in range(BATCH_SIZE)]
        samples += sample(model, tokenizer, problems, max_new_tokens=MAX_RESPONSE_TOKENS)
    summary = summarize(samples[: options.num_samples], MAX_RESPONSE_TOKENS)
    print(json.dumps({**asdict(summary), "tail_ratio": round(summary.tail_ratio, 2)}))


if __name__ == "__main__":
    main()
