"""What is only true of a connection over TCP: strangers can reach it, and bytes follow the messages."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zmq

from partial_rollout.errors import WeightMismatch, WeightPeerLost, WeightProtocolError
from partial_rollout.weights.fan_out import FanOut
from partial_rollout.weights.line import MAX_ANSWER_BYTES, Patience
from tests.unit.weights.support import (
    LONG_S,
    SHORT_S,
    make_receiver,
    make_sender,
    make_weights,
    outcome,
    receive_all,
)

ANYWHERE = "tcp://127.0.0.1:*"
NUM_MANY = 64


def exchange_over(sender, address, weights, before=lambda: None):
    with ThreadPoolExecutor(2) as pool, sender:
        sent = pool.submit(sender.send, weights)
        before()
        received = pool.submit(receive_all, address, endpoint=sender.endpoint)
        return outcome(sent), outcome(received)


def come_and_go(endpoint, words):
    """Somebody who connects, says nothing of ours and leaves; returns when the other end has noticed."""
    host, _, port = endpoint.partition("#")[0].removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LONG_S) as stranger:
        stranger.sendall(words)
        with contextlib.suppress(OSError):  # the other end may have left first
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass


@pytest.mark.parametrize(("encrypt", "words"), [(False, b""), (True, b""), (True, b"GET / HTTP/1.1\r\n\r\n")])
def test_weights_arrive_whole_although_strangers_came_and_went(channels, encrypt, words):
    sender, weights = make_sender(channels.address, endpoint=ANYWHERE, encrypt=encrypt), make_weights(8)
    sent, received = exchange_over(sender, channels.address, weights, lambda: come_and_go(sender.endpoint, words))
    assert sent.num_tensors == 8
    assert all(torch.equal(got, wanted) for (_, got), (_, wanted) in zip(received, weights, strict=True))


def test_who_does_not_know_the_key_cannot_connect(channels):
    sender = make_sender(channels.address, endpoint=ANYWHERE, encrypt=True, timeout_s=5 * SHORT_S)
    with sender, ThreadPoolExecutor(1) as pool:
        address, _, _ = sender.endpoint.partition("#")
        received = pool.submit(receive_all, channels.address, endpoint=address, timeout_s=SHORT_S)
        with pytest.raises(WeightPeerLost, match="we waited for its hello"):
            sender.send(make_weights(1))
        assert isinstance(outcome(received), WeightPeerLost)


def test_a_message_that_is_too_long_for_an_answer_ends_the_connection(channels):
    with make_sender(channels.address, endpoint=ANYWHERE) as sender, zmq.Context() as context:
        stranger = context.socket(zmq.PAIR)
        stranger.set(zmq.LINGER, 0)
        stranger.connect(sender.endpoint)
        stranger.send(bytes(MAX_ANSWER_BYTES + 1))
        with pytest.raises(WeightPeerLost, match="is gone"):
            sender.send(make_weights(1))
        stranger.close()


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: bytes(data) + b"x", lambda data: None])
def test_bytes_that_are_not_as_many_as_announced_are_an_error_on_both_ends(channels, change):
    sender = make_sender(channels.address, endpoint=ANYWHERE)

    def say(message, data=None, say=sender._say):
        say(message, data if data is None else change(data))

    sender._say = say
    sent, received = exchange_over(sender, channels.address, make_weights(4))
    assert isinstance(received, WeightProtocolError)
    assert "announced 4096" in str(received)
    assert isinstance(sent, WeightProtocolError)


# ---- several engines at once ----


THREE = ((0, 0), (0, 1), (1, 0), (2, 0))
"""Workers, each with its engine first: engine 0 has two."""


def fan_out(channels, receive, *, places=THREE, timeout_s=LONG_S, weights=None):
    """Send to these workers; `receive` by worker takes the place of a healthy one's.

    `timeout_s` is for workers that get stuck. The others have as much more as a busy machine may need, and so has a
    worker that gets stuck until all have the first tensor.
    """
    patience, is_streaming = Patience(timeout_s), threading.Event()

    def patience_with(place):
        if isinstance(receive.get(place), Stuck):
            return lambda: patience() if is_streaming.is_set() else LONG_S
        return lambda: patience() * LONG_S / timeout_s

    def streamed():
        for each in weights or make_weights(8):
            yield each
            is_streaming.set()

    senders = {
        place: make_sender(channels.address, endpoint=ANYWHERE, patience=patience_with(place)) for place in places
    }
    for sender in senders.values():
        sender.__enter__()
    by_engine = {rank: [senders[place] for place in places if place[0] == rank] for rank, _ in places}
    sending = FanOut(by_engine, patience)
    with ThreadPoolExecutor(len(places)) as pool:
        received = {
            place: pool.submit(receive.get(place, receive_all), channels.address, endpoint=sender.endpoint)
            for place, sender in senders.items()
        }
        try:
            sending.send(streamed())
        finally:
            for gate in receive.values():
                getattr(gate, "open", lambda: None)()
        return sending, {place: outcome(future) for place, future in received.items()}


class Stuck:
    """A worker that takes the first tensor and then nothing until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __call__(self, address, **options):
        with make_receiver(address, **options) as receiver:
            for _ in receiver.tensors():
                self.gate.wait()

    def open(self) -> None:
        self.gate.set()


def refuse(address, **options):
    with make_receiver(address, **options) as receiver:
        for name, _ in receiver.tensors():
            raise WeightMismatch(f"no place for {name}")


def test_all_engines_get_all_tensors(channels):
    sending, received = fan_out(channels, {})
    assert sending.failures == {}
    assert [[name for name, _ in tensors] for tensors in received.values()] == [[f"layer.{i}" for i in range(8)]] * 4


def test_an_engine_that_fails_is_named_and_the_others_are_whole(channels):
    sending, received = fan_out(channels, {(0, 1): refuse})
    assert list(sending.failures) == [0]
    assert "no place for layer.0" in str(sending.failures[0])
    assert [len(received[place]) for place in ((1, 0), (2, 0))] == [8, 8]
    # The other worker of the engine is told, and waits for no more.
    assert "no place for layer.0" in str(received[0, 0])


def test_silent_engines_cost_a_healthy_one_nothing_and_each_later_one_a_share(channels):
    stuck = {(0, 0): Stuck(), (1, 0): Stuck()}
    sending, received = fan_out(channels, stuck, timeout_s=5 * SHORT_S)
    assert [str(sending.failures[rank]).partition(" was ")[2] for rank in (0, 1)] == [
        f"silent for {seconds:g} s; we waited for a free buffer" for seconds in (1, 1 / 8)
    ]
    assert len(received[2, 0]) == 8


def test_of_64_engines_the_silent_one_is_left_out_alone_and_a_slow_one_gets_all(channels):
    """The last one takes nothing until the first one has been given up."""
    silent, second, slow = (0, 0), (1, 0), (NUM_MANY - 1, 0)
    is_given_up = threading.Event()

    def collect(address, each, options):
        with make_receiver(address, **options) as receiver:
            return [tensor for tensor in receiver.tensors() if each() or True]

    receive = {
        silent: Stuck(),
        second: lambda address, **options: collect(address, is_given_up.set, options),  # its turn comes after
        slow: lambda address, **options: collect(address, lambda: is_given_up.wait(LONG_S), options),
    }
    places = [(rank, 0) for rank in range(NUM_MANY)]
    sending, received = fan_out(channels, receive, places=places, timeout_s=5 * SHORT_S)
    assert list(sending.failures) == [0]
    assert "was silent for 1 s" in str(sending.failures[0])
    assert [len(received[place]) for place in places[1:]] == [8] * (NUM_MANY - 1)


def test_a_failure_of_the_gathering_reaches_every_engine(channels):
    def weights():
        yield from make_weights(1)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        fan_out(channels, {}, weights=weights())


def test_all_is_gathered_where_no_engine_is_left(channels):
    gathered = []
    FanOut({}, Patience(LONG_S)).send((gathered.append(name), tensor) for name, tensor in make_weights(3))
    assert gathered == ["layer.0", "layer.1", "layer.2"]
