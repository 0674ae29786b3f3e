"""The weight channel on one GPU: is it right, how fast, and what is left behind when an end is killed.

    python -m benchmarks.gpu.weights --json $OUT/weights.json
    python -m benchmarks.gpu.weights --dry-run          # the same steps on a CPU, in seconds

Steps (`--steps`): `equal`: every tensor of both orders is what was sent, all of them kept, one larger than a bucket,
the receiver numbering the GPU by its UUID; `speed`: interleaved rounds of

- `copy_flat`: all bytes in one copy on the device: the reference;
- `copy_tensors`: each tensor into one that exists;
- `channel`: ours, to a receiver that drops every tensor; `channel_load`: to one that copies it into a parameter;
- `verl`: verl's CUDA IPC channel, tensors cloned on receipt; `verl_load`: copied into a parameter instead;

`faults`: SIGKILL of either end in mid-stream, and memory after it; `handles`: what is no handle of ours.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from benchmarks.child import Child
from benchmarks.gpu.weights_process import (
    DEVICE,
    DRY_GIGABYTES,
    HAS_GPU,
    MEBIBYTE,
    Weights,
    make_weights,
    receiver,
    sender,
    verl_socket,
    wait_for_device,
)
from benchmarks.result import about_run, store
from partial_rollout.errors import WeightUpdateError
from partial_rollout.weights.cuda_buffers import HANDLE_BYTES, CudaRuntime
from partial_rollout.weights.directory import ChannelDirectory
from partial_rollout.weights.transport import CUDA_BUFFER_BYTES, NUM_BUFFERS, Transports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODULE = "benchmarks.gpu.weights_process"
FREED_WITHIN_S = 15.0
"""A killed process's memory comes back this soon."""
SAMPLE_S = 0.001
KILLED_AFTER_BUFFERS = 1.5
"""The first tensor is there, and the sender still has a buffer to write to."""
MODES = ("copy_flat", "copy_tensors", "channel", "channel_load", "verl", "verl_load")


def used_bytes() -> int:
    """Of the GPU's memory, by all processes."""
    free, total = torch.cuda.mem_get_info() if HAS_GPU else (0, 0)
    return total - free


class Bench:
    """This process, its private folder and the number of the round."""

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
    environment = dict(os.environ)
    if HAS_GPU:
        environment["CUDA_VISIBLE_DEVICES"] = "GPU-" + Transports().identify(DEVICE).removeprefix("GPU-")
    weights = make_weights(gigabytes)
    shuffled = [weights[i] for i in torch.randperm(len(weights), generator=torch.Generator().manual_seed(0)).tolist()]
    rows = {}
    with Child(MODULE, environment) as child:
        for order, tensors in (("file", weights), ("shuffled", shuffled)):
            bench.update_number += 1
            child.ask("compare", update_number=bench.update_number)
            bench.send(tensors)
            answer = child.answer()
            in_order = answer["names"] == [name for name, _ in tensors]
            rows[order] = {"tensors": len(answer["names"]), "in_order": in_order, "different": answer["different"]}
    return {"largest_bytes": max(tensor.nbytes for _, tensor in weights), **rows}


class Speed:
    """All modes of one model's size, between this process and its child."""

    def __init__(self, bench: Bench, gigabytes: float) -> None:
        self.bench, self.weights = bench, make_weights(gigabytes)
        self.num_bytes = sum(tensor.nbytes for _, tensor in self.weights)
        self.flat = torch.ones(2, self.num_bytes, dtype=torch.uint8, device=DEVICE)
        self.copies = [(tensor, torch.empty_like(tensor)) for _, tensor in self.weights]
        self.child = Child(MODULE)
        self.stream_s: list[float] = []

    def run(self, mode: str) -> float:
        """One round; seconds until the last byte has arrived."""
        self.bench.update_number += 1
        wait_for_device()
        started = time.perf_counter()
        if mode.startswith("copy"):
            getattr(self, mode)()
        else:
            transport, _, loads = mode.partition("_")
            self.child.ask(f"take_{transport}", update_number=self.bench.update_number, loads=bool(loads))
            getattr(self, transport)()
            self.child.answer()
        wait_for_device()
        return time.perf_counter() - started

    def copy_flat(self) -> None:
        self.flat[1].copy_(self.flat[0])

    def copy_tensors(self) -> None:
        for tensor, copy in self.copies:
            copy.copy_(tensor)

    def channel(self) -> None:
        self.stream_s.append(self.bench.send(self.weights))

    def verl(self) -> None:
        self.bench.send_verl(self.weights)

    def extra_mib(self, mode: str) -> float:
        """Highest memory of the GPU during a round, above that before it."""
        gc.collect()
        before, highest, stop = used_bytes(), 0, threading.Event()

        def sample() -> None:
            nonlocal highest
            while not stop.wait(SAMPLE_S):
                highest = max(highest, used_bytes())

        thread = threading.Thread(target=sample)
        thread.start()
        for _ in range(3):
            self.run(mode)
        stop.set()
        thread.join()
        return round((highest - before) / MEBIBYTE, 1)


def measure_speed(bench: Bench, gigabytes: float, rounds: int) -> dict[str, Any]:
    """Seconds of each mode, interleaved."""
    speed = Speed(bench, gigabytes)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with speed.child:
        for _ in range(2):
            for mode in MODES:
                speed.run(mode)  # page tables, code, the allocator
        speed.stream_s.clear()
        for _ in range(rounds):
            for mode in MODES:
                seconds[mode].append(speed.run(mode))
        stream_s = statistics.median(speed.stream_s)
        extra = {mode: speed.extra_mib(mode) for mode in ("channel", "verl")}
    rows = {mode: row(values, seconds["copy_flat"], speed.num_bytes) for mode, values in seconds.items()}
    head = {"bytes": speed.num_bytes, "tensors": len(speed.weights), "bucket_mb": bench.bucket_mb}
    return {**head, "channel_stream_s": round(stream_s, 6), "extra_mib": extra, **rows}


def row(values: list[float], reference: list[float], num_bytes: int) -> dict[str, float]:
    """Median, quartiles, and the bandwidth in parts of the neighbouring reference's."""
    low, median, high = statistics.quantiles(values, n=4)
    parts = [base / mine for mine, base in zip(values, reference, strict=True)]
    seconds = {"median_s": median, "quartile_1_s": low, "quartile_3_s": high, "min_s": min(values)}
    rates = {"gb_per_s": round(num_bytes / median / 1e9, 1), "of_copy_flat": round(statistics.median(parts), 3)}
    return {name: round(value, 6) for name, value in seconds.items()} | rates


def check_faults(bench: Bench, gigabytes: float) -> dict[str, Any]:
    """Kill each end in mid-stream."""
    return {"receiver killed": kill_receiver(bench, gigabytes), "sender killed": kill_sender(bench, gigabytes)}


def kill_receiver(bench: Bench, gigabytes: float) -> dict[str, Any]:
    """Our sender's error, and how much memory is missing then."""
    weights = make_weights(gigabytes)
    # The first tensor, and what comes after it until its last bucket is full.
    killed_after = weights[0][1].nbytes + KILLED_AFTER_BUFFERS * bench.buffer_bytes
    before, child = used_bytes(), Child(MODULE)
    bench.update_number += 1
    child.ask("receive_and_stall", update_number=bench.update_number)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        sent, is_alive = 0, True
        for name, tensor in weights + [(f"again.{n}", t) for n, t in weights]:
            if is_alive and sent > killed_after:
                child.answer()
                child.kill()
                is_alive = False
            yield name, tensor
            sent += tensor.nbytes

    started = time.perf_counter()
    with child:
        error = failure(lambda: bench.send(stream()))  # pyright: ignore[reportArgumentType]
    return {"error": error, "seconds": round(time.perf_counter() - started, 2), "missing_mib": missing_mib(before)}


def kill_sender(bench: Bench, gigabytes: float) -> dict[str, Any]:
    """Our receiver's error, and how much memory is missing then."""
    before, child = used_bytes(), Child(MODULE)
    bench.update_number += 1
    child.ask("send_and_stall", update_number=bench.update_number, gigabytes=gigabytes, bucket_mb=bench.bucket_mb)

    def receive() -> None:
        with receiver(bench.update_number) as channel:
            for number, _ in enumerate(channel.tensors()):
                if number == 0:
                    child.kill()

    started = time.perf_counter()
    with child:
        error = failure(receive)
    return {"error": error, "seconds": round(time.perf_counter() - started, 2), "missing_mib": missing_mib(before)}


def failure(call: Callable[[], object]) -> str:
    """What it raises, in words."""
    try:
        call()
    except WeightUpdateError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def missing_mib(before: int) -> float:
    """Memory of the GPU that has not come back."""
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()
    deadline = time.monotonic() + FREED_WITHIN_S
    while used_bytes() > before and time.monotonic() < deadline:
        time.sleep(SAMPLE_S)
    return round((used_bytes() - before) / MEBIBYTE, 1)


def check_handles() -> dict[str, str]:
    """What is no handle, a GPU that is another, and whether the GPU is usable afterwards."""
    if not HAS_GPU:
        return {}
    cuda, transports = CudaRuntime(), Transports()
    rows = {
        "zeros": failure(lambda: cuda.open(DEVICE, bytes(HANDLE_BYTES))),
        "noise": failure(lambda: cuda.open(DEVICE, bytes(range(HANDLE_BYTES)))),
        "short": failure(lambda: cuda.open(DEVICE, b"x")),
        "other GPU": failure(lambda: transports.writer(DEVICE, "00000000-other", None)),
        "too large": failure(lambda: cuda.allocate(DEVICE, 1 << 42)),
    }
    return {**rows, "afterwards": str(torch.ones(3, device=DEVICE).sum().item())}


def run_steps(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield what each step that was asked for has found."""
    sizes = [DRY_GIGABYTES] if options.dry_run else options.gigabytes
    buckets = [1, 2] if options.dry_run else options.bucket_mb or [None]
    channels = ChannelDirectory()
    channels.address.export()
    benches = [Bench(bucket_mb, channels) for bucket_mb in buckets]
    steps: dict[str, Callable[[], Any]] = {
        "equal": lambda: check_equality(benches[0], sizes[0]),
        "speed": lambda: [measure_speed(bench, size, options.rounds) for size in sizes for bench in benches],
        "faults": lambda: check_faults(benches[0], sizes[0]),
        "handles": check_handles,
    }
    for name in options.steps:
        yield name, steps[name]()
    channels.remove()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bucket-mb", type=int, nargs="+", help="buffers of these sizes; default: the transport's own")
    steps = ("equal", "speed", "faults", "handles")
    parser.add_argument("--steps", nargs="+", choices=steps, default=steps)
    parser.add_argument("--dry-run", action="store_true", help="small; needs no GPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not HAS_GPU and not options.dry_run:
        parser.error("there is no GPU here: --dry-run runs the same steps on a CPU")
    result: dict[str, Any] = about_run(options)
    result["transport"] = "cuda_ipc" if Transports().cuda else "shared_memory"
    for name, found in run_steps(options):
        result[name] = found
        print(json.dumps({name: found}, indent=2), flush=True)
        store(result, options.json)


if __name__ == "__main__":
    main()
