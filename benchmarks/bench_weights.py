"""How long new weights take from one process to another.

    python -m benchmarks.bench_weights --gigabytes 0.5 1.0 --rounds 15 --json benchmarks/results/bench_weights.json

Transport, interleaved in one run, the same bf16 tensors for all; sender and receiver are two processes and the receiver
drops every tensor at once, if nothing else is said:

- `memcpy_warm`: every tensor copied to memory that was written before, in one process;
- `memcpy_fresh`: every tensor copied to newly allocated memory;
- `channel`: ours, whose tensors nobody overwrites while the receiver has them;
- `verl`: verl 0.9.1's bucketed channel over shared memory, its tensors cloned on receipt (without that they are
  overwritten), with a bucket that holds the largest tensor, which it needs;
- `memcpy_load`: `memcpy_fresh`, and from there into parameters that exist, as a model's loader does;
- `channel_load`: ours, and from there into parameters that exist.

`extra_mib` is from rounds that are not timed: the highest sum of the two processes' PSS (shared pages count once), less
that sum before the round. It is sampled, so a short peak is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender

from benchmarks.child import Child, serve
from benchmarks.result import circumstances, store
from partial_rollout.weights.directory import ChannelAddress, ChannelDirectory
from partial_rollout.weights.receiver import WeightReceiver
from partial_rollout.weights.sender import WeightSender
from partial_rollout.weights.transport import SHARED_BUFFER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

HIDDEN, INTERMEDIATE, VOCAB = 1024, 3072, 32_000
LARGEST_TENSOR_MIB = -(-VOCAB * HIDDEN * 2 // (1 << 20))
TIMEOUT_S = 120.0
SAMPLE_S = 0.003
MEBIBYTE = 1 << 20
Weights = list[tuple[str, torch.Tensor]]


def make_weights(gigabytes: float) -> Weights:
    """Tensors of a Qwen3 of this size, bf16, filled."""
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "vocabulary": VOCAB}
    return [(name, torch.full(shape, 0.5, dtype=torch.bfloat16)) for name, shape in qwen_shapes(gigabytes, **sizes)]


def qwen_shapes(
    gigabytes: float, *, hidden: int, intermediate: int, vocabulary: int
) -> list[tuple[str, tuple[int, ...]]]:
    """As many layers as make `gigabytes` of bf16, after the embedding."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed_tokens", (vocabulary, hidden))]
    layer = [("qkv", (2 * hidden, 2 * hidden)), ("o", (hidden, 2 * hidden)), ("norm", (hidden,))]
    layer += [("gate", (intermediate, hidden)), ("up", (intermediate, hidden)), ("down", (hidden, intermediate))]
    total, wanted = vocabulary * hidden * 2, gigabytes * 1e9
    while total < wanted:
        shapes += [(f"layers.{len(shapes)}.{name}", shape) for name, shape in layer]
        total += sum(2 * torch.Size(shape).numel() for _, shape in layer)
    return shapes


# ---- the receiving process ------------------------------------------------------------------------------------------


def receive_channel(update_number: int, load: bool = False) -> None:
    """Take every tensor and drop it, or copy it into a parameter first."""
    with WeightReceiver(
        ChannelAddress.inherited(), "bench", update_number=update_number, timeout_s=TIMEOUT_S
    ) as receiver:
        for name, tensor in receiver.tensors():
            if load:
                PARAMETERS.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def receive_verl(update_number: int) -> None:
    """The same over verl's channel."""

    def clone(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        for _, tensor in weights:
            tensor.clone()
        weights.clear()

    path = Path(ChannelAddress.inherited().directory) / f"verl-{update_number}.sock"
    BucketedWeightReceiver(f"ipc://{path}", torch.device("cpu"), use_shm=True).receive_weights(clone)


PARAMETERS: dict[str, torch.Tensor] = {}
"""Of the receiving process."""


# ---- the sending process --------------------------------------------------------------------------------------------


class Transport:
    """All modes between this process and the receiver."""

    def __init__(self, weights: Weights, bucket_mb: int) -> None:
        self.weights, self.buffer_bytes = weights, bucket_mb * MEBIBYTE
        self.channels = ChannelDirectory()
        self.channels.address.export()
        self.receiver = Child("benchmarks.bench_weights")
        self.update_number = 0
        self.warm = {name: tensor.clone() for name, tensor in weights}

    def run(self, mode: str) -> float:
        """One update; seconds."""
        self.update_number += 1
        started = time.perf_counter()
        getattr(self, mode)()
        return time.perf_counter() - started

    def memcpy_warm(self) -> None:
        for name, tensor in self.weights:
            self.warm[name].copy_(tensor)

    def memcpy_fresh(self) -> None:
        for _, tensor in self.weights:
            tensor.clone()

    def channel(self, load: bool = False) -> None:
        options: dict[str, Any] = {
            "update_number": self.update_number,
            "buffer_bytes": self.buffer_bytes,
            "timeout_s": TIMEOUT_S,
        }
        with WeightSender(self.channels.address, "bench", check=lambda: None, **options) as sender:
            self.receiver.ask("channel", update_number=self.update_number, load=load)
            sender.send(self.weights)
        self.receiver.answer()

    def channel_load(self) -> None:
        self.channel(load=True)

    def memcpy_load(self) -> None:
        for name, tensor in self.weights:
            self.warm[name].copy_(tensor.clone())

    def verl(self) -> None:
        path = self.channels.path / f"verl-{self.update_number}.sock"
        sender = BucketedWeightSender(f"ipc://{path}", max(LARGEST_TENSOR_MIB, self.buffer_bytes // MEBIBYTE), True)
        self.receiver.ask("verl", update_number=self.update_number)
        asyncio.run(sender.async_send_weights(iter(self.weights)))
        self.receiver.answer()

    def close(self) -> None:
        """End the receiver."""
        self.receiver.kill()
        self.channels.remove()


def pss_bytes(pids: list[int]) -> int:
    """Proportional set size of all, in bytes."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def extra_mib(run: Callable[[], object], pids: list[int]) -> float:
    """Highest memory during `run` above that before it."""
    before, highest, stop = pss_bytes(pids), 0, threading.Event()

    def sample() -> None:
        nonlocal highest
        while not stop.wait(SAMPLE_S):
            highest = max(highest, pss_bytes(pids))

    thread = threading.Thread(target=sample)
    thread.start()
    run()
    stop.set()
    thread.join()
    return round((highest - before) / MEBIBYTE, 1)


MODES = ("memcpy_warm", "memcpy_fresh", "channel", "verl", "memcpy_load", "channel_load")


def measure_transport(gigabytes: float, rounds: int, bucket_mb: int) -> dict[str, Any]:
    """Seconds of each mode, interleaved."""
    transport = Transport(make_weights(gigabytes), bucket_mb)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    pids = [os.getpid(), transport.receiver.process.pid]
    try:
        for mode in MODES:
            transport.run(mode)  # page tables, code
        for _ in range(rounds):
            for mode in MODES:
                seconds[mode].append(transport.run(mode))
        extra = {mode: extra_mib(lambda mode=mode: transport.run(mode), pids) for mode in ("channel", "verl")}
    finally:
        transport.close()
    num_bytes = sum(tensor.nbytes for _, tensor in transport.weights)
    return {"bytes": num_bytes, "bucket_mb": bucket_mb, **summary(seconds, num_bytes, extra)}


def summary(seconds: dict[str, list[float]], num_bytes: int, extra: dict[str, float]) -> dict[str, Any]:
    """Per mode; `to_memcpy_fresh` compares rounds with their neighbours, since the machine's speed drifts."""
    rows: dict[str, Any] = {}
    for mode, values in seconds.items():
        rows[mode] = {
            "median_s": round(statistics.median(values), 4),
            "min_s": round(min(values), 4),
            "max_s": round(max(values), 4),
            "gb_per_s": round(num_bytes / statistics.median(values) / 1e9, 2),
            "extra_mib": extra.get(mode),
        }
        for baseline in ("memcpy", "memcpy_warm", "memcpy_fresh", "memcpy_load"):
            if baseline in seconds:
                ratios = [mine / base for mine, base in zip(values, seconds[baseline], strict=True)]
                rows[mode][f"to_{baseline}"] = round(statistics.median(ratios), 2)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bucket-mb", type=int, nargs="+", default=[SHARED_BUFFER_BYTES // MEBIBYTE])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve({"channel": receive_channel, "verl": receive_verl})
        return
    result: dict[str, Any] = {
        **circumstances(options),
        "torch_threads": torch.get_num_threads(),
        "transport": [
            measure_transport(gigabytes, options.rounds, bucket_mb)
            for gigabytes in options.gigabytes
            for bucket_mb in options.bucket_mb
        ],
    }
    print(json.dumps(result, indent=2))
    store(result, options.json)


if __name__ == "__main__":
    main()
