"""Weights from one node to another: the channel over TCP beside a plain copy of the same bytes over the same link.

    python -m scripts.two_nodes --shared FOLDER -- python -m scripts.link_rate --json FOLDER/link.json

Runs on the first of two nodes of a Ray cluster. Interleaved repeats of

- `copy`: one socket, `sendall` on one node and `recv_into` on the other: the reference;
- `channel`: ours, to a receiver that drops every tensor; `encrypted`: the same with `weights.encrypt`.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from partial_rollout.advise.result import about_run, store
from partial_rollout.weights.directory import SECRET_BYTES, ChannelAddress
from partial_rollout.weights.receiver import WeightReceiver
from partial_rollout.weights.sender import WeightSender
from partial_rollout.weights.transport import SHARED_BUFFER_BYTES

MODES = ("copy", "channel", "encrypted")
TENSOR_BYTES = 6 << 20
"""A matrix of Qwen3-0.6B: 1,024 x 3,072 numbers of 2 bytes."""
TIMEOUT_S = 120.0
ADDRESS = ChannelAddress("", bytes(SECRET_BYTES))


class Receiver:
    """The end on the other node."""

    def copy(self, host: str, port: int, num_bytes: int) -> None:
        """Receive `num_bytes` from a socket into one buffer, again and again."""
        place, left = memoryview(bytearray(SHARED_BUFFER_BYTES)), num_bytes
        with socket.create_connection((host, port), timeout=TIMEOUT_S) as link:
            while left:
                received = link.recv_into(place)
                if not received:
                    raise ConnectionError(f"the sender ended {left:,} of {num_bytes:,} bytes too early")
                left -= received
            link.sendall(b"!")

    def channel(self, endpoint: str, update_number: int) -> int:
        """Receive one update and drop it; returns its tensors."""
        options = {"update_number": update_number, "timeout_s": TIMEOUT_S, "endpoint": endpoint}
        with WeightReceiver(ADDRESS, "link", **options) as receiver:
            return sum(1 for _ in receiver.tensors())


class Bench:
    """The end on this node."""

    def __init__(self, receiver: Any, host: str, gigabytes: float) -> None:
        self._receiver, self._host, self._update_number = receiver, host, 0
        num_tensors = max(1, round(gigabytes * 1e9 / TENSOR_BYTES))
        self._weights = [(f"layer.{i}", torch.ones(TENSOR_BYTES, dtype=torch.uint8)) for i in range(num_tensors)]
        self.num_bytes = num_tensors * TENSOR_BYTES

    def run(self, mode: str) -> float:
        """Seconds of one repeat, from the other end's arrival to its confirmation."""
        return self._copy() if mode == "copy" else self._send(encrypt=mode == "encrypted")

    def _copy(self) -> float:
        with socket.create_server((self._host, 0)) as server:
            server.settimeout(TIMEOUT_S)
            received = self._receiver.copy.remote(self._host, server.getsockname()[1], self.num_bytes)
            link, _ = server.accept()
            with link:
                link.settimeout(TIMEOUT_S)
                started_s = time.monotonic()
                for _, tensor in self._weights:
                    link.sendall(tensor.numpy().data)
                if not link.recv(1):
                    raise ConnectionError("the receiver ended before it had all bytes")
                seconds = time.monotonic() - started_s
            ray.get(received, timeout=TIMEOUT_S)
        return seconds

    def _send(self, *, encrypt: bool) -> float:
        self._update_number += 1
        number = self._update_number
        options = {"update_number": number, "timeout_s": TIMEOUT_S, "check": lambda: None, "encrypt": encrypt}
        with WeightSender(ADDRESS, "link", endpoint=f"tcp://{self._host}:*", **options) as sender:
            received = self._receiver.channel.remote(sender.endpoint, number)
            seconds = sender.send(iter(self._weights)).seconds
        if ray.get(received, timeout=TIMEOUT_S) != len(self._weights):
            raise RuntimeError("not all tensors arrived")
        return seconds


def summarize(seconds: dict[str, list[float]], num_bytes: int) -> dict[str, Any]:
    """By mode: median seconds, rate, and the rate as a share of the copy's in the same repeat."""
    found = {}
    for mode, values in seconds.items():
        of_copy = statistics.median(copy_s / each for copy_s, each in zip(seconds["copy"], values, strict=True))
        median_s = statistics.median(values)
        found[mode] = {
            "median_s": round(median_s, 4),
            "min_s": round(min(values), 4),
            "gb_per_s": round(num_bytes / median_s / 1e9, 2),
            "of_copy": round(of_copy, 2),
        }
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ray.init(log_to_driver=False)
    here = ray.get_runtime_context().get_node_id()
    other = next(node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
    strategy = NodeAffinitySchedulingStrategy(other["NodeID"], soft=False)
    receiver = ray.remote(Receiver).options(num_cpus=1, scheduling_strategy=strategy).remote()
    bench = Bench(receiver, ray.util.get_node_ip_address(), options.gigabytes)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for repeat in range(options.repeats + 1):
        for mode in MODES:
            took_s = bench.run(mode)
            if repeat:  # the first one imports and warms up
                seconds[mode].append(took_s)
    result = {**about_run(options), "num_bytes": bench.num_bytes, "link": summarize(seconds, bench.num_bytes)}
    print(json.dumps(result["link"], indent=2), flush=True)
    store(result, options.json)


if __name__ == "__main__":
    main()
