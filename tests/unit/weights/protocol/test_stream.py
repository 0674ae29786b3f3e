"""Sender and receiver of the weight channel, without a wire between them."""

from __future__ import annotations

import pytest

from partial_rollout.errors import SharedMemoryFull, WeightMismatch, WeightProtocolError, WeightUpdateError
from partial_rollout.weights.protocol.buckets import Fragment, TensorSpec
from partial_rollout.weights.protocol.stream import Endpoint, ReceiverMachine, SenderMachine, State
from partial_rollout.weights.protocol.wire import (
    PROTOCOL,
    Attach,
    Attached,
    Bucket,
    Done,
    Error,
    Free,
    Hello,
    SharedBuffers,
    decode,
    describe_failure,
    encode,
)

SECRET = b"s" * 32
BUFFERS = SharedBuffers("name", 64, 2)
FRAGMENT = Fragment(TensorSpec("a", "float32", (4, 2)), 0, 0, 32)
EXAMPLES = {
    Hello: Hello(PROTOCOL, 1, b"r"),
    Attach: Attach(PROTOCOL, 1, b"s", b"p", BUFFERS),
    Attached: Attached(b"p"),
    Bucket: Bucket(0, 1, (FRAGMENT,)),
    Free: Free(0),
    Done: Done(1, 32),
    Error: Error("WeightMismatch", "text"),
}


def sender(secret=SECRET, update_number=1):
    machine = SenderMachine(secret=secret, update_number=update_number, nonce=b"sender", num_buffers=2)
    machine.start()
    return machine


def receiver(secret=SECRET, update_number=1):
    return ReceiverMachine(secret=secret, update_number=update_number, nonce=b"receiver")


def connected():
    s, r = sender(), receiver()
    s.receive(r.start())
    r.receive(s.attach(BUFFERS))
    s.receive(r.attached())
    return s, r


def in_state(machine: Endpoint, state: State) -> Endpoint:
    machine.state = state
    return machine


@pytest.mark.parametrize("message", EXAMPLES.values(), ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize("data", [b"", b"\x00", b"garbage", encode(EXAMPLES[Done])[:-1], b"\x80", b"\x81\xa4type\xa1x"])
def test_other_bytes_are_no_message(data):
    with pytest.raises(WeightProtocolError, match="not a message"):
        decode(data)


def test_a_whole_update():
    s, r = connected()
    assert s.next_buffer() == 0
    first = s.bucket(0, (FRAGMENT,))
    assert s.next_buffer() == 1
    second = s.bucket(1, (FRAGMENT,))
    assert s.next_buffer() is None
    r.receive(first)
    s.receive(r.free(first))
    assert s.next_buffer() == 0
    r.receive(second)
    done = s.finish(2, 64)
    r.receive(done)
    s.receive(r.free(second))
    s.receive(r.finish(done, Done(2, 64)))
    assert (s.state, r.state) == (State.CLOSED, State.CLOSED)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("message", EXAMPLES.values(), ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("make", [sender, receiver])
def test_a_message_out_of_order_ends_the_update(make, state, message):
    machine = in_state(make(), state)
    if (state, type(message)) in machine.TABLE:
        pytest.skip("in order")
    told = isinstance(message, Error)
    text = "text" if told else rf"{type(message).__name__}.*{state.name}"
    with pytest.raises(WeightMismatch if told else WeightProtocolError, match=text):
        machine.receive(message)
    assert machine.state is (State.PEER_FAILED if told else State.FAILED)
    assert machine.owes_reason is not told


@pytest.mark.parametrize("message", [Hello(PROTOCOL + 1, 1, b"r"), Hello(PROTOCOL, 2, b"r")])
def test_a_receiver_of_another_version_or_update_is_refused(message):
    s = sender()
    with pytest.raises(WeightProtocolError, match=f"version {PROTOCOL + 1}.*we {PROTOCOL}|update 2.*we at 1"):
        s.receive(message)
    assert s.state is State.FAILED


@pytest.mark.parametrize("change", [{"protocol": PROTOCOL + 1}, {"update_number": 2}])
def test_a_sender_of_another_version_or_update_is_refused(change):
    s, r = sender(), receiver()
    s.receive(r.start())
    offer = s.attach(BUFFERS)
    fields = {
        "protocol": offer.protocol,
        "update_number": 1,
        "nonce": offer.nonce,
        "proof": offer.proof,
        "buffers": BUFFERS,
    }
    with pytest.raises(WeightProtocolError, match=f"version {PROTOCOL + 1}.*we {PROTOCOL}|update 2.*we at 1"):
        r.receive(Attach(**(fields | change)))
    assert r.state is State.FAILED


def test_a_receiver_without_the_secret_gets_no_weights():
    s, r = sender(), receiver(secret=b"other")
    s.receive(r.start())
    s.attach(BUFFERS)
    r.state = State.ATTACHED
    with pytest.raises(WeightProtocolError, match="secret"):
        s.receive(r.attached())
    with pytest.raises(WeightProtocolError, match="FAILED"):
        s.bucket(0, ())


def test_a_sender_without_the_secret_is_refused():
    s, r = sender(secret=b"other"), receiver()
    s.receive(r.start())
    with pytest.raises(WeightProtocolError, match="secret"):
        r.receive(s.attach(BUFFERS))


def test_the_proof_of_one_end_or_of_an_earlier_update_is_worth_nothing():
    s, r = sender(), receiver()
    s.receive(r.start())
    own = s.attach(BUFFERS).proof
    with pytest.raises(WeightProtocolError, match="secret"):
        s.receive(Attached(own))
    late = sender(update_number=2)
    late.receive(receiver(update_number=2).start())
    with pytest.raises(WeightProtocolError, match="secret"):
        late.receive(r.attached())


@pytest.mark.parametrize("index", [-1, 1])
def test_a_bucket_that_is_not_on_its_way_cannot_be_freed(index):
    s, _ = connected()
    s.bucket(0, (FRAGMENT,))
    with pytest.raises(WeightProtocolError, match=f"bucket {index}"):
        s.receive(Free(index))
    assert s.state is State.FAILED


def test_a_bucket_cannot_be_freed_twice():
    s, _ = connected()
    s.bucket(0, (FRAGMENT,))
    s.receive(Free(0))
    with pytest.raises(WeightProtocolError, match="bucket 0"):
        s.receive(Free(0))


def test_a_buffer_in_use_is_not_sent_again():
    s, _ = connected()
    s.bucket(0, (FRAGMENT,))
    with pytest.raises(WeightProtocolError, match="buffer 0"):
        s.bucket(0, (FRAGMENT,))


@pytest.mark.parametrize("bucket", [Bucket(1, 0, ()), Bucket(0, 2, ()), Bucket(0, -1, ())])
def test_a_bucket_that_was_skipped_or_lies_elsewhere_is_refused(bucket):
    _, r = connected()
    with pytest.raises(WeightProtocolError, match=f"bucket {bucket.index} in buffer {bucket.buffer}"):
        r.receive(bucket)
    assert r.state is State.FAILED


def test_a_bucket_in_a_buffer_that_was_not_given_back_is_refused():
    _, r = connected()
    r.receive(first := Bucket(0, 1, (FRAGMENT,)))
    r.free(first)
    r.receive(Bucket(1, 1, (FRAGMENT,)))
    with pytest.raises(WeightProtocolError, match="bucket 2 was written to buffer 1, which was not free"):
        r.receive(Bucket(2, 1, (FRAGMENT,)))
    assert r.state is State.FAILED


def test_a_stream_that_has_not_begun_cannot_end():
    with pytest.raises(WeightProtocolError, match="cannot end in state HELLO"):
        sender().finish(0, 0)


def test_a_bucket_is_used_up_to_the_end_of_its_last_fragment():
    later = Fragment(TensorSpec("b", "uint8", (8,)), 0, 64, 8)
    assert Bucket(0, 0, (FRAGMENT, later)).used_bytes == 64 + 8
    assert Bucket(0, 0, ()).used_bytes == 0


def test_a_truncated_stream_is_no_success_on_either_end():
    s, r = connected()
    done = s.finish(2, 64)
    r.receive(done)
    with pytest.raises(WeightProtocolError, match="truncated"):
        r.finish(done, Done(1, 32))
    with pytest.raises(WeightProtocolError, match="num_tensors=1"):
        s.receive(Done(1, 32))
    assert (s.state, r.state) == (State.FAILED, State.FAILED)
    assert s.owes_reason
    assert r.owes_reason


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (SharedMemoryFull("no room"), SharedMemoryFull),
        (WeightMismatch("tensor 'a'"), WeightMismatch),
        (ValueError("other"), WeightUpdateError),
    ],
)
def test_a_failure_arrives_as_the_error_it_was(failure, kind):
    s, _ = connected()
    with pytest.raises(kind, match=f"the other end failed: .*{failure}"):
        s.receive(decode(encode(describe_failure(failure))))
