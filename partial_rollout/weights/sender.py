"""The training side of one update of one channel."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from partial_rollout.errors import InternalError, WeightPeerLost
from partial_rollout.weights.line import TCP, Line
from partial_rollout.weights.protocol.buckets import ALIGNMENT_BYTES, BucketPlan, Fragment, TensorSpec
from partial_rollout.weights.protocol.stream import SenderMachine, State
from partial_rollout.weights.protocol.wire import NONCE_BYTES, describe_failure
from partial_rollout.weights.transport import NUM_BUFFERS, Transports, numbered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from partial_rollout.weights.buffers import BufferWriter
    from partial_rollout.weights.directory import ChannelAddress

SENDER_SHARE = 0.5
"""How long a rank waits for its engine's worker: for its hello, a free buffer, its confirmation.

A share of `timeouts.weights_s`, which is how long an engine waits. Ranks gather every tensor together, so while one
rank waits, the healthy engines of the other ranks wait too. All that a rank can wait for in a row must therefore take
less time than an engine waits, or a healthy engine would fail together with a stuck one.
"""
ANSWER_SHARE = 0.25
"""How long a rank waits for its server to tell its address, wake the engine up, or take notice of a lost update."""


@dataclass(frozen=True, slots=True)
class SentWeights:
    """What one update moved, and how long it took from the receiver's hello to its confirmation."""

    num_tensors: int
    num_bytes: int
    seconds: float


class WeightSender:
    """The sending end as a context manager: it listens from entry on, and removes socket and buffers on exit.

        with WeightSender(address, "rank 0", ...) as sender:
            ask the engine to receive
            sender.send(weights)

    `send` is `connect`, a `put` for each tensor, `end` and `confirm`; who sends to several receivers calls these
    (`fan_out.py`). It waits for the receiver (its hello, a free buffer, its confirmation); `timeout_s` bounds each
    wait.
    """

    def __init__(
        self,
        address: ChannelAddress,
        channel: str,
        *,
        update_number: int,
        timeout_s: float,
        check: Callable[[], None],
        buffer_bytes: int | None = None,
        device: torch.device | None = None,
        transports: Transports | None = None,
        endpoint: str | None = None,
        encrypt: bool = False,
        patience: Callable[[], float] | None = None,
    ) -> None:
        """Prepare one update of `channel`.

        `check` raises when the engine's call has already failed. `device` is where the tensors are (default: host);
        `buffer_bytes` None leaves the buffers' size to the transport. `endpoint` is where to listen, `tcp://HOST:*` for
        a receiver on another node; None: at the address, on this node. For `encrypt` and `patience` see `Line`.
        """
        self._endpoint = endpoint or address.endpoint(channel, update_number)
        self._line_options: dict[str, Any] = {
            "peer": f"the engine's worker for channel {channel}",
            "timeout_s": timeout_s,
            "check": check,
            "encrypt": encrypt,
            "patience": patience,
        }
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._machine = SenderMachine(
            secret=address.secret, update_number=update_number, nonce=nonce, num_buffers=NUM_BUFFERS
        )
        self._buffer_bytes = None if buffer_bytes is None else -(-buffer_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._device = numbered(device)
        self._transports = transports or Transports()
        self._buffers: BufferWriter | None = None
        self._num_tensors = self._num_bytes = 0
        self._started_s = 0.0
        self._bucket = 0
        self._buffer = 0
        self._fragments: list[Fragment] = []

    def __enter__(self) -> WeightSender:
        """Bind."""
        self._line = Line(self._endpoint, bind=True, **self._line_options)
        self._machine.start()
        return self

    @property
    def endpoint(self) -> str:
        """What the receiver must be told, unless it knows the address of this node."""
        return self._line.endpoint

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Tell the receiver of a failure, then remove socket and buffers."""
        if isinstance(error, Exception) and self._machine.owes_reason:
            self._line.tell(describe_failure(error))
        self._line.close()
        if self._buffers is not None:
            self._buffers.close()

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> SentWeights:
        """Send all tensors, in any order, from any device; return when the receiver has confirmed all of them.

        Raises:
            WeightPeerLost: the receiver died or was silent for too long.
            WeightProtocolError: it has another version, update or secret.
            SharedMemoryFull, DeviceMemoryFull: the buffers have no room.
            WeightUpdateError: the failure that the receiver reports.
            Exception: what `weights` or `check` raised.
        """
        self.connect()
        for name, tensor in weights:
            self.put(name, tensor)
        self.end()
        return self.confirm()

    def connect(self) -> None:
        """Wait for the receiver and agree on buffers with it; raises as `send`, as the next three do."""
        self._receive_until(State.ATTACHED)
        is_stream = self._endpoint.startswith(TCP)
        buffers = self._buffers = self._transports.writer(
            self._device, self._machine.peer_device, self._buffer_bytes, is_stream=is_stream
        )
        self._plan = BucketPlan(buffers.offer.buffer_bytes)
        self._say(self._machine.attach(buffers.offer))
        self._receive_until(State.STREAMING)
        buffers.attached(self._machine.handles)
        self._started_s = time.monotonic()

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Send one tensor."""
        self._num_tensors, self._num_bytes = self._num_tensors + 1, self._num_bytes + tensor.nbytes
        self._put(self._attached_buffers, name, tensor)

    def _put(self, buffers: BufferWriter, name: str, tensor: torch.Tensor) -> None:
        # Bytes can be viewed of one piece of memory only; a transposed or expanded tensor is copied here.
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for placement in self._plan.place(spec):
            # A bucket is sent when the next one begins, so that its message carries all of its fragments.
            if placement.bucket != self._bucket:
                self._flush(buffers)
                self._bucket = placement.bucket
            if not self._fragments:
                self._buffer = self._await_buffer()
            fragment = placement.fragment
            begin = fragment.tensor_offset
            buffers.write(self._buffer, fragment.buffer_offset, data[begin : begin + fragment.num_bytes])
            self._fragments.append(fragment)

    def end(self) -> None:
        """Say that nothing follows."""
        buffers = self._attached_buffers
        # Nothing follows the last bucket, so nothing else sends it.
        self._flush(buffers)
        buffers.close()  # first, since the receiver frees what it made once it has read that this is all
        self._say(self._machine.finish(self._num_tensors, self._num_bytes))

    def confirm(self) -> SentWeights:
        """Wait until the receiver has everything."""
        self._receive_until(State.CLOSED)
        return SentWeights(self._num_tensors, self._num_bytes, time.monotonic() - self._started_s)

    @property
    def _attached_buffers(self) -> BufferWriter:
        if self._buffers is None:
            raise InternalError(f"weight sender in state {self._machine.state.name}: a tensor before connect()")
        return self._buffers

    def _flush(self, buffers: BufferWriter) -> None:
        if self._fragments:
            # The message says that the bytes can be read; on a GPU the copy may still be under way.
            buffers.flush()
            bucket = self._machine.bucket(self._buffer, tuple(self._fragments))
            self._say(bucket, buffers.payload(self._buffer, bucket.used_bytes))
            self._fragments = []

    def _await_buffer(self) -> int:
        while (buffer := self._machine.next_buffer()) is None:
            self._machine.receive(self._line.receive("a free buffer"))
        return buffer

    def _say(self, message: Any, data: memoryview | None = None) -> None:
        """Send a message; if the receiver has gone, raise the reason that it may have sent before."""
        self._read_what_came()
        try:
            self._line.send(message, data)
        except WeightPeerLost:
            self._read_what_came()
            raise

    def _read_what_came(self) -> None:
        while (message := self._line.receive_nowait()) is not None:
            self._machine.receive(message)

    def _receive_until(self, state: State) -> None:
        while self._machine.state is not state:
            self._machine.receive(self._line.receive(self._machine.state.value))
