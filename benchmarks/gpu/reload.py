"""A vLLM engine that is sent new weights by our channel against one that was started from them.

    python -m benchmarks.gpu.reload --json $OUT/reload.json
    python -m benchmarks.gpu.reload --quantization none fp8_per_tensor        # the same on a CPU

For each quantisation and for tied and untied embeddings, with two random models A and B: one engine is started from A,
sent B and sent A again; another is started from B. Greedy tokens and log-probs must be those of the fresh engine each
time. No Ray and no trainer: vLLM's `LLM` with our worker extension and backend, and our sender beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import about_run, store

VOCABULARY = 1024
NUM_TOKENS = 32
PROMPTS = [[11, 12, 13, 14], [20, 3, 9], [3 + i % 900 for i in range(300)]]
TIMEOUT_S = 120.0
BUFFER_BYTES = 1 << 20
TOLERANCE = 1e-6
HAS_GPU = torch.cuda.is_available()
WORKER_EXTENSION = "partial_rollout.weights.worker.WorkerExtension"
CHANNEL = "ipc:///tmp/rl-colocate-zmq-0-replica-0-rank-0.sock"
"""verl's name for the only worker's channel where no Ray job has another number."""

Said = tuple[list[int], list[float]]
"""Tokens and their log-probs."""
Outputs = list[Said]


@dataclass(frozen=True)
class Case:
    """One comparison."""

    quantization: str | None
    tied: bool

    @property
    def dtype(self) -> str:
        """What the model computes in; exact where nothing demands otherwise."""
        return "bfloat16" if HAS_GPU or self.quantization else "float32"


def make_model(path: Path, seed: int, case: Case, spread: float = 0.1) -> None:
    """Write a random Qwen3 to `path`, with weights of this standard deviation."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=case.tied,
        initializer_range=spread,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(getattr(torch, case.dtype))
    model.save_pretrained(path)


def said(output: Any) -> Said:
    """Of one of vLLM's outputs with `logprobs=0`."""
    tokens = list(output.token_ids)
    return tokens, [at[token].logprob for at, token in zip(output.logprobs, tokens, strict=True)]


class Engine:
    """vLLM in this process, and the sending end of its channel."""

    def __init__(self, path: Path, case: Case) -> None:
        from vllm import LLM

        from partial_rollout.integrations.vllm_plugin import BACKEND, register_backend
        from partial_rollout.weights.directory import ChannelDirectory

        register_backend()
        self._directory = ChannelDirectory()
        self._directory.address.export()
        self._update_number = 0
        options: dict[str, Any] = {"quantization": case.quantization, "dtype": case.dtype}
        if HAS_GPU:
            options["gpu_memory_utilization"] = 0.3
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # the module asks for the GPU when it is imported
        self._llm = LLM(
            str(path), skip_tokenizer_init=True, enforce_eager=True, max_model_len=1024,
            max_num_seqs=8, worker_extension_cls=WORKER_EXTENSION, weight_transfer_config={"backend": BACKEND},
            **options,
        )  # fmt: skip

    def generate(self) -> Outputs:
        """Greedy tokens and log-probs for PROMPTS."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
        self._llm.reset_prefix_cache()
        answers = self._llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        return [said(answer.outputs[0]) for answer in answers]

    def send(self, path: Path) -> float:
        """All weights of the checkpoint; returns the seconds that it took."""
        from safetensors.torch import load_file

        from partial_rollout.weights.sender import WeightSender

        self._update_number += 1
        device = "cuda" if HAS_GPU else "cpu"
        weights = {name: tensor.to(device) for name, tensor in load_file(path / "model.safetensors").items()}
        options: dict[str, Any] = {"update_number": self._update_number, "timeout_s": TIMEOUT_S}
        address = self._directory.address
        started = time.monotonic()
        with (
            ThreadPoolExecutor(1) as pool,
            WeightSender(address, CHANNEL, buffer_bytes=BUFFER_BYTES, check=lambda: None, **options) as sender,
        ):
            sent = pool.submit(sender.send, weights.items())
            self._llm.collective_rpc("receive_weights", kwargs=options | {"validate": True})
            sent.result()
        return time.monotonic() - started


def run_engine(case: Case, start: Path, updates: list[Path]) -> tuple[list[Outputs], list[float]]:
    """What an engine in a process of its own generates, fresh and after each update, and the seconds of each update."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run_engine, case, start, updates).result()


def _run_engine(case: Case, start: Path, updates: list[Path]) -> tuple[list[Outputs], list[float]]:
    engine = Engine(start, case)
    outputs, seconds = [engine.generate()], []
    for path in updates:
        seconds.append(engine.send(path))
        outputs.append(engine.generate())
    return outputs, seconds


def difference(found: Outputs, wanted: Outputs) -> float:
    """Largest difference of log-probs; infinite if a token differs."""
    if [tokens for tokens, _ in found] != [tokens for tokens, _ in wanted]:
        return float("inf")
    pairs = ((x, y) for (_, a), (_, b) in zip(found, wanted, strict=True) for x, y in zip(a, b, strict=True))
    return max(abs(x - y) for x, y in pairs)


def compare(case: Case, folder: Path) -> dict[str, Any]:
    """The numbers of one case."""
    first, second = folder / "a", folder / "b"
    make_model(first, 1, case)
    make_model(second, 2, case)
    (fresh, updated, back), seconds = run_engine(case, first, [second, first])
    (wanted,), _ = run_engine(case, second, [])
    return {
        "quantization": case.quantization,
        "tied": case.tied,
        "models_differ": difference(fresh, wanted) > 0,
        "max_difference_to_fresh": difference(updated, wanted),
        "max_difference_back": difference(back, fresh),
        "update_s": seconds,
    }


def main() -> int:
    """Print a line for each case; 1 if a case is not equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", nargs="+", default=["none", "fp8"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = about_run(options) | {"cases": []}
    for name in options.quantization:
        for tied in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                found = compare(Case(None if name == "none" else name, tied), Path(folder))
            print(json.dumps(found), flush=True)
            result["cases"].append(found)
            store(result, options.json)
    equal = [max(case["max_difference_to_fresh"], case["max_difference_back"]) <= TOLERANCE for case in result["cases"]]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
