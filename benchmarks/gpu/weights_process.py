"""Both ends of the weight channels of `weights`; run as a module it is its second process."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

from benchmarks.bench_weights import qwen_shapes
from benchmarks.child import say, serve, wait_for_the_end
from partial_rollout.weights.directory import ChannelAddress
from partial_rollout.weights.receiver import WeightReceiver
from partial_rollout.weights.sender import WeightSender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SMALL = {"hidden": 1024, "intermediate": 3072, "vocabulary": 151_936}
"""Qwen3-0.6B's."""
LARGE = {"hidden": 2560, "intermediate": 9728, "vocabulary": 151_936}
"""Qwen3-4B's."""
LARGE_FROM_GB = 4.0
DRY = {"hidden": 64, "intermediate": 192, "vocabulary": 10_000}
DRY_GIGABYTES = 0.01
MEBIBYTE = 1 << 20
TIMEOUT_S = 60.0
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
Weights = list[tuple[str, torch.Tensor]]


def sizes_of(gigabytes: float) -> dict[str, int]:
    """Dimensions of the model that has about this size."""
    if gigabytes <= DRY_GIGABYTES:
        return DRY
    return LARGE if gigabytes >= LARGE_FROM_GB else SMALL


def make_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes that depend on the name only, so that both ends can make them."""
    generator = torch.Generator(DEVICE).manual_seed(zlib.crc32(name.encode()))
    num_bytes = 2 * torch.Size(shape).numel()
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=DEVICE, generator=generator)
    return data.view(torch.bfloat16).view(shape)


def make_weights(gigabytes: float) -> Weights:
    """All tensors of a model."""
    return [(name, make_tensor(name, shape)) for name, shape in qwen_shapes(gigabytes, **sizes_of(gigabytes))]


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


def take_verl(update_number: int, loads: bool) -> None:
    """One update over verl's channel."""

    def take(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        for name, tensor in weights:
            if loads:
                load(name, tensor)
            else:
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


def receive_and_stall(update_number: int) -> None:
    """Hold the first tensor until killed."""
    with receiver(update_number) as channel:
        for _ in channel.tensors():
            say("streaming")
            wait_for_the_end()


def send_and_stall(update_number: int, gigabytes: float, bucket_mb: int | None) -> None:
    """Send all tensors but one, then nothing until killed."""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from make_weights(gigabytes)[:-1]
        wait_for_the_end()

    with sender(ChannelAddress.inherited(), update_number, bucket_mb) as channel:
        channel.send(weights())


ACTIONS: dict[str, Callable[..., Any]] = {
    action.__name__: action for action in (take_channel, take_verl, compare, receive_and_stall, send_and_stall)
}

if __name__ == "__main__":
    serve(ACTIONS)
