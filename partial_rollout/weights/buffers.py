"""What a transport is to the two ends: slots that one writes and the other reads where they are.

A slot's life, charged by the sender's state machine and freed by the receiver:

    sender: write, write, flush ──Bucket──→ receiver: lease, hand tensors on ... last reference dropped ──Free──→ sender
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from partial_rollout.weights.protocol.wire import Slots


class SlotWriter(Protocol):
    """The sender's end."""

    @property
    def offer(self) -> Slots:
        """What the receiver is told."""
        ...

    def attached(self, handles: tuple[bytes, ...]) -> None:
        """The receiver has the slots; `handles` are those of slots that it made."""

    def write(self, slot: int, offset: int, data: torch.Tensor) -> None:
        """Begin to copy bytes (uint8, 1-d) into a slot."""

    def flush(self) -> None:
        """Return when everything written can be read."""

    def close(self) -> None:
        """Take away what is left of it; may be repeated."""


class SlotReader(Protocol):
    """The receiver's end."""

    slot_bytes: int
    num_slots: int
    device: torch.device
    handles: tuple[bytes, ...]
    leases: Leases

    def lease(self, slot: int) -> torch.Tensor:
        """A slot's bytes (uint8, 1-d); it is held for as long as any tensor on that memory lives."""
        ...

    def settle(self) -> None:
        """Return when everything begun on slots that nobody holds any more has ended."""

    def close(self) -> None:
        """Let go of the memory, which stays for as long as somebody holds it."""

    def abandon(self) -> None:
        """After a failure, when the sender may still write: let go of what it could not damage."""


class Leases:
    """Which slots something still refers to: a tensor of a slot, or any view that a model made of it."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}

    def begin(self, slot: int, memory: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Hold `slot` until `memory`, which torch keeps as long as a tensor on it, is collected; return `tensor`."""
        self._held[slot] = tensor.untyped_storage().data_ptr()
        weakref.finalize(memory, self._held.pop, slot, None).atexit = False
        return tensor

    def is_held(self, slot: int) -> bool:
        """Whether its bytes may still be read."""
        return slot in self._held

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in a slot that is held."""
        return tensor.untyped_storage().data_ptr() in self._held.values()

    @property
    def num_held(self) -> int:
        """Slots whose bytes may still be read."""
        return len(self._held)
