"""A ZeroMQ connection of exactly two ends on which every wait is bounded and names the other end."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from partial_rollout.errors import WeightPeerLost
from partial_rollout.weights.protocol.wire import Error, Message, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHECK_INTERVAL_MS = 500
"""How often a wait calls `check`: what `check` looks at sends no event."""
RECONNECT_MS = 10
"""The receiver may connect before the sender has bound, and tries again after so many milliseconds."""
LINGER_MS = 2000
"""How long `close` waits for the last message to leave: the confirmation, or the reason of a failure."""


def _nothing_to_check() -> None:
    """The default of `check`: there is nothing else that could fail."""


class Line:
    """One end of the connection, for one thread; calls block. A peer that dies closes its socket, which ends a wait."""

    def __init__(
        self,
        path: Path,
        *,
        bind: bool,
        peer: str,
        timeout_s: float,
        check: Callable[[], None] = _nothing_to_check,
    ) -> None:
        """Bind or connect; a wait longer than `timeout_s` is an error, and so is one during which `check` raises."""
        self._path, self._bind = path, bind
        self._peer, self._timeout_s, self._check = peer, timeout_s, check
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._is_gone = False
        if bind:
            path.unlink(missing_ok=True)
            self._socket.bind(f"ipc://{path}")
        else:
            self._socket.connect(f"ipc://{path}")

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            WeightPeerLost: the other end is gone or takes nothing.
        """
        data = encode(message)
        while True:
            self._wait(zmq.POLLOUT, "it to take a message")
            with contextlib.suppress(zmq.Again):  # the peer has gone in between: the next wait says so
                self._socket.send(data, zmq.NOBLOCK)
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

    def receive_nowait(self) -> Message | None:
        """The next message if there is one."""
        return decode(self._socket.recv()) if self._socket.poll(0) else None

    def _wait(self, flag: int, waiting_for: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._socket.poll(0, flag):
            if self._is_gone:
                raise WeightPeerLost(f"{self._peer} is gone; we waited for {waiting_for}")
            left_ms = (deadline - time.monotonic()) * 1000
            if left_ms <= 0:
                raise WeightPeerLost(f"{self._peer} was silent for {self._timeout_s:g} s; we waited for {waiting_for}")
            self._poll(flag, math.ceil(min(left_ms, CHECK_INTERVAL_MS)))
            self._check()

    def _poll(self, flag: int, timeout_ms: int) -> None:
        """Return when the socket is ready, the peer is gone or the time is over."""
        poller = zmq.Poller()
        poller.register(self._socket, flag)
        poller.register(self._events, zmq.POLLIN)
        if self._events in dict(poller.poll(timeout_ms)):
            recv_monitor_message(self._events)
            # The peer's last messages are still to be read, so the caller looks at the socket once more.
            self._is_gone = True

    def close(self) -> None:
        """Close the connection and remove the socket's file."""
        if self._is_gone or self._events.poll(0):
            self._socket.set(zmq.LINGER, 0)
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close()
        self._context.term()
        if self._bind:
            self._path.unlink(missing_ok=True)
