"""The weight channel's messages; `weight_stream.py` says who may send which when.

One connection carries one update ("round"), from one training rank to one engine worker:

    receiver                                  sender
    Hello   protocol, round, nonce     →
                                       ←      Attach   protocol, round, nonce, proof, slots
    Attached   proof                   →                the sender unlinks the slots' name here
                                       ←      Bucket   index, slot, fragments      at most one per free slot
    Free    index                      →                the slot may be written again
                                       ←      Done     number of tensors and bytes
    Done    the same numbers           →                the receiver has let go of the slots
                                       ↔      Error    at any time; ends the round on both ends

Each proof is an HMAC over both nonces with the run's secret, so neither end accepts bytes from, or hands memory to,
somebody who does not know it. Messages are MessagePack of the structs below, never pickles.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from partial_rollout.core.buckets import Fragment  # noqa: TC001 - msgspec reads the annotation at run time
from partial_rollout.errors import (
    SharedMemoryFull,
    WeightMismatch,
    WeightPeerLost,
    WeightProtocolError,
    WeightUpdateError,
)

PROTOCOL = 1
"""Goes up with every change of a message; both ends must be equal."""
NONCE_BYTES = 16


class SharedSlots(msgspec.Struct, frozen=True, tag="shared_memory"):
    """Slots one after the other in a POSIX shared memory segment."""

    name: str
    slot_bytes: int
    num_slots: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The receiver opens the connection."""

    protocol: int
    round: int
    nonce: bytes


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The sender proves itself and offers its slots."""

    protocol: int
    round: int
    nonce: bytes
    proof: bytes
    slots: SharedSlots


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The receiver proves itself; it has opened the slots."""

    proof: bytes


class Bucket(msgspec.Struct, frozen=True, tag="bucket"):
    """Slot `slot` holds these fragments."""

    index: int
    slot: int
    fragments: tuple[Fragment, ...]


class Free(msgspec.Struct, frozen=True, tag="free"):
    """The receiver has copied bucket `index`."""

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
_KINDS = (WeightMismatch, WeightPeerLost, WeightProtocolError, SharedMemoryFull)


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
