"""Two ends of a channel in one process, or one end in a process that can be killed."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from partial_rollout.weights.directory import SHARED_MEMORY, ChannelAddress, owned_prefix
from partial_rollout.weights.receiver import WeightReceiver
from partial_rollout.weights.sender import WeightSender

BUFFER_BYTES = 4096
LONG_S = 120.0
"""Never runs out in a test that passes: the process at the other end imports torch meanwhile."""
SHORT_S = 0.2
"""Runs out in the tests that want it to."""
NUMEL = BUFFER_BYTES
"""float32: four buckets a tensor."""

TCP_PORT = 20_000


@dataclass(frozen=True)
class TcpAddress(ChannelAddress):
    """The two ends meet at a loopback address of this test's own, which stands in the place of the folder."""

    def endpoint(self, channel: str, update_number: int) -> str:
        return f"tcp://{self.directory}:{TCP_PORT + update_number}"


def over(transport: str, channels):
    """The channels, met over TCP if so asked."""
    if transport == "ipc":
        return channels
    host = ".".join(["127", *(str(random.randint(1, 254)) for _ in range(3))])
    return SimpleNamespace(address=TcpAddress(host, channels.address.secret), path=channels.path)


def address_of(directory: str, secret: str) -> ChannelAddress:
    """In another process."""
    kind = TcpAddress if directory.startswith("127.") else ChannelAddress
    return kind(directory, bytes.fromhex(secret))


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
            "from tests.unit.weights.support import *\n"
            f"address = address_of({address.directory!r}, {address.secret.hex()!r})\n"
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


class Answer:
    """Ray's reference, awaited or as a future."""

    def __init__(self, answer: Future) -> None:
        self._answer = answer

    def future(self) -> Future:
        return self._answer

    def __await__(self):
        return asyncio.wrap_future(self._answer).__await__()


class Method:
    """A remote method whose answer the test gives."""

    def __init__(self) -> None:
        self.calls: list[dict] = []
        self.answer: Future = Future()

    def remote(self, **kwargs):
        self.calls.append(kwargs)
        return Answer(self.answer)
