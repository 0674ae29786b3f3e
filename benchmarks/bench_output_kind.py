"""What does it cost to hand tokens and log-probs from vLLM's engine core to the caller, by output kind?

One AsyncLLM on the CPU, a tiny random model, `--concurrency` requests of `--tokens` tokens with log-probs. The variants
take turns in every round, so that a slow minute of the machine hits all of them; medians over rounds are reported.

    python -m benchmarks.bench_output_kind --rounds 7 --json benchmarks/results/bench_output_kind.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.result import circumstances, store
from partial_rollout.run.cpu_environment import apply_cpu_environment

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

apply_cpu_environment()
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

STREAM_INTERVAL = 32
PROMPT_LEN = 16
VARIANTS: dict[str, dict[str, Any]] = {
    "CUMULATIVE (verl)": {"kind": "CUMULATIVE", "stream_interval": 1},
    "FINAL_ONLY": {"kind": "FINAL_ONLY", "stream_interval": 1},
    "FINAL_ONLY, no text": {"kind": "FINAL_ONLY", "stream_interval": 1, "detokenize": False},
    "DELTA": {"kind": "DELTA", "stream_interval": 1},
    "DELTA, no text (requests that stay)": {"kind": "DELTA", "stream_interval": 1, "detokenize": False},
    "DELTA every 32": {"kind": "DELTA", "stream_interval": STREAM_INTERVAL},
    "DELTA every 32, no text (ours)": {"kind": "DELTA", "stream_interval": STREAM_INTERVAL, "detokenize": False},
}


async def one_request(engine: AsyncLLM, request_id: str, variant: dict[str, Any], num_tokens: int) -> int:
    """Generate one response the way a server does; return its number of tokens."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=variant.get("detokenize", True),
        stream_interval=variant["stream_interval"],
        output_kind=RequestOutputKind[variant["kind"]],
    )
    number = int(request_id.rpartition("-")[2])
    prompt = TokensPrompt(prompt_token_ids=[3 + (number + i) % 50 for i in range(PROMPT_LEN)])
    received = 0
    async for output in engine.generate(prompt, params, request_id):
        count = len(output.outputs[0].token_ids)
        received = received + count if variant["kind"] == "DELTA" else count
    return received


async def one_round(
    engine: AsyncLLM, label: str, variant: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    """Run all requests at once; return seconds and the front end's own CPU seconds."""
    cpu_s, start_s = time.process_time(), time.perf_counter()
    counts = await asyncio.gather(
        *(one_request(engine, f"{label}-{i}", variant, args.tokens) for i in range(args.concurrency))
    )
    if counts != [args.tokens] * args.concurrency:
        raise RuntimeError(f"{label}: expected {args.tokens} tokens from each request, got {sorted(set(counts))}")
    return {"wall_s": time.perf_counter() - start_s, "front_end_cpu_s": time.process_time() - cpu_s}


async def measure(model_path: str, args: argparse.Namespace) -> dict[str, Any]:
    """Start the engine, interleave the variants and summarise."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model_path,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=args.concurrency,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
    )
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    try:
        for round_number in range(args.rounds + 1):
            for index, (name, variant) in enumerate(VARIANTS.items()):
                sample = await one_round(engine, f"{round_number}.{index}", variant, args)
                if round_number > 0:  # the first round warms up
                    samples[name].append(sample)
    finally:
        engine.shutdown()
    return {name: summarise(rounds, args.tokens * args.concurrency) for name, rounds in samples.items()}


def summarise(rounds: list[dict[str, float]], num_tokens: int) -> dict[str, float]:
    """Medians and spread, per token in microseconds."""
    walls = [1e6 * sample["wall_s"] / num_tokens for sample in rounds]
    cpus = [1e6 * sample["front_end_cpu_s"] / num_tokens for sample in rounds]
    return {
        "wall_us_per_token": round(statistics.median(walls), 1),
        "wall_us_min": round(min(walls), 1),
        "wall_us_max": round(max(walls), 1),
        "front_end_cpu_us_per_token": round(statistics.median(cpus), 1),
        "front_end_cpu_us_min": round(min(cpus), 1),
        "front_end_cpu_us_max": round(max(cpus), 1),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "bench_output_kind.json")
    args = parser.parse_args()
    about = circumstances(args)
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        results = asyncio.run(measure(folder, args))
    store({**about, "results": results}, args.json)
    for name, row in results.items():
        print(f"{name:36} {row['wall_us_per_token']:8.1f} us/token, front end {row['front_end_cpu_us_per_token']:7.1f}")


def make_model(folder: str) -> None:
    """Write a random two-layer Qwen3 with a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(64)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="t2")))
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
