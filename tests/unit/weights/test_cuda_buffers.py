"""Buffers on a GPU: both ends of the channel on a fake runtime. The real one: benchmarks/bench_weights.py."""

from __future__ import annotations

import pytest
import torch

from partial_rollout.errors import DeviceMemoryFull, WeightMismatch, WeightProtocolError
from partial_rollout.weights.cuda_buffers import CudaBufferReader, CudaBufferWriter
from partial_rollout.weights.line import Line
from partial_rollout.weights.protocol.wire import CudaBuffers, SharedBuffers
from partial_rollout.weights.transport import CUDA_BUFFER_BYTES, NUM_BUFFERS, SHARED_BUFFER_BYTES, Transports
from tests.unit.weights.fake_cuda import FREED, FakeCuda, FakeGpu
from tests.unit.weights.support import BUFFER_BYTES, exchange, make_weights

CPU = torch.device("cpu")


@pytest.fixture
def gpu():
    return FakeGpu()


def ends(gpu, **receiver):
    """Options of a sender and a receiver on the same GPU."""
    cuda = {role: FakeCuda(gpu, role, **options) for role, options in (("sender", {}), ("receiver", receiver))}
    return {role: {"transports": Transports(cuda=runtime)} for role, runtime in cuda.items()}


def test_every_tensor_arrives_and_all_memory_goes_with_the_last_one(channels, gpu):
    weights = [*make_weights(6), *((f"small.{i}", torch.full((8,), float(i))) for i in range(200))]
    _, received = exchange(channels.address, weights, **ends(gpu))
    assert all(torch.equal(got, wanted) for (_, got), (_, wanted) in zip(received, weights, strict=True))
    assert gpu.of("open") == gpu.of("close") == ["sender"] * NUM_BUFFERS
    assert gpu.of("allocate") == ["receiver"] * NUM_BUFFERS
    held = len(gpu.of("free"))
    assert held < NUM_BUFFERS
    received.clear()
    del received
    assert gpu.of("free") == ["receiver"] * NUM_BUFFERS


def test_a_bucket_is_told_of_when_its_copies_are_done_and_freed_when_its_reads_are(channels, gpu, monkeypatch):
    send = Line.send

    def logged(line, message, data=None):
        gpu.log.append(("sender" if line._path else "receiver", type(message).__name__))
        send(line, message, data)

    monkeypatch.setattr(Line, "send", logged)
    exchange(channels.address, make_weights(4), **ends(gpu))
    for role, message in (("sender", "Bucket"), ("receiver", "Free")):
        own = [call for who, call in gpu.log if who == role]
        assert message in own
        assert all(before == "synchronize" for before, call in zip(own, own[1:], strict=False) if call == message)


def test_no_memory_is_freed_that_the_sender_has_open(channels, gpu):
    exchange(channels.address, make_weights(6), **ends(gpu))
    calls = [entry for entry in gpu.log if entry[1] in ("close", "free")]
    assert calls[:NUM_BUFFERS] == [("sender", "close")] * NUM_BUFFERS
    assert calls[NUM_BUFFERS:] == [("receiver", "free")] * NUM_BUFFERS


def test_after_a_failure_memory_that_the_sender_may_have_open_stays(channels, gpu):
    options = ends(gpu)
    _, received = exchange(
        channels.address,
        [("bad", torch.full((8,), float("nan")))],
        sender=options["sender"],
        receiver=options["receiver"] | {"validate": True},
    )
    assert isinstance(received, WeightMismatch)
    assert gpu.of("allocate") == ["receiver"] * NUM_BUFFERS
    assert gpu.of("free") == []


def test_two_gpus_are_refused_on_both_ends_by_name(channels, gpu):
    sent, received = exchange(channels.address, make_weights(1), **ends(gpu, identity="gpu-b"))
    for error in (sent, received):
        assert isinstance(error, WeightProtocolError)
        assert "weights are on GPU gpu-a, the engine's worker is on GPU gpu-b" in str(error)


def test_a_full_gpu_is_named_on_both_ends(channels, gpu):
    sent, received = exchange(channels.address, make_weights(1), **ends(gpu, room=BUFFER_BYTES))
    assert isinstance(sent, DeviceMemoryFull)
    assert isinstance(received, DeviceMemoryFull)
    assert gpu.of("allocate") == ["receiver"]


def test_the_first_buffers_are_freed_when_the_next_one_does_not_fit(gpu):
    cuda = FakeCuda(gpu, "receiver", room=BUFFER_BYTES)
    with pytest.raises(DeviceMemoryFull):
        CudaBufferReader(CudaBuffers("gpu-a", BUFFER_BYTES, 2), device=CPU, runtime=cuda)
    assert gpu.of("free") == ["receiver"]


def test_an_offer_for_another_gpu_is_refused(gpu):
    with pytest.raises(WeightProtocolError, match="GPU 'gpu-x'.*on GPU 'gpu-a'"):
        CudaBufferReader(CudaBuffers("gpu-x", 64, 2), device=CPU, runtime=FakeCuda(gpu, "receiver"))


def test_buffers_are_opened_all_or_none(gpu):
    options = {"device": CPU, "peer_device": "gpu-a", "runtime": FakeCuda(gpu, "sender")}
    writer = CudaBufferWriter(64, 3, **options)
    with pytest.raises(WeightProtocolError, match="made 1 buffers, not 3"):
        writer.attached((b"",))
    assert gpu.of("open") == []


def test_a_tensor_outlives_the_buffers_it_came_in(gpu):
    reader = CudaBufferReader(CudaBuffers("gpu-a", 64, 1), device=CPU, runtime=FakeCuda(gpu, "receiver"))
    tensor = reader.lease(0)[:4]
    reader.close()
    assert FREED not in tensor.tolist()
    assert gpu.of("free") == []
    del tensor
    assert gpu.of("free") == ["receiver"]


def test_both_ends_on_a_gpu_share_its_memory_and_anything_else_goes_through_the_host(gpu):
    with_gpu, without = Transports(cuda=FakeCuda(gpu, "sender")), Transports(cuda=None)
    chosen = [with_gpu.writer(CPU, "gpu-a", None), with_gpu.writer(CPU, "", None), without.writer(CPU, "gpu-a", None)]
    assert [type(writer.offer) for writer in chosen] == [CudaBuffers, SharedBuffers, SharedBuffers]
    assert [writer.offer.buffer_bytes for writer in chosen] == [
        CUDA_BUFFER_BYTES,
        SHARED_BUFFER_BYTES,
        SHARED_BUFFER_BYTES,
    ]
    for writer in chosen:
        writer.close()
    with pytest.raises(WeightProtocolError, match="no CUDA"):
        without.reader(chosen[0].offer, CPU)
