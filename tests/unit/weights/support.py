"""Two ends of a channel in one process, or one end in a process that can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from partial_rollout.weights.directory import SHARED_MEMORY, owned_prefix
from partial_rollout.weights.receiver import WeightReceiver
from partial_rollout.weights.sender import WeightSender

BUFFER_BYTES = 4096
LONG_S = 20.0
"""Never runs out in a test that passes."""
SHORT_S = 0.2
"""Runs out in the tests that want it to."""
NUMEL = BUFFER_BYTES
"""float32: four buckets a tensor."""


def make_weights(num_tensors: int = 4, seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"layer.{i}", torch.randn(NUMEL, generator=generator)) for i in range(num_tensors)]


def make_sender(address, **options) -> WeightSender:
    defaults = {"update_number": 1, "buffer_bytes": BUFFER_BYTES, "timeout_s": LONG_S, "check": lambda: None}
    return WeightSender(address, "test", **(defaults | options))


def make_receiver(address, **options) -> WeightReceiver:
    return WeightReceiver(address, "test", **({"update_number": 1, "timeout_s": LONG_S} | options))


def receive_all(address, **options):
    with make_receiver(address, **options) as receiver:
        return list(receiver.tensors())


def send_all(address, weights, **options):
    with make_sender(address, **options) as sender:
        return sender.send(weights)


def exchange(address, weights, *, sender=None, receiver=None):
    """Run both ends; return what each returned or raised."""
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(send_all, address, weights, **(sender or {}))
        received = pool.submit(receive_all, address, **(receiver or {}))
        return outcome(sent), outcome(received)


def outcome(future):
    return future.exception() or future.result()


def segments(maker: int | None = None) -> list[str]:
    """Names of the segments of process `maker`, by default this one: others of this machine have some too."""
    return sorted(path.name for path in SHARED_MEMORY.glob(f"{owned_prefix()}{maker or os.getpid()}-*"))


class Peer:
    """A Python process that runs `body`, with `address` and everything of this module; killed at the end."""

    def __init__(self, address, body: str) -> None:
        code = (
            "from partial_rollout.weights.directory import ChannelAddress\n"
            "from tests.unit.weights.support import *\n"
            f"address = ChannelAddress({address.directory!r}, bytes.fromhex({address.secret.hex()!r}))\n"
            "def say(word): print(word, flush=True)\n"
            "def stall(): sys.stdin.read()\n" + body
        )
        root = Path(__file__).resolve().parents[3]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_) -> None:
        self.kill()

    def wait_for(self, word: str) -> None:
        assert self.process.stdout.readline().strip() == word

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
