"""The measurement of a link ends when its other end has."""

from __future__ import annotations

import socket
import threading

import pytest

from scripts.link_rate import Receiver


def test_a_copy_whose_sender_has_ended_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10.0)

        def send_half() -> None:
            link, _ = server.accept()
            with link:
                link.sendall(bytes(4))

        sender = threading.Thread(target=send_half)
        sender.start()
        with pytest.raises(ConnectionError, match="ended 4 of 8 bytes too early"):
            Receiver().copy("127.0.0.1", server.getsockname()[1], 8)
        sender.join(10.0)
