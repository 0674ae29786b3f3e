"""The engine worker's side of one update of one channel."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, cast

import torch

from partial_rollout.errors import WeightMismatch
from partial_rollout.weights.buffers import Leases, allocate
from partial_rollout.weights.line import Line
from partial_rollout.weights.protocol.buckets import Assembly, Fragment, TensorSpec
from partial_rollout.weights.protocol.stream import ReceiverMachine
from partial_rollout.weights.protocol.wire import NONCE_BYTES, Bucket, Done, describe_failure
from partial_rollout.weights.transport import Transports, numbered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from partial_rollout.weights.buffers import BufferReader
    from partial_rollout.weights.directory import ChannelAddress
    from partial_rollout.weights.protocol.wire import Message


class WeightReceiver:
    """The receiving end as a context manager: it connects on entry; on exit it tells the sender of a failure.

        with WeightReceiver(address, "rank 0", update_number=1, timeout_s=60.0) as receiver:
            model.load_weights(receiver.tensors())

    A tensor that `tensors` yields lies in its buffer, and the sender does not write to the buffer again before the last
    reference to its memory is gone: a model may keep the tensor until a layer is complete, or for good. The tensor is a
    copy where it does not fit a buffer, where the buffers are on another device, and where lending it could leave the
    sender without a buffer to write to.
    """

    def __init__(
        self,
        address: ChannelAddress,
        channel: str,
        *,
        update_number: int,
        timeout_s: float,
        validate: bool = False,
        device: torch.device | None = None,
        transports: Transports | None = None,
        endpoint: str | None = None,
    ) -> None:
        """Prepare one update of `channel`; `validate` refuses NaN and Inf, `device` is where tensors go.

        `endpoint` is where the sender listens; None: at the address, on this node.
        """
        self._endpoint = endpoint or address.endpoint(channel, update_number)
        self._peer = f"the training worker of channel {channel}"
        self._timeout_s, self._validate = timeout_s, validate
        self._device = numbered(device)
        self._transports = transports or Transports()
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._machine = ReceiverMachine(secret=address.secret, update_number=update_number, nonce=nonce)
        self._buffers: BufferReader | None = None
        self._leases = Leases()
        self._unpacked: list[Bucket] = []
        self._open: torch.Tensor | None = None
        self.names: list[str] = []
        """Names of the tensors that `tensors` has yielded."""
        self.current: TensorSpec | None = None
        """The tensor that was yielded last: the one a loader was busy with when it raised."""

    def __enter__(self) -> WeightReceiver:
        """Connect."""
        self._line = Line(self._endpoint, bind=False, peer=self._peer, timeout_s=self._timeout_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Tell the sender of a failure, let go of the buffers, disconnect."""
        if isinstance(error, Exception) and self._machine.owes_reason:
            self._line.tell(describe_failure(error))
        # The sender may still be writing, so memory that it writes to must not be used for anything else.
        if error is not None and self._buffers is not None:
            self._buffers.abandon()
        self._release_buffers()
        self._line.close()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once, in the order in which they were sent; nobody writes to a yielded tensor's memory.

        Raises:
            WeightPeerLost: the sender died or was silent for too long.
            WeightProtocolError: version, update, secret, order, or a truncated stream.
            WeightMismatch: a tensor of unknown dtype, sent twice, or not finite; names it.
            WeightUpdateError: the failure that the sender reports.
        """
        buffers = self._buffers = self._attach()
        assembly = Assembly(buffers.buffer_bytes)
        while not isinstance(message := self._next(), Done):
            if isinstance(message, Bucket):
                yield from self._unpack(buffers, message, assembly)
                # Only when all of its tensors are out may its buffer be given back.
                self._unpacked.append(message)
                self._free(buffers)
        assembly.finish()
        confirmation = self._machine.finish(message, Done(assembly.num_tensors, assembly.num_bytes))
        # Before the confirmation: when the sender reads it, the memory of this end is free.
        self._release_buffers()
        self._line.send(confirmation)

    def _attach(self) -> BufferReader:
        self._line.send(self._machine.start(self._transports.identify(self._device)))
        self._next()
        buffers = self._transports.reader(self._machine.offer, self._device)
        self._leases = buffers.leases
        self._line.send(self._machine.attached(buffers.handles))
        return buffers

    def _next(self) -> Message:
        message = self._line.receive(self._machine.state.value)
        self._machine.receive(message)
        return message

    def _unpack(self, buffers: BufferReader, bucket: Bucket, assembly: Assembly) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are complete with this bucket."""
        if (place := buffers.place(bucket.buffer, bucket.used_bytes)) is not None:
            self._line.receive_into(place)
        data = buffers.lease(bucket.buffer)
        for fragment in bucket.fragments:
            assembly.accept(fragment)
            piece = data[fragment.buffer_offset : fragment.buffer_offset + fragment.num_bytes]
            if fragment.is_whole and buffers.device == self._device and self._may_lend(buffers, bucket.buffer):
                yield self._checked(fragment.tensor, _typed(piece, fragment.tensor))
            else:
                self._copy(piece, fragment)
                if fragment.is_last:
                    yield self._checked(fragment.tensor, self._take_open())
            self._free(buffers)

    def _may_lend(self, buffers: BufferReader, buffer: int) -> bool:
        """Whether the sender keeps another buffer to write to even if the model holds this one for good."""
        return buffers.leases.num_held - buffers.leases.is_held(buffer) < buffers.num_buffers - 1

    def _free(self, buffers: BufferReader) -> None:
        """Give back the buffers of earlier buckets that nothing refers to any more."""
        done = [bucket for bucket in self._unpacked if not buffers.leases.is_held(bucket.buffer)]
        if done:
            # A GPU may still read for a kernel whose tensor is gone in Python.
            buffers.settle()
            self._unpacked = [bucket for bucket in self._unpacked if bucket not in done]
            for bucket in done:
                self._line.send(self._machine.free(bucket))

    def _copy(self, piece: torch.Tensor, fragment: Fragment) -> None:
        """Copy a fragment to a tensor of our own."""
        spec, begin = fragment.tensor, fragment.tensor_offset
        if self._open is None:
            self._open = self._allocate(spec)
        self._open.reshape(-1).view(torch.uint8)[begin : begin + fragment.num_bytes].copy_(piece)

    def _allocate(self, spec: TensorSpec) -> torch.Tensor:
        if self._device.type == "cpu":
            return _typed(allocate(spec.num_bytes), spec)
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)

    def _take_open(self) -> torch.Tensor:
        tensor, self._open = self._open, None
        return cast("torch.Tensor", tensor)

    def _checked(self, spec: TensorSpec, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        self.current = spec
        self.names.append(spec.name)
        if self._validate and tensor.is_floating_point() and not _is_finite(tensor):
            raise WeightMismatch(f"tensor {spec.name!r} holds NaN or Inf")
        return spec.name, tensor

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in memory of the channel, also after the stream's end."""
        return self._leases.covers(tensor)

    @property
    def has_lent(self) -> bool:
        """Whether anything refers to the channel's memory."""
        return self._leases.num_held > 0

    def _release_buffers(self) -> None:
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None


def _typed(data: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return data.view(getattr(torch, spec.dtype)).view(spec.shape)


def _is_finite(tensor: torch.Tensor) -> bool:
    # Not every float8 type has isfinite; float32 holds all their values.
    return bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all())
