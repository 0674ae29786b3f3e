"""Control calls beside thousands of parked requests, in a real Ray actor with a fake engine."""

from __future__ import annotations

import pytest

NUM_PARKED = 2000
GENERATE_CONCURRENCY = 1000
"""Fewer than are parked, as with verl's own default: the actor's generate slots are all taken."""

pytestmark = pytest.mark.ray


@pytest.fixture
def server(ray_cluster):
    from tests import fake_engine

    ray_cluster.cloudpickle.register_pickle_by_value(fake_engine)
    cls = ray_cluster.remote(concurrency_groups={"control": 8})(fake_engine.FakeServer)
    handle = cls.options(num_cpus=0, max_concurrency=GENERATE_CONCURRENCY).remote()
    ray_cluster.get(handle.launch_server.remote())
    yield handle
    ray_cluster.kill(handle)


def start(server, count):
    return [server.generate.remote([1, 2, 3], {"max_tokens": 5}, f"r{i}") for i in range(count)]


def test_control_calls_answer_while_two_thousand_generates_are_parked(ray_cluster, server):
    get = ray_cluster.get
    get(server.abort_all_requests.remote())
    requests = start(server, NUM_PARKED)
    while get(server.rollout_statistics.remote()).parked < GENERATE_CONCURRENCY:
        pass
    assert get(server.abort_all_requests.remote())["aborted_count"] == 0
    get(server.collective_rpc.remote("update_weights_from_ipc", kwargs={"use_shm": True}))
    get(server.clear_kv_cache.remote())
    get(server.set_global_steps.remote(7))
    statistics = get(server.rollout_statistics.remote())
    assert (statistics.version, statistics.running, statistics.num_generated_tokens) == (7, 0, 0)
    get(server.resume_generation.remote())
    while get(server.rollout_statistics.remote()).running < GENERATE_CONCURRENCY:
        pass
    # Drains the first thousand; the rest is let in by Ray as they return, and parks at the closed gate.
    assert get(server.abort_all_requests.remote())["aborted_count"] == GENERATE_CONCURRENCY
    while get(server.rollout_statistics.remote()).parked < NUM_PARKED - GENERATE_CONCURRENCY:
        pass
    assert get(server.reject_parked.remote()) == NUM_PARKED - GENERATE_CONCURRENCY
    outputs = get(requests)
    assert {output.stop_reason for output in outputs} == {"aborted"}
    assert sum(bool(output.extra_fields.get("rejected")) for output in outputs) == NUM_PARKED - GENERATE_CONCURRENCY
    assert {output.extra_fields["global_steps"] for output in outputs} == {7}


def test_control_calls_reach_the_engine_on_the_loop_it_was_launched_on(ray_cluster, server):
    get = ray_cluster.get
    requests = start(server, 1)
    while get(server.rollout_statistics.remote()).running < 1:
        pass
    get(server.collective_rpc.remote("update_weights_from_ipc"))
    get(server.abort_all_requests.remote())
    get(requests)
    assert len(get(server.engine_threads.remote())) == 1
