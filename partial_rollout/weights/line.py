"""A ZeroMQ connection of exactly two ends on which every wait is bounded and names the other end.

An endpoint is a text: `ipc://PATH` within a node, `tcp://ADDRESS:PORT` between nodes. With `#KEY` behind it the
connection is encrypted (ZeroMQ's CURVE): KEY is the public key of the end that binds, which makes a pair of keys for
each connection. Without that key nobody can even connect.
"""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from partial_rollout.errors import WeightPeerLost, WeightProtocolError
from partial_rollout.weights.protocol.wire import Error, Message, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

CHECK_INTERVAL_MS = 500
"""How often a wait calls `check`: what `check` looks at sends no event."""
RECONNECT_MS = 10
"""The receiver may connect before the sender has bound, and tries again after so many milliseconds."""
LINGER_MS = 2000
"""How long `close` waits for the last message to leave: the confirmation, or the reason of a failure."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2000, 10_000
"""Over TCP: a node that dies, or a link that is cut, closes no socket; a peer that answers no heartbeat is gone."""
MAX_ANSWER_BYTES = 1 << 20
"""Over TCP: the longest message to the end that binds, to which strangers can connect; it only gets short answers."""
LATER_SHARE = 1 / 8
"""Share of the time for a wait, once an engine was lost: eight more silent engines cost no more than the first one."""
IPC, TCP = "ipc://", "tcp://"
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def _nothing_to_check() -> None:
    """The default of `check`: there is nothing else that could fail."""


class Patience:
    """How long each wait of several lines of one thread may take, which wait one after the other.

    When one of them has waited for nothing, the others have had the same time: each of them gets a short one now.
    """

    def __init__(self, timeout_s: float) -> None:
        """Begin with nobody lost."""
        self.timeout_s, self.has_lost = timeout_s, False

    def __call__(self) -> float:
        """Seconds that a wait which begins now may take."""
        return self.timeout_s * (LATER_SHARE if self.has_lost else 1)


class Line:
    """One end of the connection, for one thread; calls block. A peer that dies closes its socket, which ends a wait."""

    def __init__(
        self,
        endpoint: str,
        *,
        bind: bool,
        peer: str,
        timeout_s: float,
        check: Callable[[], None] = _nothing_to_check,
        patience: Callable[[], float] | None = None,
        encrypt: bool = False,
    ) -> None:
        """Bind or connect; a wait longer than `timeout_s` is an error, and so is one during which `check` raises.

        `patience` says how long a wait may take that begins now; None: `timeout_s`. `encrypt` is for the end that
        binds; `endpoint` tells the other one.
        """
        address, _, key = endpoint.partition("#")
        self._path = Path(address.removeprefix(IPC)) if bind and address.startswith(IPC) else None
        self._peer, self._check, self._patience = peer, check, patience or Patience(timeout_s)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        if address.startswith(TCP):
            self._socket.set(zmq.IPV6, "[" in address)
            self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._events = self._socket.get_monitor_socket(EVENTS)
        self._is_gone = False
        self._open: set[int] = set()
        """Descriptors of all connections, those of port scanners and others without the key included."""
        self._peers: set[int] = set()
        """Descriptors of connections of which one is the peer's."""
        self.endpoint = self._listen(address, encrypt) if bind else self._call(endpoint, address, key)
        """Where the other end connects to."""

    def _listen(self, address: str, encrypt: bool) -> str:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        else:
            self._socket.set(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
        public = b""
        if encrypt:
            public, secret = zmq.curve_keypair()
            self._socket.curve_server, self._socket.curve_secretkey = True, secret
        self._socket.bind(address)
        bound = self._socket.get_string(zmq.LAST_ENDPOINT)
        return f"{bound}#{public.hex()}" if encrypt else bound

    def _call(self, endpoint: str, address: str, key: str) -> str:
        if key:
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
            self._socket.curve_serverkey = bytes.fromhex(key)
        self._socket.connect(address)
        return endpoint

    def send(self, message: Message, data: memoryview | None = None) -> None:
        """Send a message; `data` follows it uncopied, and must stay as it is until the other end has answered.

        Raises:
            WeightPeerLost: the other end is gone or takes nothing.
        """
        parts = [encode(message)] if data is None else [encode(message), data]
        while True:
            self._wait(zmq.POLLOUT, "it to take a message")
            with contextlib.suppress(zmq.Again):  # the peer has gone in between: the next wait says so
                self._socket.send_multipart(parts, zmq.NOBLOCK, copy=data is None)
                return

    def tell(self, error: Error) -> None:
        """Send the reason of a failure if the other end is there to take it; never raises for one that is not."""
        with contextlib.suppress(zmq.Again):
            if not self._is_gone:
                self._socket.send(encode(error), zmq.NOBLOCK)

    def receive(self, waiting_for: str) -> Message:
        """The next message.

        Raises:
            WeightPeerLost: the other end is gone or silent.
            WeightProtocolError: it sent no message of ours.
        """
        self._wait(zmq.POLLIN, waiting_for)
        return decode(self._socket.recv())

    def receive_into(self, place: memoryview) -> None:
        """Receive the bytes that follow the message which was received last.

        Raises:
            WeightProtocolError: these are more or fewer bytes than `place` has, or none follow.
        """
        num_bytes = self._socket.recv_into(place) if self._socket.get(zmq.RCVMORE) else 0
        if num_bytes != place.nbytes:
            raise WeightProtocolError(f"{self._peer} sent {num_bytes} bytes of weights, announced {place.nbytes}")

    def receive_nowait(self) -> Message | None:
        """The next message if there is one."""
        return decode(self._socket.recv()) if self._socket.poll(0) else None

    def _wait(self, flag: int, waiting_for: str) -> None:
        limit_s = self._patience()
        deadline = time.monotonic() + limit_s
        while not self._socket.poll(0, flag):
            if self._is_gone:
                raise WeightPeerLost(f"{self._peer} is gone; we waited for {waiting_for}")
            left_ms = (deadline - time.monotonic()) * 1000
            if left_ms <= 0:
                raise WeightPeerLost(f"{self._peer} was silent for {limit_s:g} s; we waited for {waiting_for}")
            self._poll(flag, math.ceil(min(left_ms, CHECK_INTERVAL_MS)))
            self._check()

    def _poll(self, flag: int, timeout_ms: int) -> None:
        """Return when the socket is ready, the peer is gone or the time is over."""
        poller = zmq.Poller()
        poller.register(self._socket, flag)
        poller.register(self._events, zmq.POLLIN)
        if self._events in dict(poller.poll(timeout_ms)):
            self._note_event()

    def _note_event(self) -> None:
        message = recv_monitor_message(self._events)
        event, descriptor = message["event"], message["value"]
        if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
            self._open.add(descriptor)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._peers = self._peers or set(self._open)
        else:
            self._open.discard(descriptor)
            # The peer's last messages are still to be read, so the caller looks at the socket once more.
            self._is_gone |= descriptor in self._peers

    def close(self) -> None:
        """Close the connection and remove the socket's file."""
        while self._events.poll(0):
            self._note_event()
        if self._is_gone:
            self._socket.set(zmq.LINGER, 0)
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close()
        self._context.term()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
