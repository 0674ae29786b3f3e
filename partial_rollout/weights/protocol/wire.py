"""The weight channel's messages; `stream.py` says who may send which when.

One connection carries one weight update, from one training rank to one engine worker:

    receiver                                  sender
    Hello   protocol, update_number, nonce, device →
                                       ←      Attach   protocol, update_number, nonce, proof, buffers
    Attached   proof, handles          →                shared memory loses its name here
                                       ←      Bucket   index, buffer, fragments      at most one per free buffer
    Free    index                      →                nothing refers to the buffer's bytes: it may be written again
                                       ←      Done     number of tensors and bytes
    Done    the same numbers           →                the sender may let go of the buffers
                                       ↔      Error    at any time; ends the update on both ends

Each proof is an HMAC over both nonces with the run's secret, so neither end accepts bytes from, or hands memory to,
somebody who does not know the secret. Messages are MessagePack of the structs below, never pickles. Between nodes there
is no memory that both ends see: a Bucket is followed by one frame with the bytes of its buffer up to `used_bytes`.
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

PROTOCOL = 4
"""Goes up with every change of a message; both ends must be equal."""
NONCE_BYTES = 16


class SharedBuffers(msgspec.Struct, frozen=True, tag="shared_memory"):
    """Buffers one after the other in a POSIX shared memory segment, which the sender makes."""

    name: str
    buffer_bytes: int
    num_buffers: int


class CudaBuffers(msgspec.Struct, frozen=True, tag="cuda_ipc"):
    """Buffers of their own on one GPU, which the receiver makes and keeps for as long as its model refers to them."""

    device: str
    buffer_bytes: int
    num_buffers: int


class StreamBuffers(msgspec.Struct, frozen=True, tag="stream"):
    """Each end has buffers of its own in host memory; their bytes follow the messages over the connection."""

    buffer_bytes: int
    num_buffers: int


Buffers: TypeAlias = SharedBuffers | CudaBuffers | StreamBuffers


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The receiver opens the connection; `device` is the UUID of the GPU it can make buffers on, or empty."""

    protocol: int
    update_number: int
    nonce: bytes
    device: str = ""


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The sender proves itself and says where the buffers are."""

    protocol: int
    update_number: int
    nonce: bytes
    proof: bytes
    buffers: Buffers


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The receiver proves itself. It has opened the sender's buffers, or has made its own.

    `handles` has a CUDA IPC handle for each buffer that the receiver made; it is empty for the sender's shared memory.
    """

    proof: bytes
    handles: tuple[bytes, ...] = ()


class Bucket(msgspec.Struct, frozen=True, tag="bucket"):
    """Buffer `buffer` holds these fragments."""

    index: int
    buffer: int
    fragments: tuple[Fragment, ...]

    @property
    def used_bytes(self) -> int:
        """Bytes from the buffer's begin to the end of its last fragment."""
        return max((each.buffer_offset + each.num_bytes for each in self.fragments), default=0)


class Free(msgspec.Struct, frozen=True, tag="free"):
    """Nobody reads the buffer of bucket `index` any more."""

    index: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The stream has ended; it had so many tensors and bytes."""

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
    """The bytes of a message, as they are sent."""
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
    """The message that tells the other end of a failure here."""
    return Error(type(error).__name__, str(error))


def as_exception(message: Error) -> WeightUpdateError:
    """The failure that the other end reports, as an error of the class that it names."""
    kinds = {kind.__name__: kind for kind in _KINDS}
    if message.kind in kinds:
        return kinds[message.kind](f"the other end failed: {message.text}")
    return WeightUpdateError(f"the other end failed: {message.kind}: {message.text}")
