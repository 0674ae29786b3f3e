"""Attention of packed rows on a GPU: one kernel for all sequences, or a call for each. Is it equal, and how fast?

    python -m benchmarks.bench_attention --json FILE.json

Heads as in a layer of SmolLM2-135M and of Qwen3-4B, rows of 16,384 tokens in bf16; forward and backward. Differences
are to float32, computed sequence by sequence: both round, so one kernel for all must not be further off than the calls.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from partial_rollout.advise.result import about_run, store
from partial_rollout.packing import attention

HEADS = {"smollm2-135m": (9, 3, 64), "qwen3-4b": (32, 8, 128)}
"""Query heads, key heads, size of a head."""
ROW_TOKENS, SEQUENCE_TOKENS = 16_384, (64, 256, 1024)
ROUNDS = 10


def row(shape: str, sequence_tokens: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value (1, heads, T, size) that want gradients, and positions (1, T)."""
    query_heads, key_heads, size = HEADS[shape]
    made = torch.Generator("cuda").manual_seed(0)
    tensors = [
        torch.randn(1, heads, ROW_TOKENS, size, device="cuda", dtype=torch.bfloat16, generator=made).requires_grad_()
        for heads in (query_heads, key_heads, key_heads)
    ]
    return tensors, (torch.arange(ROW_TOKENS, device="cuda") % sequence_tokens)[None]


def step(tensors: list[torch.Tensor], positions: torch.Tensor, *, at_once: bool) -> list[torch.Tensor]:
    """Forward and backward: the output and the gradients."""
    lengths = attention.sequence_lengths(positions)
    query, key, value = tensors
    attend = attention._attend_at_once if at_once else attention._attend_one_by_one
    output = attend(query, key, value, lengths, None)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), tensors)]


def seconds(tensors: list[torch.Tensor], positions: torch.Tensor, *, at_once: bool) -> float:
    """Least time of ROUNDS, after one to warm up."""
    times = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step(tensors, positions, at_once=at_once)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def compare(shape: str, sequence_tokens: int) -> dict[str, Any]:
    """One row of the table; differences are relative to the norm of the float32 result, the largest of the four."""
    tensors, positions = row(shape, sequence_tokens)
    exact = step([t.detach().float().requires_grad_() for t in tensors], positions, at_once=False)
    found: dict[str, Any] = {"shape": shape, "sequence_tokens": sequence_tokens}
    for name, at_once in (("one_by_one", False), ("at_once", True)):
        pairs = zip(step(tensors, positions, at_once=at_once), exact, strict=True)
        found[f"{name}_difference"] = max(((a.float() - b).norm() / b.norm()).item() for a, b in pairs)
        found[f"{name}_ms"] = 1000 * seconds(tensors, positions, at_once=at_once)
    return found


def main() -> None:
    """Measure, print and store."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--json", type=Path, help="file for the result")
    options = line.parse_args()
    if not torch.cuda.is_available() or attention._varlen_kernel() is None:
        raise SystemExit(f"needs a GPU, and torch 2.11 or later (this is {torch.__version__})")
    rows = [compare(shape, tokens) for shape in HEADS for tokens in SEQUENCE_TOKENS]
    print(*rows, sep="\n", flush=True)
    store({**about_run(options), "row_tokens": ROW_TOKENS, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
