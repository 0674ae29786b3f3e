"""The engine worker's side of one update of one channel."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import torch

from partial_rollout.core.buckets import Assembly, Fragment, TensorSpec
from partial_rollout.core.weight_stream import ReceiverMachine
from partial_rollout.core.wire import NONCE_BYTES, Bucket, Done, describe_failure
from partial_rollout.errors import WeightMismatch
from partial_rollout.weights.line import Line
from partial_rollout.weights.shared_slots import SlotReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from partial_rollout.core.wire import Message
    from partial_rollout.weights.directory import ChannelAddress


class WeightReceiver:
    """Context manager; connected on entry, and on exit everything is let go and a failure is told to the sender.

        with WeightReceiver(address, "rank 0", round=1, timeout_s=60.0) as receiver:
            model.load_weights(receiver.tensors())

    Every tensor handed on is a copy: a model may keep it until a layer is complete, long after its slot was written
    again. While the model loads the tensors of one slot, the sender fills the other.
    """

    def __init__(
        self,
        address: ChannelAddress,
        channel: str,
        *,
        round: int,
        timeout_s: float,
        validate: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Prepare the update `round` of `channel`; `validate` refuses NaN and Inf, `device` is where tensors go."""
        self._path = address.socket_path(channel, round)
        self._peer = f"the training worker of channel {channel}"
        self._timeout_s, self._validate, self._device = timeout_s, validate, device
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._machine = ReceiverMachine(secret=address.secret, round=round, nonce=nonce)
        self._slots: SlotReader | None = None
        self._open: torch.Tensor | None = None
        self.current: TensorSpec | None = None
        """The tensor that was handed on last: what a loader that raised was busy with."""

    def __enter__(self) -> WeightReceiver:
        """Connect."""
        self._line = Line(self._path, bind=False, peer=self._peer, timeout_s=self._timeout_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Tell the sender of a failure, let go of the slots, disconnect."""
        if isinstance(error, Exception) and self._machine.owes_reason:
            self._line.tell(describe_failure(error))
        self._release_slots()
        self._line.close()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once, as own memory, in the order in which they were sent.

        Raises:
            WeightPeerLost: the sender died or was silent for too long.
            WeightProtocolError: version, round, secret, order, or a truncated stream.
            WeightMismatch: a tensor of unknown dtype, sent twice, or not finite; names it.
            WeightUpdateError: what the sender reports.
        """
        slots = self._slots = self._attach()
        assembly = Assembly(slots.slot_bytes)
        while not isinstance(message := self._next(), Done):
            if isinstance(message, Bucket):
                for fragment in message.fragments:
                    assembly.accept(fragment)
                    yield from self._copy(slots.read(message.slot, fragment.slot_offset, fragment.num_bytes), fragment)
                self._line.send(self._machine.free(message))
        assembly.finish()
        confirmation = self._machine.finish(message, Done(assembly.num_tensors, assembly.num_bytes))
        self._release_slots()
        self._line.send(confirmation)

    def _attach(self) -> SlotReader:
        self._line.send(self._machine.start())
        self._next()
        slots = SlotReader(self._machine.offer)
        self._line.send(self._machine.attached())
        return slots

    def _next(self) -> Message:
        message = self._line.receive(self._machine.state.value)
        self._machine.receive(message)
        return message

    def _copy(self, data: torch.Tensor, fragment: Fragment) -> Iterator[tuple[str, torch.Tensor]]:
        """Copy a fragment to its tensor; yield the tensor when it is complete."""
        spec, begin = fragment.tensor, fragment.tensor_offset
        if self._open is None:
            self._open = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
        self._open.reshape(-1).view(torch.uint8)[begin : begin + fragment.num_bytes].copy_(data)
        if fragment.is_last:
            tensor, self._open, self.current = self._open, None, spec
            if self._validate and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise WeightMismatch(f"tensor {spec.name!r} holds NaN or Inf")
            yield spec.name, tensor

    def _release_slots(self) -> None:
        if self._slots is not None:
            self._slots.close()
            self._slots = None
