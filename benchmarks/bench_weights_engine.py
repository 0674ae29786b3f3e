"""How long new weights take into a running vLLM engine on a CPU.

    python -m benchmarks.bench_weights_engine --gigabytes 0.5 1.0 --json benchmarks/results/bench_weights_engine.json

A random bf16 Qwen3 with untied embeddings. Interleaved in one run, in this process and the engine's:

- `memcpy`: every tensor copied to memory that was written before, in one process;
- `load`: an update without transport: the engine loads and repacks tensors that it has in memory;
- `channel`: ours;
- `verl`: verl 0.9.1's channel made to work: its tensors cloned on receipt, its bucket as large as the largest tensor;
- `disk`: vLLM reloads the checkpoint, whose file is in the page cache.

Before the rounds each of them must make the engine generate what it generates after `disk`. `extra_mib` is from rounds
that are not timed: the highest PSS of all processes, less that before the round. It is sampled,
so a short peak is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from benchmarks.bench_weights import MEBIBYTE, extra_mib, summary
from benchmarks.result import circumstances, store
from partial_rollout.run.cpu_environment import apply_cpu_environment
from partial_rollout.weights.directory import ChannelDirectory
from partial_rollout.weights.sender import WeightSender

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

JOB_ID = f"bench-{os.getpid()}"
CHANNEL = f"ipc:///tmp/rl-colocate-zmq-{JOB_ID}-replica-0-rank-0.sock"
"""verl's name for the engine's only worker."""
VOCABULARY, HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32_000, 1024, 3072, 16, 8, 128
LAYER_NUMEL = HIDDEN * (HEAD_DIM * 2 * (NUM_HEADS + NUM_KV_HEADS) + 3 * INTERMEDIATE)
ITEM_BYTES = 2
TIMEOUT_S = 120.0
PROBE, NUM_PROBE_TOKENS = [11, 1200, 13, 14], 8
MODES = ("memcpy", "load", "channel", "verl", "disk")
UPDATES = MODES[1:]


def make_model(folder: Path, gigabytes: float, seed: int) -> dict[str, torch.Tensor]:
    """Write a checkpoint of about this size; return its tensors."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    numel = gigabytes * 1e9 / ITEM_BYTES - 2 * VOCABULARY * HIDDEN
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=math.ceil(numel / LAYER_NUMEL),
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=False,
    )
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return dict(model.state_dict())


class Engine:
    """vLLM with one worker, in a process of its own, and every way to update it."""

    def __init__(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        from vllm import LLM, SamplingParams

        from partial_rollout.integrations.vllm_plugin import register_backend
        from partial_rollout.weights.transfer_engine import choose_backend

        register_backend()
        backend: dict[str, Any] = {}
        choose_backend(backend)
        self.folder, self.weights, self.update_number = folder, weights, 0
        self.warm = {name: tensor.clone() for name, tensor in weights.items()}
        self.channels = ChannelDirectory()
        self.channels.address.export()
        self.llm: Any = LLM(
            model=str(folder),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=1,
            max_num_batched_tokens=128,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            worker_extension_cls="benchmarks.measured_worker.MeasuredWorker",
            **backend,
        )
        self.llm.collective_rpc("keep", args=(str(folder),))
        self.sampling = SamplingParams(temperature=0.0, max_tokens=NUM_PROBE_TOKENS, ignore_eos=True, detokenize=False)
        self.pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    def tokens(self) -> list[int]:
        """What it generates with the weights it has."""
        outputs = self.llm.generate({"prompt_token_ids": PROBE}, self.sampling, use_tqdm=False)
        return list(outputs[0].outputs[0].token_ids)

    def run(self, mode: str) -> float:
        """One update; seconds until the engine could generate with it."""
        self.update_number += 1
        started = time.perf_counter()
        getattr(self, mode)()
        return time.perf_counter() - started

    def memcpy(self) -> None:
        for name, tensor in self.weights.items():
            self.warm[name].copy_(tensor)

    def load(self) -> None:
        self.llm.collective_rpc("load_kept")

    def disk(self, folder: Path | None = None) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder or self.folder)})

    def channel(self) -> None:
        options: dict[str, Any] = {"update_number": self.update_number, "timeout_s": TIMEOUT_S, "check": lambda: None}
        asked = {"update_number": self.update_number, "timeout_s": TIMEOUT_S, "validate": False}
        with WeightSender(self.channels.address, CHANNEL, **options) as sender, ThreadPoolExecutor(1) as pool:
            sent = pool.submit(sender.send, self.weights.items())
            self.llm.collective_rpc("receive_weights", kwargs=asked)
            sent.result()

    def verl(self) -> None:
        largest_mib = max(-(-tensor.nbytes // MEBIBYTE) for tensor in self.weights.values())
        sender = BucketedWeightSender(CHANNEL, largest_mib, True)
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(lambda: asyncio.run(sender.async_send_weights(iter(self.weights.items()))))
            self.llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
            sent.result()

    def close(self) -> None:
        """End the engine."""
        self.llm.llm_engine.engine_core.shutdown()
        self.channels.remove()


def check(engine: Engine, other: Path) -> None:
    """Every update takes the engine from the `other` weights to these; also warms up.

    Raises:
        RuntimeError: it generates something else.
    """
    engine.disk()
    wanted = engine.tokens()
    for mode in UPDATES:
        engine.disk(other)
        before = engine.tokens()
        engine.run(mode)
        after = engine.tokens()
        if before == wanted or after != wanted:
            raise RuntimeError(f"{mode}: the engine went from {before} to {after}, not to {wanted}")
    engine.run("memcpy")


def measure(gigabytes: float, rounds: int, work: Path) -> dict[str, Any]:
    """Seconds of each mode, interleaved."""
    folder, other = work / "model", work / "other"
    make_model(other, gigabytes, seed=1)
    engine = Engine(folder, make_model(folder, gigabytes, seed=0))
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    try:
        check(engine, other)
        for _ in range(rounds):
            for mode in MODES:
                seconds[mode].append(engine.run(mode))
        extra = {mode: extra_mib(lambda mode=mode: engine.run(mode), engine.pids) for mode in UPDATES}
    finally:
        engine.close()
    num_bytes = sum(tensor.nbytes for tensor in engine.weights.values())
    return {"bytes": num_bytes, **summary(seconds, num_bytes, extra), **transport_parts(seconds)}


def transport_parts(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds above the same round's `load`, and how often a memcpy fits in them: medians of rounds."""
    parts: dict[str, Any] = {}
    for mode in ("channel", "verl", "disk"):
        above = [mine - load for mine, load in zip(seconds[mode], seconds["load"], strict=True)]
        copies = [extra / copy for extra, copy in zip(above, seconds["memcpy"], strict=True)]
        parts[mode] = {
            "median_s": round(statistics.median(above), 4),
            "to_memcpy": round(statistics.median(copies), 2),
        }
    return {"above_load": parts}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    apply_cpu_environment()
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VERL_RAY_JOB_ID": JOB_ID, "VERL_REPLICA_RANK": "0"}
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    result: dict[str, Any] = {**circumstances(options), "models": []}
    for gigabytes in options.gigabytes:
        with tempfile.TemporaryDirectory() as work:
            result["models"].append(measure(gigabytes, options.rounds, Path(work)))
        print(json.dumps(result["models"][-1], indent=2), flush=True)
    store(result, options.json)


if __name__ == "__main__":
    main()
