"""Sender and receiver of the weight channel, over real sockets and real shared memory."""

from __future__ import annotations

import dataclasses
import errno
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from partial_rollout.errors import SharedMemoryFull, WeightMismatch, WeightPeerLost, WeightProtocolError
from partial_rollout.weights.line import Line
from partial_rollout.weights.shared_buffers import SharedBufferWriter
from partial_rollout.weights.transport import Transports
from tests.unit.weights.support import (
    BUFFER_BYTES,
    LONG_S,
    SHORT_S,
    exchange,
    make_receiver,
    make_sender,
    make_weights,
    over,
    receive_all,
    segments,
    send_all,
)

MANY_KINDS = [
    ("scalar", torch.tensor(3.0)),
    ("empty", torch.empty(0, 4)),
    ("bf16", torch.randn(33, 5).bfloat16()),
    ("int64", torch.arange(7)),
    ("bool", torch.tensor([True, False, True])),
    ("transposed", torch.randn(8, 4).t()),
    ("fp8", torch.randn(16).to(torch.float8_e4m3fn)),
    ("large", torch.randn(10_000)),
    ("small", torch.randn(3)),
]


@pytest.fixture(params=["ipc", "tcp"])
def channels(request, channels):
    """Within a node, and between nodes."""
    return over(request.param, channels)


def same(first, second):
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first.float(), second.float())


def test_every_tensor_arrives_as_it_was_and_stays_so(channels):
    # The comparison comes after the last bucket: a tensor that were a view of a buffer would hold later bytes by now.
    weights = MANY_KINDS + make_weights(6)
    sent, received = exchange(channels.address, weights)
    assert [name for name, _ in received] == [name for name, _ in weights]
    assert all(same(got, wanted) for (_, got), (_, wanted) in zip(received, weights, strict=True))
    assert (sent.num_tensors, sent.num_bytes) == (len(weights), sum(tensor.nbytes for _, tensor in weights))


def test_a_device_of_its_own_gets_copies(channels):
    # "meta" stands for a GPU that is reached through the host.
    _, received = exchange(channels.address, make_weights(2), receiver={"device": torch.device("meta")})
    assert [tensor.device.type for _, tensor in received] == ["meta", "meta"]


@pytest.mark.parametrize(("keep", "copied"), [(False, 0), (True, 4)])
def test_a_tensor_is_copied_only_where_lending_it_could_stall_the_sender(channels, keep, copied):
    weights = [(f"{i}", torch.full((BUFFER_BYTES // 4,), float(i))) for i in range(6)]
    kept, copies = [], []

    def receive():
        with make_receiver(channels.address) as receiver:
            receiver._take_open = lambda: (copies.append(1), type(receiver)._take_open(receiver))[1]
            for name, tensor in receiver.tensors():
                if keep:
                    kept.append((name, tensor))

    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(send_all, channels.address, weights)
        pool.submit(receive).result()
        sent.result()
    assert len(copies) == copied
    assert all(set(tensor.tolist()) == {float(name)} for name, tensor in kept)


def test_nothing_at_all_may_be_sent(channels):
    sent, received = exchange(channels.address, [])
    assert (sent.num_tensors, received) == (0, [])


def test_the_segment_has_no_name_once_the_receiver_has_opened_it(channels):
    before, seen = segments(), []

    def weights():
        seen.append(segments())
        yield from make_weights(1)

    exchange(channels.address, weights())
    assert seen == [before]


def test_updates_follow_each_other(channels):
    for update_number, seed in ((1, 1), (2, 2)):
        weights = make_weights(2, seed)
        options = {"update_number": update_number}
        _, received = exchange(channels.address, weights, sender=options, receiver=options)
        assert all(same(got, wanted) for (_, got), (_, wanted) in zip(received, weights, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_named_on_both_ends_when_asked(channels, bad):
    weights = make_weights(3)
    weights[1][1][-1] = bad
    sent, received = exchange(channels.address, weights, receiver={"validate": True})
    assert isinstance(received, WeightMismatch)
    assert isinstance(sent, WeightMismatch)
    assert "'layer.1' holds NaN or Inf" in str(received)
    assert "'layer.1' holds NaN or Inf" in str(sent)


def test_integers_are_finite(channels):
    _, received = exchange(channels.address, [("i", torch.arange(3))], receiver={"validate": True})
    assert len(received) == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_float8_tensor_is_looked_at_too(channels, dtype):
    weights = [("whole", torch.ones(4).to(dtype)), ("broken", torch.tensor([1.0, float("nan")]).to(dtype))]
    _, received = exchange(channels.address, weights[:1], receiver={"validate": True})
    assert len(received) == 1
    _, received = exchange(channels.address, weights, receiver={"validate": True})
    assert isinstance(received, WeightMismatch)
    assert "'broken' holds NaN" in str(received)


def test_a_dtype_that_does_not_travel_is_named_on_both_ends(channels):
    sent, received = exchange(channels.address, [*make_weights(1), ("odd", torch.zeros(2, dtype=torch.complex64))])
    assert isinstance(sent, WeightMismatch)
    assert isinstance(received, WeightMismatch)
    assert "'odd'" in str(sent)
    assert "'odd'" in str(received)


def test_a_tensor_sent_twice_is_named_on_both_ends(channels):
    sent, received = exchange(channels.address, make_weights(1) + make_weights(1))
    assert "'layer.0' was sent twice" in str(sent)
    assert "'layer.0' was sent twice" in str(received)


def test_a_failure_of_the_weights_themselves_reaches_the_receiver(channels):
    def weights():
        yield from make_weights(1)
        raise ValueError("no more")

    sent, received = exchange(channels.address, weights())
    assert isinstance(sent, ValueError)
    assert "ValueError: no more" in str(received)


def test_a_failure_of_the_model_reaches_the_sender(channels):
    def load():
        with make_receiver(channels.address) as receiver:
            for name, _ in receiver.tensors():
                raise WeightMismatch(f"no place for {name}")

    sent = []
    thread = threading.Thread(target=lambda: sent.append(catch(send_all, channels.address, make_weights(8))))
    thread.start()
    with pytest.raises(WeightMismatch, match="layer.0"):
        load()
    thread.join()
    assert isinstance(sent[0], WeightMismatch)
    assert "no place for layer.0" in str(sent[0])


def catch(call, *args, **kwargs):
    try:
        return call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - handed to the test's own thread
        return error


def test_a_wrong_secret_ends_both_ends_before_a_byte_of_weights(channels):
    other = dataclasses.replace(channels.address, secret=b"x" * 32)
    asked = []

    def weights():
        asked.append(True)
        yield from make_weights(1)

    received = []
    thread = threading.Thread(target=lambda: received.append(catch(receive_all, other)))
    thread.start()
    sent = catch(send_all, channels.address, weights())
    thread.join()
    assert isinstance(received[0], WeightProtocolError)
    assert "secret" in str(received[0])
    assert "secret" in str(sent)
    assert asked == []


def test_a_sender_of_another_update_is_never_met(channels):
    sent, received = exchange(
        channels.address,
        make_weights(1),
        sender={"update_number": 1, "timeout_s": SHORT_S},
        receiver={"update_number": 2, "timeout_s": SHORT_S},
    )
    assert isinstance(sent, WeightPeerLost)
    assert "its hello" in str(sent)
    assert isinstance(received, WeightPeerLost)
    assert "its offer of buffers" in str(received)


def test_noise_on_the_line_is_an_error_not_a_pickle(channels):
    with make_sender(channels.address) as sender:
        line = Line(sender.endpoint, bind=False, peer="sender", timeout_s=LONG_S)
        line._socket.send(b"cos\nsystem\n(S'true'\ntR.")
        with pytest.raises(WeightProtocolError, match="not a message"):
            sender.send(make_weights(1))
        line.close()


def test_a_failed_engine_call_ends_the_wait_for_its_worker(channels):
    def engine_failed():
        raise RuntimeError("engine call failed")

    with pytest.raises(RuntimeError, match="engine call failed"):
        send_all(channels.address, make_weights(1), check=engine_failed)


def test_a_stalled_receiver_is_named_within_the_limit(channels):
    gate = threading.Event()

    def stall():
        with make_receiver(channels.address) as receiver:
            for _ in receiver.tensors():
                gate.wait()

    def weights(sender):
        yield from make_weights(1)
        sender._line._patience = lambda: SHORT_S  # not before: a busy machine may take longer for the hello
        yield from ((f"more.{name}", tensor) for name, tensor in make_weights(8))

    received = []
    thread = threading.Thread(target=lambda: received.append(catch(stall)))
    thread.start()
    match = "channel test was silent for 0.2 s; we waited for a free buffer"
    with pytest.raises(WeightPeerLost, match=match), make_sender(channels.address) as sender:
        sender.send(weights(sender))
    gate.set()
    thread.join()
    assert isinstance(received[0], WeightPeerLost)


def test_a_stalled_sender_is_named_within_the_limit(channels):
    gate = threading.Event()

    def weights():
        yield from make_weights(2)
        gate.wait()
        yield from make_weights(20, seed=1)

    def receive():
        with make_receiver(channels.address) as receiver:
            for _ in receiver.tensors():
                receiver._line._patience = lambda: SHORT_S  # not before: as above

    sent = []
    thread = threading.Thread(target=lambda: sent.append(catch(send_all, channels.address, weights())))
    thread.start()
    with pytest.raises(WeightPeerLost, match="channel test was silent for 0.2 s; we waited for the next message"):
        receive()
    gate.set()
    thread.join()
    assert isinstance(sent[0], WeightPeerLost)
    assert "silent" in str(sent[0])


@pytest.mark.parametrize("channels", ["ipc"], indirect=True)
def test_a_full_shared_memory_is_named_on_both_ends_and_cleaned(channels):
    before = segments()

    def reserve(descriptor, offset, size):
        if offset + size > BUFFER_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")

    def make_shared(buffer_bytes, num_buffers):
        return SharedBufferWriter(buffer_bytes, num_buffers, reserve=reserve)

    options = {"transports": Transports(cuda=None, make_shared=make_shared)}
    sent, received = exchange(channels.address, make_weights(4), sender=options)
    assert isinstance(sent, SharedMemoryFull)
    assert isinstance(received, SharedMemoryFull)
    assert "/dev/shm has no room for 4096 more bytes" in str(sent)
    assert "weights.bucket_mb" in str(sent)
    assert segments() == before
