"""The other end of a channel, in a process of its own, that does not keep to the protocol: run by test_strangers.py.

Reads one JSON line for each scenario, plays it, and writes one line: what its end raised, or nothing.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

import pytest

from partial_rollout.errors import WeightUpdateError
from partial_rollout.weights.protocol import stream as weight_stream
from partial_rollout.weights.sender import WeightSender
from tests.unit.weights.support import BUFFER_BYTES, LONG_S, address_of, make_receiver, make_sender, make_weights

if TYPE_CHECKING:
    from partial_rollout.weights.directory import ChannelAddress


class Forgetful(WeightSender):
    """Counts all tensors and sends all but the last."""

    def _put(self, buffers, name, tensor) -> None:
        if name != "layer.3":
            super()._put(buffers, name, tensor)


class Breaking(WeightSender):
    """A sender whose stream ends after two buckets, within a tensor."""

    def _flush(self, buffers) -> None:
        if self._bucket < 2:
            super()._flush(buffers)
        self._fragments = []


def send(sender: WeightSender) -> None:
    with sender:
        sender.send(make_weights(4))


def receive(receiver) -> None:
    with receiver:
        list(receiver.tensors())


def of_other_update(end, address: ChannelAddress):
    """At the place where update 1 meets."""
    end._endpoint = address.endpoint("test", 1)
    return end


def of_class(kind: type[WeightSender], address: ChannelAddress) -> WeightSender:
    return kind(address, "test", update_number=1, buffer_bytes=BUFFER_BYTES, timeout_s=LONG_S, check=lambda: None)


def stranger(address: ChannelAddress) -> ChannelAddress:
    return dataclasses.replace(address, secret=b"x" * 32)


def newer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_stream, "PROTOCOL", weight_stream.PROTOCOL + 1)


def play(scenario: str, address: ChannelAddress, patch: pytest.MonkeyPatch) -> None:
    if scenario.startswith("newer"):
        newer(patch)
    {
        "newer receiver": lambda: receive(make_receiver(address)),
        "newer sender": lambda: send(make_sender(address)),
        "receiver without the secret": lambda: receive(make_receiver(stranger(address))),
        "sender without the secret": lambda: send(make_sender(stranger(address))),
        "receiver of another update": lambda: receive(
            of_other_update(make_receiver(address, update_number=2), address)
        ),
        "sender of another update": lambda: send(of_other_update(make_sender(address, update_number=2), address)),
        "forgetful sender": lambda: send(of_class(Forgetful, address)),
        "breaking sender": lambda: send(of_class(Breaking, address)),
    }[scenario]()


def main() -> None:
    """Until the end of the input."""
    for line in sys.stdin:
        request, outcome = json.loads(line), ""
        address = address_of(request["directory"], request["secret"])
        with pytest.MonkeyPatch.context() as patch:
            try:
                play(request["scenario"], address, patch)
            except WeightUpdateError as error:
                outcome = f"{type(error).__name__}: {error}"
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
