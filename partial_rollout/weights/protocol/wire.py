"""The weight channel's messages; `weight_stream.py` says who may send which when.

One connection carries one update ("round"), from one training rank to one engine worker:

    receiver                                  sender
    Hello   protocol, round, nonce, device →
                                       ←      Attach   protocol, round, nonce, proof, slots
    Attached   proof, handles          →                shared memory loses its name here
                                       ←      Bucket   index, slot, fragments      at most one per free slot
    Free    index                      →                nothing refers to the slot's bytes: it may be written again
                                       ←      Done     number of tensors and bytes
    Done    the same numbers           →                the sender may let go of the slots
                                       ↔      Error    at any time; ends the round on both ends

Each proof is an HMAC over both nonces with the run's secret, so neither end accepts bytes from, or hands memory to,
somebody who does not know it. Messages are MessagePack of the structs below, never pickles.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from partial_rollout.errors import (
    DeviceMemoryFull,
    SharedMemoryFull,
    WeightMismatch,
    WeightPeerLost,
    WeightProtocolError,
    WeightUpdateError,
)
from partial_rollout.weights.protocol.buckets import Fragment  # noqa: TC001 - msgspec reads the annotation at run time

PROTOCOL = 2
"""Goes up with every change of a message; both ends must be equal."""
NONCE_BYTES = 16


class SharedSlots(msgspec.Struct, frozen=True, tag="shared_memory"):
    """Slots one after the other in a POSIX shared memory segment, which the sender makes."""

    name: str
    slot_bytes: int
    num_slots: int


class CudaSlots(msgspec.Struct, frozen=True, tag="cuda_ipc"):
    """Slots of their own on one GPU, which the receiver makes and keeps for as long as its model refers to them."""

    device: str
    slot_bytes: int
    num_slots: int


Slots: TypeAlias = SharedSlots | CudaSlots


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The receiver opens the connection; `device` is the UUID of the GPU it can make slots on, or empty."""

    protocol: int
    round: int
    nonce: bytes
    device: str = ""


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The sender proves itself and says where the slots are."""

    protocol: int
    round: int
    nonce: bytes
    proof: bytes
    slots: Slots


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The receiver proves itself; it has opened the slots, or made them and says how to: a CUDA IPC handle a slot."""

    proof: bytes
    handles: tuple[bytes, ...] = ()


class Bucket(msgspec.Struct, frozen=True, tag="bucket"):
    """Slot `slot` holds these fragments."""

    index: int
    slot: int
    fragments: tuple[Fragment, ...]


class Free(msgspec.Struct, frozen=True, tag="free"):
    """Nobody reads the slot of bucket `index` any more."""

    index: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Nothing follows."""

    num_tensors: int
    num_bytes: int


class Error(msgspec.Struct, frozen=True, tag="error"):
    """The other end failed; `kind` is the name of its error class."""

    kind: str
    text: str


Message: TypeAlias = Hello | Attach | Attached | Bucket | Free | Done | Error
_DECODER = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()
_KINDS = (WeightMismatch, WeightPeerLost, WeightProtocolError, SharedMemoryFull, DeviceMemoryFull)


def encode(message: Message) -> bytes:
    """Bytes on the wire."""
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    """Read one message.

    Raises:
        WeightProtocolError: the bytes are no message of this protocol.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeightProtocolError(f"not a message of the weight channel: {error}") from error


def describe_failure(error: Exception) -> Error:
    """What the other end is told of a failure here."""
    return Error(type(error).__name__, str(error))


def as_exception(message: Error) -> WeightUpdateError:
    """The failure the other end told of, as an error of the class it named."""
    kinds = {kind.__name__: kind for kind in _KINDS}
    if message.kind in kinds:
        return kinds[message.kind](f"the other end failed: {message.text}")
    return WeightUpdateError(f"the other end failed: {message.kind}: {message.text}")
