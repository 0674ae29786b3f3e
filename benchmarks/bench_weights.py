"""The weight channel from one process to another: whether it is right, and how fast, beside verl's channel.

    python -m benchmarks.bench_weights --gigabytes 1 8 --bucket-mb 64 256 1024 --json OUT      # on a GPU, by CUDA IPC
    python -m benchmarks.bench_weights --gigabytes 0.5 1 --json OUT                            # on a CPU, shared memory
    python -m benchmarks.bench_weights --dry-run                                               # the same in seconds

Steps (`--steps`): `equal`: every tensor of both orders is what was sent, all of them kept, one larger than a bucket,
the receiver numbering the GPU by its UUID; `speed`: interleaved repeats of

- `copy_flat`: all bytes in one copy on the device: the reference;
- `channel`: ours, to a receiver that drops every tensor; `channel_load`: to one that copies it into a parameter;
- `verl`: verl's own channel, tensors cloned on receipt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender

from partial_rollout.advise.result import about_run, store
from partial_rollout.advise.shapes import SHAPES, Shape
from partial_rollout.weights.directory import ChannelAddress, ChannelDirectory
from partial_rollout.weights.receiver import WeightReceiver
from partial_rollout.weights.sender import WeightSender
from partial_rollout.weights.transport import CUDA_BUFFER_BYTES, NUM_BUFFERS, Transports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODES = ("copy_flat", "channel", "channel_load", "verl")
LARGE_FROM_GB = 4.0
"""From here on tensors have the sizes of Qwen3-4B's, below those of Qwen3-0.6B's."""
DRY = Shape(hidden=64, intermediate=192, layers=2, heads=4, kv_heads=2, vocabulary=10_000)
DRY_GIGABYTES = 0.01
MEBIBYTE = 1 << 20
TIMEOUT_S, ANSWER_S = 60.0, 300.0
"""Limits: of an end of the channel; of the second process, which imports vLLM first, maybe on a busy machine."""
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
Weights = list[tuple[str, torch.Tensor]]


def qwen_shapes(gigabytes: float) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the embedding and of as many layers as make `gigabytes` of bf16 with it."""
    model = DRY if gigabytes <= DRY_GIGABYTES else SHAPES["4b" if gigabytes >= LARGE_FROM_GB else "qwen3-0.6b"]
    hidden, intermediate = model.hidden, model.intermediate
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed_tokens", (model.vocabulary, hidden))]
    layer = [("qkv", (2 * hidden, 2 * hidden)), ("o", (hidden, 2 * hidden)), ("norm", (hidden,))]
    layer += [("gate", (intermediate, hidden)), ("up", (intermediate, hidden)), ("down", (hidden, intermediate))]
    total, wanted = model.vocabulary * hidden * 2, gigabytes * 1e9
    while total < wanted:
        shapes += [(f"layers.{len(shapes)}.{name}", shape) for name, shape in layer]
        total += sum(2 * torch.Size(shape).numel() for _, shape in layer)
    return shapes


def make_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes that depend on the name only, so that both ends can make them."""
    generator = torch.Generator(DEVICE).manual_seed(zlib.crc32(name.encode()))
    num_bytes = 2 * torch.Size(shape).numel()
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=DEVICE, generator=generator)
    return data.view(torch.bfloat16).view(shape)


def make_weights(gigabytes: float) -> Weights:
    """All tensors of a model."""
    return [(name, make_tensor(name, shape)) for name, shape in qwen_shapes(gigabytes)]


def wait_for_device() -> None:
    """Return when the GPU has done what this process asked for."""
    if HAS_GPU:
        torch.cuda.synchronize()


def sender(address: ChannelAddress, update_number: int, bucket_mb: int | None) -> WeightSender:
    """Ours, for one update."""
    buffer_bytes = None if bucket_mb is None else bucket_mb * MEBIBYTE
    options: dict[str, Any] = {"timeout_s": TIMEOUT_S, "buffer_bytes": buffer_bytes, "check": lambda: None}
    return WeightSender(address, "bench", update_number=update_number, device=DEVICE, **options)


def receiver(update_number: int) -> WeightReceiver:
    """Ours, for one update."""
    return WeightReceiver(
        ChannelAddress.inherited(), "bench", update_number=update_number, timeout_s=TIMEOUT_S, device=DEVICE
    )


def verl_socket(address: ChannelAddress, update_number: int) -> str:
    """Where verl's two ends meet."""
    return f"ipc://{Path(address.directory) / f'verl-{update_number}.sock'}"


PARAMETERS: dict[str, torch.Tensor] = {}


def load(name: str, tensor: torch.Tensor) -> None:
    """Copy into a parameter of this process."""
    if name not in PARAMETERS:
        PARAMETERS[name] = torch.empty_like(tensor)
    PARAMETERS[name].copy_(tensor)


def take_channel(update_number: int, loads: bool) -> None:
    """One update over our channel."""
    with receiver(update_number) as channel:
        for name, tensor in channel.tensors():
            if loads:
                load(name, tensor)
    wait_for_device()


def take_verl(update_number: int) -> None:
    """One update over verl's channel."""

    def take(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        for _, tensor in weights:
            tensor.clone()
        weights.clear()

    address = verl_socket(ChannelAddress.inherited(), update_number)
    BucketedWeightReceiver(address, DEVICE, use_shm=not HAS_GPU).receive_weights(take)


def compare(update_number: int) -> dict[str, Any]:
    """Keep every tensor of an update, then compare all with what they should be."""
    with receiver(update_number) as channel:
        kept = list(channel.tensors())
    different = [name for name, tensor in kept if not same(tensor, make_tensor(name, tuple(tensor.shape)))]
    return {"names": [name for name, _ in kept], "different": different}


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether all bytes are equal."""
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@contextmanager
def second_process() -> Iterator[ProcessPoolExecutor]:
    """The process that receives; it has imported what it needs."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            pool.submit(os.getpid).result(ANSWER_S)
            yield pool
        except BaseException:
            for child in multiprocessing.active_children():  # it may wait for ever for this end of a channel
                child.kill()
            raise


class Bench:
    """This process, its private folder and the number of the update."""

    def __init__(self, bucket_mb: int | None, channels: ChannelDirectory) -> None:
        self.bucket_mb = bucket_mb
        self.buffer_bytes = CUDA_BUFFER_BYTES if bucket_mb is None else bucket_mb * MEBIBYTE
        self.channels = channels
        self.update_number = 0

    def send(self, weights: Weights) -> float:
        """Our channel; seconds from the receiver's hello to its confirmation."""
        with sender(self.channels.address, self.update_number, self.bucket_mb) as channel:
            return channel.send(weights).seconds

    def send_verl(self, weights: Weights) -> None:
        """verl's channel, with a bucket of the size of all our buffers; on a CPU one for the largest tensor."""
        largest_mb = -(-max(tensor.nbytes for _, tensor in weights) // MEBIBYTE)
        bucket_mb = NUM_BUFFERS * self.buffer_bytes // MEBIBYTE if HAS_GPU else largest_mb
        channel = BucketedWeightSender(verl_socket(self.channels.address, self.update_number), bucket_mb, not HAS_GPU)
        asyncio.run(channel.async_send_weights(iter(weights)))


def check_equality(bench: Bench, gigabytes: float) -> dict[str, Any]:
    """File order and shuffled order, to a process that names the GPU in its own way."""
    if HAS_GPU:  # of processes from here on; this one has counted its GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-" + Transports().identify(DEVICE).removeprefix("GPU-")
    weights = make_weights(gigabytes)
    shuffled = [weights[i] for i in torch.randperm(len(weights), generator=torch.Generator().manual_seed(0)).tolist()]
    rows = {}
    with second_process() as child:
        for order, tensors in (("file", weights), ("shuffled", shuffled)):
            bench.update_number += 1
            compared = child.submit(compare, bench.update_number)
            bench.send(tensors)
            answer = compared.result(ANSWER_S)
            in_order = answer["names"] == [name for name, _ in tensors]
            rows[order] = {"tensors": len(answer["names"]), "in_order": in_order, "different": answer["different"]}
    return {"largest_bytes": max(tensor.nbytes for _, tensor in weights), **rows}


class Speed:
    """All modes of one model's size, between this process and its child."""

    def __init__(self, bench: Bench, gigabytes: float, child: ProcessPoolExecutor) -> None:
        self.bench, self.weights, self.child = bench, make_weights(gigabytes), child
        self.num_bytes = sum(tensor.nbytes for _, tensor in self.weights)
        self.flat = torch.ones(2, self.num_bytes, dtype=torch.uint8, device=DEVICE)
        self.stream_s: list[float] = []

    def run(self, mode: str) -> float:
        """One repeat; seconds until the last byte has arrived."""
        self.bench.update_number += 1
        wait_for_device()
        started = time.perf_counter()
        if mode == "copy_flat":
            self.flat[1].copy_(self.flat[0])
        elif mode == "verl":
            taken = self.child.submit(take_verl, self.bench.update_number)
            self.bench.send_verl(self.weights)
            taken.result(ANSWER_S)
        else:
            taken = self.child.submit(take_channel, self.bench.update_number, mode == "channel_load")
            self.stream_s.append(self.bench.send(self.weights))
            taken.result(ANSWER_S)
        wait_for_device()
        return time.perf_counter() - started


def measure_speed(bench: Bench, gigabytes: float, repeats: int) -> dict[str, Any]:
    """Seconds of each mode, interleaved."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with second_process() as child:
        speed = Speed(bench, gigabytes, child)
        for _ in range(2):
            for mode in MODES:
                speed.run(mode)  # page tables, code, the allocator
        speed.stream_s.clear()
        for _ in range(repeats):
            for mode in MODES:
                seconds[mode].append(speed.run(mode))
        stream_s = statistics.median(speed.stream_s)
    rows = {mode: row(values, seconds["copy_flat"], speed.num_bytes) for mode, values in seconds.items()}
    head = {"bytes": speed.num_bytes, "tensors": len(speed.weights), "bucket_mb": bench.bucket_mb}
    return {**head, "channel_stream_s": round(stream_s, 6), **rows}


def row(values: list[float], reference: list[float], num_bytes: int) -> dict[str, float]:
    """Median, quartiles, and the bandwidth in parts of the neighbouring reference's."""
    low, median, high = statistics.quantiles(values, n=4)
    parts = [base / mine for mine, base in zip(values, reference, strict=True)]
    seconds = {"median_s": median, "quartile_1_s": low, "quartile_3_s": high, "min_s": min(values)}
    rates = {"gb_per_s": float(f"{num_bytes / median / 1e9:.3g}"), "of_copy_flat": round(statistics.median(parts), 3)}
    return {name: round(value, 6) for name, value in seconds.items()} | rates


def run_steps(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield what each step that was asked for has found."""
    sizes = [DRY_GIGABYTES] if options.dry_run else options.gigabytes
    buckets = [1, 2] if options.dry_run else options.bucket_mb or [None]
    channels = ChannelDirectory()
    channels.address.export()
    benches = [Bench(bucket_mb, channels) for bucket_mb in buckets]
    steps: dict[str, Callable[[], Any]] = {
        "equal": lambda: check_equality(benches[0], sizes[0]),
        "speed": lambda: [measure_speed(bench, size, options.repeats) for size in sizes for bench in benches],
    }
    for name in options.steps:
        yield name, steps[name]()
    channels.remove()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0, 8.0] if HAS_GPU else [0.5, 1.0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bucket-mb", type=int, nargs="+", help="buffers of these sizes; default: the transport's own")
    parser.add_argument("--steps", nargs="+", choices=("equal", "speed"), default=("equal", "speed"))
    parser.add_argument("--dry-run", action="store_true", help="small: seconds, also on a CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = about_run(options)
    result["transport"] = "cuda_ipc" if Transports().cuda else "shared_memory"
    for name, found in run_steps(options):
        result[name] = found
        print(json.dumps({name: found}, indent=2), flush=True)
        store(result, options.json)


if __name__ == "__main__":
    main()
