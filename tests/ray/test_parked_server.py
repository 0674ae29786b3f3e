"""Control calls beside thousands of parked requests, in a real Ray actor with a fake engine."""

from __future__ import annotations

import time

import pytest

NUM_PARKED = 2000
CONCURRENCIES = (1000, 4096)
"""verl's default, whose generate slots are all taken by parked requests, and ours, where all of them reach the gate."""
WAIT_S = 60.0

pytestmark = pytest.mark.ray


@pytest.fixture(params=CONCURRENCIES)
def concurrency(request):
    return request.param


@pytest.fixture
def server(ray_cluster, concurrency):
    from tests import fake_engine

    ray_cluster.cloudpickle.register_pickle_by_value(fake_engine)
    cls = ray_cluster.remote(concurrency_groups={"control": 8})(fake_engine.FakeServer)
    handle = cls.options(num_cpus=0, max_concurrency=concurrency).remote()
    ray_cluster.get(handle.launch_server.remote())
    yield handle
    ray_cluster.kill(handle)


def start(server, count):
    return [server.generate.remote([1, 2, 3], {"max_tokens": 5}, f"r{i}") for i in range(count)]


def wait_until(get, server, name, at_least):
    """Ask the control group until a count is reached; it has no event to offer from outside."""
    deadline = time.monotonic() + WAIT_S
    while getattr(get(server.rollout_statistics.remote()).gate, name) < at_least:
        assert time.monotonic() < deadline, f"{name} never reached {at_least}"


def test_control_calls_answer_while_two_thousand_generates_are_parked(ray_cluster, server, concurrency):
    get, resident = ray_cluster.get, min(NUM_PARKED, concurrency)
    get(server.abort_all_requests.remote())
    requests = start(server, NUM_PARKED)
    wait_until(get, server, "parked", resident)
    assert get(server.abort_all_requests.remote())["aborted_count"] == 0
    get(server.collective_rpc.remote("update_weights_from_ipc", kwargs={"use_shm": True}))
    get(server.clear_kv_cache.remote())
    get(server.set_global_steps.remote(7))
    statistics = get(server.rollout_statistics.remote())
    assert (statistics.version, statistics.gate.in_flight, statistics.num_generated_tokens) == (7, 0, 0)
    get(server.resume_generation.remote())
    wait_until(get, server, "in_flight", resident)
    # Drains those in the actor; the rest, if any, is let in by Ray as they return, and parks at the closed gate.
    assert get(server.abort_all_requests.remote())["aborted_count"] == resident
    wait_until(get, server, "parked", NUM_PARKED - resident)
    assert get(server.reject_parked.remote()) == NUM_PARKED - resident
    outputs = get(requests)
    assert {output.stop_reason for output in outputs} == {"aborted"}
    assert sum(bool(output.extra_fields.get("rejected")) for output in outputs) == NUM_PARKED - resident
    assert {output.extra_fields["global_steps"] for output in outputs} == {7}


def test_control_calls_reach_the_engine_on_the_loop_it_was_launched_on(ray_cluster, server):
    get = ray_cluster.get
    requests = start(server, 1)
    wait_until(get, server, "in_flight", 1)
    get(server.collective_rpc.remote("update_weights_from_ipc"))
    get(server.abort_all_requests.remote())
    get(requests)
    assert len(get(server.engine_threads.remote())) == 1
