"""The two ends of one weight update as state machines. Pure: no sockets, no memory, no clock; messages: `wire.py`."""

from __future__ import annotations

import hmac
from enum import Enum
from typing import TYPE_CHECKING

from partial_rollout.errors import WeightProtocolError
from partial_rollout.weights.protocol.wire import (
    PROTOCOL,
    Attach,
    Attached,
    Bucket,
    Buffers,
    Done,
    Error,
    Free,
    Hello,
    Message,
    SharedBuffers,
    as_exception,
)

if TYPE_CHECKING:
    from partial_rollout.weights.protocol.buckets import Fragment


class State(Enum):
    """Where one end stands; the value says what it waits for."""

    NEW = "to be started"
    HELLO = "its hello"
    ATTACH = "its offer of buffers"
    ATTACHED = "it to open the buffers"
    STREAMING = "the next message of the stream"
    DONE = "its confirmation"
    CLOSED = "nothing"
    FAILED = "nothing, the update failed here"
    PEER_FAILED = "nothing, the update failed at the other end"


class Endpoint:
    """What sender and receiver share: a literal table of who may say what when, the update's number, and the proofs."""

    TABLE: dict[tuple[State, type[Message]], State] = {}

    def __init__(self, *, secret: bytes, update_number: int, nonce: bytes) -> None:
        self._secret = secret
        self._update_number = update_number
        self._nonce = nonce
        self._peer_nonce = b""
        self.state = State.NEW

    def _step(self, message: Message) -> None:
        """Go to the next state; raise the failure that an Error reports, or that `message` is out of order."""
        next_state = self.TABLE.get((self.state, type(message)))
        if next_state is not None:
            self.state = next_state
            return
        # Set before anything is raised: a message after a failure must not find a state that takes it.
        before, self.state = self.state, State.FAILED
        if isinstance(message, Error):
            self.state = State.PEER_FAILED
            raise as_exception(message)
        raise WeightProtocolError(f"{type(message).__name__} arrived in state {before.name}")

    @property
    def owes_reason(self) -> bool:
        """Whether the other end must be told of a failure that happens now."""
        return self.state not in (State.CLOSED, State.PEER_FAILED)

    def _check_update(self, protocol: int, update_number: int) -> None:
        if protocol != PROTOCOL:
            self.state = State.FAILED
            raise WeightProtocolError(f"the other end speaks version {protocol} of the weight channel, we {PROTOCOL}")
        if update_number != self._update_number:
            self.state = State.FAILED
            raise WeightProtocolError(f"the other end is at weight update {update_number}, we at {self._update_number}")

    def _proof(self, role: str, receiver_nonce: bytes, sender_nonce: bytes) -> bytes:
        # Nonces, so that no proof can be replayed; the role, so that no proof can be sent back as its own answer.
        text = b"|".join((role.encode(), str(self._update_number).encode(), receiver_nonce, sender_nonce))
        return hmac.digest(self._secret, text, "sha256")

    def _check_proof(self, given: bytes, wanted: bytes) -> None:
        # In constant time: how long a comparison takes would tell how many bytes were right.
        if not hmac.compare_digest(given, wanted):
            self.state = State.FAILED
            raise WeightProtocolError("the other end does not know this run's secret")


class SenderMachine(Endpoint):
    """The sending end: `bucket` charges a buffer, and the receiver's Free gives it back.

    NEW -start→ HELLO -Hello→ ATTACHED -Attached→ STREAMING -finish→ DONE -Done→ CLOSED
    """

    TABLE = {
        (State.HELLO, Hello): State.ATTACHED,
        (State.ATTACHED, Attached): State.STREAMING,
        (State.STREAMING, Free): State.STREAMING,
        (State.DONE, Free): State.DONE,
        (State.DONE, Done): State.CLOSED,
    }

    def __init__(self, *, secret: bytes, update_number: int, nonce: bytes, num_buffers: int) -> None:
        super().__init__(secret=secret, update_number=update_number, nonce=nonce)
        self._num_buffers = num_buffers
        self._in_use: dict[int, int] = {}
        self._num_buckets = 0
        self._totals = Done(0, 0)
        self.peer_device = ""
        """UUID of the GPU on which the receiver can make buffers, known once it has said hello."""
        self.handles: tuple[bytes, ...] = ()
        """CUDA IPC handles of the buffers that the receiver has made; empty for shared memory."""

    def start(self) -> None:
        """Wait for the receiver."""
        self.state = State.HELLO

    def receive(self, message: Message) -> None:
        """Take a message.

        Raises:
            WeightProtocolError: it is out of order, of another version or update, or its proof is wrong.
            WeightUpdateError: it reports a failure of the receiver, of the class it names.
        """
        self._step(message)
        if isinstance(message, Hello):
            self._check_update(message.protocol, message.update_number)
            self._peer_nonce, self.peer_device = message.nonce, message.device
        elif isinstance(message, Attached):
            # The buffers are handed over by now, but no weights: those follow in the first bucket.
            self._check_proof(message.proof, self._proof("receiver", self._peer_nonce, self._nonce))
            self.handles = message.handles
        elif isinstance(message, Free):
            self._release(message.index)
        elif message != self._totals:
            self.state = State.FAILED
            raise WeightProtocolError(f"the receiver got {message}, not the {self._totals} that were sent")

    def _release(self, index: int) -> None:
        if self._in_use.pop(index, None) is None:
            self.state = State.FAILED
            raise WeightProtocolError(f"bucket {index} was freed, but it is not on its way")

    def attach(self, buffers: Buffers) -> Attach:
        """The offer that answers a Hello."""
        proof = self._proof("sender", self._peer_nonce, self._nonce)
        return Attach(PROTOCOL, self._update_number, self._nonce, proof, buffers)

    def next_buffer(self) -> int | None:
        """A buffer that may be written, or None while the receiver holds all of them."""
        free = [buffer for buffer in range(self._num_buffers) if buffer not in self._in_use.values()]
        return free[0] if free else None

    def bucket(self, buffer: int, fragments: tuple[Fragment, ...]) -> Bucket:
        """Hand over what was written to a free buffer."""
        if self.state is not State.STREAMING or buffer in self._in_use.values():
            raise WeightProtocolError(
                f"buffer {buffer} cannot be sent in state {self.state.name}, in use: {self._in_use}"
            )
        # By index and not by buffer: a Free of an earlier bucket must not free what the buffer holds now.
        index, self._num_buckets = self._num_buckets, self._num_buckets + 1
        self._in_use[index] = buffer
        return Bucket(index, buffer, fragments)

    def finish(self, num_tensors: int, num_bytes: int) -> Done:
        """Say that nothing follows."""
        if self.state is not State.STREAMING:
            raise WeightProtocolError(f"a stream cannot end in state {self.state.name}")
        self._totals = Done(num_tensors, num_bytes)
        self.state = State.DONE
        return self._totals


class ReceiverMachine(Endpoint):
    """The receiving end.

    NEW -start→ ATTACH -Attach→ ATTACHED -attached→ STREAMING -Done→ DONE -finish→ CLOSED

    >>> sender = SenderMachine(secret=b"secret", update_number=1, nonce=b"a", num_buffers=2)
    >>> receiver = ReceiverMachine(secret=b"secret", update_number=1, nonce=b"b")
    >>> sender.start()
    >>> sender.receive(receiver.start())
    >>> receiver.receive(sender.attach(SharedBuffers("segment", 2, 1024)))
    >>> sender.receive(receiver.attached())
    >>> bucket = sender.bucket(sender.next_buffer(), fragments=())
    >>> receiver.receive(bucket)
    >>> sender.receive(receiver.free(bucket))  # the sender may write the buffer again
    >>> end = sender.finish(num_tensors=0, num_bytes=0)
    >>> receiver.receive(end)
    >>> sender.receive(receiver.finish(sent=end, received=Done(0, 0)))
    >>> sender.state.name, receiver.state.name
    ('CLOSED', 'CLOSED')
    """

    TABLE = {
        (State.ATTACH, Attach): State.ATTACHED,
        (State.STREAMING, Bucket): State.STREAMING,
        (State.STREAMING, Done): State.DONE,
    }

    def __init__(self, *, secret: bytes, update_number: int, nonce: bytes) -> None:
        super().__init__(secret=secret, update_number=update_number, nonce=nonce)
        self._num_buckets = 0
        self._in_use: set[int] = set()
        self.offer: Buffers = SharedBuffers("", 0, 0)
        """Where the buffers are; empty until the sender has said so."""

    def start(self, device: str = "") -> Hello:
        """Open the connection; `device` is the UUID of the GPU that buffers can be made on."""
        self.state = State.ATTACH
        return Hello(PROTOCOL, self._update_number, self._nonce, device)

    def receive(self, message: Message) -> None:
        """Take a message; raises as `SenderMachine.receive` does."""
        self._step(message)
        if isinstance(message, Attach):
            self._check_update(message.protocol, message.update_number)
            self._peer_nonce = message.nonce
            # Before the offer is believed: it names memory that this process will map.
            self._check_proof(message.proof, self._proof("sender", self._nonce, self._peer_nonce))
            self.offer = message.buffers
        elif isinstance(message, Bucket):
            self._check_bucket(message)

    def _check_bucket(self, bucket: Bucket) -> None:
        if bucket.index != self._num_buckets or not 0 <= bucket.buffer < self.offer.num_buffers:
            self.state = State.FAILED
            raise WeightProtocolError(
                f"bucket {bucket.index} in buffer {bucket.buffer} arrived, "
                f"expected bucket {self._num_buckets} in one of {self.offer.num_buffers} buffers"
            )
        # The model may still read what lies there.
        if bucket.buffer in self._in_use:
            self.state = State.FAILED
            raise WeightProtocolError(
                f"bucket {bucket.index} was written to buffer {bucket.buffer}, which was not free"
            )
        self._num_buckets += 1
        self._in_use.add(bucket.buffer)

    def attached(self, handles: tuple[bytes, ...] = ()) -> Attached:
        """Say that the sender's buffers are open, or give the handles of buffers made here."""
        self.state = State.STREAMING
        return Attached(self._proof("receiver", self._nonce, self._peer_nonce), handles)

    def free(self, bucket: Bucket) -> Free:
        """Give a bucket's buffer back."""
        self._in_use.discard(bucket.buffer)
        return Free(bucket.index)

    def finish(self, sent: Done, received: Done) -> Done:
        """Confirm the end of the stream.

        Raises:
            WeightProtocolError: the numbers differ: something was lost.
        """
        # Counted at both ends: each bucket was valid by itself, so nothing else would tell that some never came.
        if sent != received:
            self.state = State.FAILED
            raise WeightProtocolError(f"the stream is truncated: {sent} was sent, {received} arrived")
        self.state = State.CLOSED
        return received
