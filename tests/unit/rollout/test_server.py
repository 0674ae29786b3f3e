"""The real server class around a fake engine, without Ray."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine.exceptions import EngineDeadError

from partial_rollout.config import PartialRolloutConfig, TailConfig, TimeoutConfig, WeightsConfig
from partial_rollout.core.cost_model import RunningRequest
from partial_rollout.core.engine_meter import EngineMeter, Origin
from partial_rollout.core.interrupt import Context
from partial_rollout.errors import DataError, DrainTimeout, EngineDead, EngineError, WeightUpdateError
from partial_rollout.rollout import engine_calls, interruption
from partial_rollout.rollout.engine_request import drop_repeated_logprobs
from partial_rollout.rollout.interruption import Interruption
from tests.fake_engine import FakeServer, completion
from tests.fake_engine import output as fake_output

PARAMS = {"max_tokens": 50}
LONG_S = 20.0
"""Never runs out in a test that passes."""


async def launched(settings: PartialRolloutConfig | None = None) -> FakeServer:
    server = FakeServer(settings)
    await server.launch_server()
    return server


async def let_run() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def start(server: FakeServer, request_id: str = "a", **options) -> asyncio.Task:
    return asyncio.create_task(server.generate([1, 2, 3], dict(PARAMS), request_id, **options))


async def test_streamed_tokens_come_back_with_an_abort():
    server = await launched()
    task = start(server)
    await let_run()
    server.fake.stream("a", [5, 6])
    server.fake.stream("a", [7])
    await let_run()
    assert (await server.rollout_statistics()).num_generated_tokens == 3
    await server.abort_all_requests()
    output = await task
    assert (output.token_ids, output.stop_reason) == ([5, 6, 7], "aborted")
    assert (await server.rollout_statistics()).num_aborted == 1


async def test_the_version_is_the_one_that_sampled_the_tokens():
    server = await launched()
    await server.set_global_steps(3)
    task = start(server)
    await let_run()
    await server.set_global_steps(4)
    server.fake.finish("a", [5])
    assert (await task).extra_fields["global_steps"] == 3


async def test_a_drain_forgets_the_prefix_cache_unless_told_otherwise():
    server = await launched()
    await server.abort_all_requests()
    await server.resume_generation()
    await server.abort_all_requests(reset_prefix_cache=False)
    assert server.fake.calls == ["pause abort True", "resume", "pause abort False"]


async def test_a_request_still_on_its_way_is_drained_too():
    server = await launched()
    server.fake.accept.clear()
    task = start(server)
    await let_run()
    drain = asyncio.create_task(server.abort_all_requests(reset_prefix_cache=False))
    await let_run()
    assert server.fake.calls == []
    server.fake.accept.set()
    assert await drain == {"aborted_count": 1, "request_ids": ["a"]}
    assert server.fake.calls == ["add a", "pause abort False"]
    assert (await task).stop_reason == "aborted"


async def test_an_engine_that_keeps_a_request_is_named():
    server = await launched(PartialRolloutConfig(timeouts=TimeoutConfig(drain_s=0.01)))
    server.fake.abort_on_pause = False
    task = start(server, "keeps-running")
    await let_run()
    with pytest.raises(DrainTimeout, match="keeps-running"):
        await server.abort_all_requests()
    server.fake.finish("keeps-running", [1])
    await task


async def test_a_dead_engine_is_named_and_leaves_nobody_inside():
    server = await launched()
    task = start(server)
    await let_run()
    server.fake.die()
    with pytest.raises(EngineDead, match="replica 0 node 0"):
        await task
    assert (await server.rollout_statistics()).running == 0


async def test_a_cancelled_request_is_aborted_in_the_engine():
    server = await launched()
    task = start(server)
    await let_run()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.fake.calls == ["add a", "abort a"]
    assert (await server.rollout_statistics()).running == 0


async def test_reprefilled_tokens_are_counted_for_resumed_requests_only():
    server = await launched()
    for request_id, resumed in (("a", False), ("b", True)):
        task = start(server, request_id, is_resumption=resumed)
        await let_run()
        server.fake.finish(request_id, [9])
        await task
    assert (await server.rollout_statistics()).num_reprefilled_tokens == 3


async def test_a_full_context_is_an_end_for_a_resumed_request_and_an_error_for_a_fresh_one():
    server = await launched()
    server.config.max_model_len = 3
    assert (await server.generate([1, 2, 3], {}, "a", is_resumption=True)).stop_reason == "completed"
    with pytest.raises(DataError, match="3 tokens leaves no room in max_model_len=3"):
        await server.generate([1, 2, 3], {}, "b")


async def test_abort_with_reject_turns_requests_away_until_resumed():
    server = await launched()
    await server.abort_all_requests(reject_request=True)
    output = await start(server)
    assert (output.stop_reason, output.extra_fields["rejected"], output.token_ids) == ("aborted", True, [])
    await server.resume_generation()
    task = start(server)
    await let_run()
    server.fake.finish("a", [1])
    assert (await task).stop_reason == "completed"


def with_mode(name: str) -> PartialRolloutConfig:
    return PartialRolloutConfig(tail=TailConfig(interrupt_mode=name))


async def cut(server: FakeServer, *tokens: int, request_id: str = "a", **options):
    """Generate, be interrupted after `tokens`, and return the segment."""
    task = start(server, request_id, **options)
    await let_run()
    if tokens:
        server.fake.stream(request_id, list(tokens))
    await server.abort_all_requests()
    return await task


async def test_a_kept_request_hands_over_its_tokens_and_goes_on_where_it_is():
    server = await launched(with_mode("keep_kv"))
    first = await cut(server, 5, 6)
    assert (first.token_ids, first.stop_reason) == ([5, 6], "aborted")
    statistics = await server.rollout_statistics()
    assert (statistics.running, statistics.kept, statistics.num_aborted) == (0, 1, 1)
    await server.set_global_steps(9)
    task = start(server, "b", is_resumption=True, retained=first.extra_fields["retained"])
    await let_run()
    await server.resume_generation()
    server.fake.finish("a", [7])
    second = await task
    assert (second.token_ids, second.stop_reason) == ([7], "completed")
    assert second.extra_fields["global_steps"] == 9
    assert second.extra_fields["context"] == Context(0, "keep_kv", 3)
    assert second.extra_fields["retained"] is None
    assert (await server.progress()).speed.reprefilled_share == 0
    assert server.fake.calls == ["add a", "pause keep False", "resume"]
    assert (await server.rollout_statistics()).kept == 0


async def test_what_the_front_end_takes_in_late_still_belongs_to_the_segment_before():
    server = await launched(with_mode("keep"))
    task = start(server)
    await let_run()
    messages = server.fake.engine_core.outputs_queue
    messages.put_nowait("the engine's last message")

    async def take_in_late() -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        messages.get_nowait()
        await asyncio.sleep(0)
        server.fake.stream("a", [5])

    late = asyncio.create_task(take_in_late())
    await server.abort_all_requests()
    assert (await task).token_ids == [5]
    await late


async def test_a_request_without_tokens_or_with_images_does_not_stay():
    server = await launched(with_mode("keep_kv"))
    empty = await cut(server)
    assert (empty.token_ids, empty.stop_reason, empty.extra_fields["retained"]) == ([], "aborted", None)
    assert (await server.rollout_statistics()).kept == 0
    await server.resume_generation()
    picture = await cut(server, 5, request_id="p", image_data=["picture"])
    assert picture.token_ids == [5]
    assert picture.extra_fields["retained"].kept_id is None
    assert server.fake.calls == [
        "add a",
        "pause keep False",
        "abort a",
        "resume",
        "add p",
        "pause keep False",
        "abort p",
    ]


async def test_a_request_that_ends_during_the_drain_is_complete():
    server = await launched(with_mode("keep"))
    task = start(server)
    await let_run()
    server.fake.finish("a", [5])
    await server.abort_all_requests()
    assert (await task).stop_reason == "completed"
    assert (await server.rollout_statistics()).kept == 0


async def test_kept_requests_that_nobody_is_here_for_leave_before_the_engine_goes_on():
    server = await launched(with_mode("keep_kv"))
    tasks = [start(server, name) for name in "abc"]
    await let_run()
    for name in "abc":
        server.fake.stream(name, [5])
    await server.abort_all_requests()
    left = [(await task).extra_fields["retained"] for task in tasks]
    waits = start(server, "d", is_resumption=True, retained=left[0])
    given_up = start(server, "e", is_resumption=True, retained=left[1])
    await let_run()
    given_up.cancel()
    await let_run()
    await server.resume_generation()
    assert server.fake.calls[4:] == ["abort b", "abort c", "resume"]
    server.fake.finish("a", [6])
    assert (await waits).token_ids == [6]
    late = start(server, "f", is_resumption=True, retained=left[2])
    await let_run()
    server.fake.finish("f", [7])
    assert (await late).extra_fields["context"] == Context(0, "abort")


async def test_rejected_requests_leave_the_engine_too():
    server = await launched(with_mode("keep"))
    first = await cut(server, 5)
    waits = start(server, "b", is_resumption=True, retained=first.extra_fields["retained"])
    await let_run()
    await server.reject_parked()
    assert (await waits).extra_fields["rejected"]
    await server.resume_generation()
    assert server.fake.calls[2:] == ["abort a", "resume"]


async def test_an_engine_that_dies_with_kept_requests_is_named():
    server = await launched(with_mode("keep_kv"))
    first = await cut(server, 5)
    waits = start(server, "b", is_resumption=True, retained=first.extra_fields["retained"])
    await let_run()
    server.fake.die()
    await server.resume_generation()
    with pytest.raises(EngineDead, match="replica 0 node 0"):
        await waits


async def test_a_relaunched_engine_has_nothing_of_what_was_kept():
    server = await launched(with_mode("keep_kv"))
    first = await cut(server, 5)
    await server.relaunch()
    await server.receive_weights(round=1, version=5)
    waits = start(server, "b", is_resumption=True, retained=first.extra_fields["retained"])
    await let_run()
    await server.resume_generation()
    await let_run()
    server.fake.finish("b", [6])
    assert (await waits).extra_fields["context"] == Context(5, "abort")


async def test_draining_twice_keeps_what_is_kept():
    server = await launched(with_mode("keep"))
    await cut(server, 5)
    assert (await server.abort_all_requests())["aborted_count"] == 0
    assert (await server.rollout_statistics()).kept == 1


async def test_a_drain_that_nobody_takes_tokens_in_for_is_bounded():
    server = await launched(with_mode("keep"))
    server.settings = PartialRolloutConfig(timeouts=TimeoutConfig(drain_s=0.01))
    server.fake.engine_core.outputs_queue.put_nowait("a message that stays")
    with pytest.raises(DrainTimeout):
        await server.abort_all_requests()
    server.fake.errored = True
    with pytest.raises(EngineDeadError):
        await server.abort_all_requests()


async def test_only_a_mode_that_retains_nothing_forgets_the_prefix_cache():
    calls = {}
    for name in ("keep", "keep_kv", "reuse_kv", "offload_kv"):
        tail = TailConfig(interrupt_mode=name, offload_gib=1 if name == "offload_kv" else None)
        server = await launched(PartialRolloutConfig(tail=tail))
        await server.abort_all_requests()
        await server.receive_weights(round=1, version=5)
        calls[name] = [call for call in server.fake.calls if "mm" not in call and "encoder" not in call]
    update = "rpc receive_weights"
    assert calls == {
        "keep": ["pause keep True", update, "reset prefix cache"],
        "keep_kv": ["pause keep False", update],
        "reuse_kv": ["pause abort False", update],
        "offload_kv": ["pause abort False", update, "reset prefix cache, not the connector's"],
    }


async def test_salts_part_epochs_and_follow_a_request_through_them():
    server = await launched(with_mode("reuse_kv"))
    first = await cut(server, 5)
    await server.resume_generation()
    again = await cut(server, 6, request_id="b", is_resumption=True, retained=first.extra_fields["retained"])
    await server.resume_generation()
    for name in "cd":
        task = start(server, name)
        await let_run()
        server.fake.finish(name, [7])
        await task
    salts = {name: prompt["cache_salt"] for name, prompt in server.fake.prompts.items()}
    assert salts["a"] == salts["b"]
    assert salts["c"] == salts["d"] != salts["a"]
    assert again.extra_fields["retained"] == first.extra_fields["retained"]
    assert (await launched(with_mode("reuse_kv")))._interruption.cache_salt(None, 0, 0) != salts["a"]


async def test_the_oldest_kv_stays_the_oldest_over_several_updates():
    server = await launched(with_mode("reuse_kv"))
    cut_at, retained = [], None
    for version, name in ((3, "a"), (4, "b"), (5, "c")):
        await server.receive_weights(round=version, version=version)
        if retained is None:
            segment = await cut(server, 5, request_id=name)
        else:
            await server.resume_generation()
            segment = await cut(server, 5, request_id=name, is_resumption=True, retained=retained)
        retained = segment.extra_fields["retained"]
        cut_at.append((segment.extra_fields["context"].kv_version, retained.kv_version))
    assert [kv_version for _, kv_version in cut_at] == [3, 3, 3]


async def test_weights_that_change_while_the_gate_is_open_have_another_salt():
    server = await launched(with_mode("reuse_kv"))
    await cut(server, 5)
    await server.resume_generation()
    for version in (3, 4):
        await server.receive_weights(round=version, version=version)
        task = start(server, str(version))
        await let_run()
        server.fake.finish(str(version), [7])
        await task
    assert server.fake.prompts["3"]["cache_salt"] != server.fake.prompts["4"]["cache_salt"]


async def test_nothing_is_salted_where_nothing_is_retained():
    for name in ("abort", "keep"):
        server = await launched(with_mode(name))
        await cut(server, 5)
        assert "cache_salt" not in server.fake.prompts["a"]


async def test_memory_that_is_released_is_not_forgotten_by_the_connector():
    server = await launched(PartialRolloutConfig(tail=TailConfig(interrupt_mode="offload_kv", offload_gib=4)))
    await server.engine.sleep(level=2)
    await server.engine.wake_up(tags=["kv_cache"])
    assert server.fake.calls == ["reset prefix cache, not the connector's", "rpc sleep", "rpc wake_up"]


async def test_memory_that_somebody_still_uses_is_not_released():
    server = await launched(PartialRolloutConfig(tail=TailConfig(interrupt_mode="offload_kv", offload_gib=4)))
    server.fake.forgets = False
    with pytest.raises(EngineError, match="cannot release its memory"):
        await server.engine.sleep(level=2)
    assert "rpc sleep" not in server.fake.calls


def test_the_modes_settings_reach_the_engine():
    given = {}
    Interruption(PartialRolloutConfig()).engine_arguments(given)
    assert given == {"stream_interval": 32}
    given = {}
    Interruption(with_mode("keep")).engine_arguments(given)
    assert given == {"stream_interval": 1}
    offload = Interruption(PartialRolloutConfig(tail=TailConfig(interrupt_mode="offload_kv", offload_gib=4)))
    given = {}
    offload.engine_arguments(given)
    connector = given.pop("kv_transfer_config")
    assert given == {"stream_interval": 32}
    assert (connector["kv_connector"], connector["kv_role"]) == ("OffloadingConnector", "kv_both")
    assert connector["kv_connector_extra_config"] == {"cpu_bytes_to_use": 4 * 1024**3, "offload_prompt_only": False}


async def test_host_memory_has_no_name_once_the_engine_is_up(monkeypatch, tmp_path):
    monkeypatch.setattr(interruption, "FOLDER", tmp_path)
    server = FakeServer(PartialRolloutConfig(tail=TailConfig(interrupt_mode="offload_kv", offload_gib=4)))
    given = {}
    server._interruption.engine_arguments(given)
    own, other = (tmp_path / f"vllm_offload_{name}.mmap" for name in (given["kv_transfer_config"]["engine_id"], "b"))
    for launch in (server.launch_server, server.relaunch):
        own.touch()
        other.touch()
        await launch()
        assert (own.exists(), other.exists()) == (False, True)


def test_logprobs_without_a_token_are_cut():
    repeated = completion([7], logprobs=["of 7", "of 5", "of 6"], finish_reason="abort")
    drop_repeated_logprobs(repeated)
    assert repeated.logprobs == ["of 7"]
    empty = completion([], logprobs=["of 5"], finish_reason="abort")
    drop_repeated_logprobs(empty)
    assert empty.logprobs == []
    none = completion([7], logprobs=None, finish_reason="stop")
    drop_repeated_logprobs(none)
    assert none.logprobs is None


async def test_a_further_node_of_a_replica_is_healthy_without_an_engine_of_its_own():
    server = FakeServer()
    server.node_rank = 1
    await server.require_health()


async def test_a_weight_update_forgets_caches_before_the_version_changes():
    server = await launched()
    await server.receive_weights(round=1, version=5)
    assert server.fake.calls == ["rpc receive_weights", "reset prefix cache", "reset mm cache", "reset encoder cache"]
    assert (await server.rollout_statistics()).version == 5


FAILURE = RuntimeError("tensor 'a' does not fit")


async def test_an_engine_that_dies_before_it_answers_an_update_is_noticed(monkeypatch):
    monkeypatch.setattr(engine_calls, "HEALTH_INTERVAL_S", 0.01)
    server = await launched()
    server.fake.answers_rpc, server.fake.is_dead = False, True
    with pytest.raises(WeightUpdateError, match=r"update 1 \(version 5\) failed: EngineCore encountered an issue"):
        await server.receive_weights(round=1, version=5)
    assert await server.weights_failure() is not None


async def test_a_prefix_cache_that_is_not_cleared_fails_the_update():
    server = await launched()
    server.fake.forgets = False
    with pytest.raises(WeightUpdateError, match=r"update 1 .*prefix cache of the old weights was not cleared"):
        await server.receive_weights(round=1, version=5)
    assert (await server.rollout_statistics()).version == 0


async def test_an_update_that_a_training_rank_gives_up_ends_at_once_however_stuck_the_engine_is():
    server = await launched()
    server.fake.answers_rpc = False
    update = asyncio.create_task(server.receive_weights(round=2, version=5))
    await let_run()
    await server.give_up_update(round=1, reason="the one before")
    await let_run()
    assert not update.done()
    await server.give_up_update(round=2, reason="rank 1: silent for 30 s")
    with pytest.raises(WeightUpdateError, match=r"update 2 \(version 5\) failed: rank 1: silent for 30 s"):
        await asyncio.wait_for(update, LONG_S)
    assert "silent for 30 s" in await server.weights_failure()


async def test_an_update_that_was_given_up_before_its_call_came_fails_too():
    server = await launched()
    server.fake.answers_rpc = False
    await server.give_up_update(round=1, reason="no hello")
    with pytest.raises(EngineDead, match="update 1 was given up: no hello"):
        await asyncio.wait_for(server.receive_weights(round=1, version=5), LONG_S)
    assert "no hello" in await server.weights_failure()


async def test_an_update_that_a_rank_gives_up_after_the_engine_took_it_is_to_be_sent_again():
    server = await launched()
    await server.receive_weights(round=1, version=5)
    await server.give_up_update(round=1, reason="the confirmation was lost")
    assert "the confirmation was lost" in await server.weights_failure()
    with pytest.raises(EngineDead, match="confirmation was lost"):
        await server.open_submission_gate()


async def test_an_engine_that_dies_while_it_forgets_its_caches_is_noticed(monkeypatch):
    monkeypatch.setattr(engine_calls, "HEALTH_INTERVAL_S", 0.01)
    server = await launched()
    server.fake.answers_reset, server.fake.is_dead = False, True
    with pytest.raises(WeightUpdateError, match=r"update 1 \(version 5\) failed: EngineCore encountered an issue"):
        await asyncio.wait_for(server.receive_weights(round=1, version=5), LONG_S)


@pytest.mark.parametrize("fault", ["dead", "stuck"])
async def test_an_engine_that_does_not_wake_up_for_an_update_is_to_be_relaunched(monkeypatch, fault):
    monkeypatch.setattr(engine_calls, "HEALTH_INTERVAL_S", 0.01)
    server = await launched(PartialRolloutConfig(weights=WeightsConfig(timeout_s=20.0 if fault == "dead" else 0.05)))
    server.fake.answers_wake_up, server.fake.is_dead = False, fault == "dead"
    with pytest.raises(WeightUpdateError, match=r"did not wake up \(\['weights'\]\)"):
        await server.wake_up(["weights"])
    assert "did not wake up" in await server.weights_failure()
    await server.relaunch()
    await server.wake_up(["weights"])
    assert server.fake.calls == ["wake up ['weights']", "reset prefix cache"]


async def after_a_failed_update() -> FakeServer:
    server = await launched()
    await server.set_global_steps(4)
    await server.abort_all_requests()
    server.fake.rpc_failure = FAILURE
    with pytest.raises(WeightUpdateError, match=r"replica 0 node 0 .*update 1 \(version 5\).*tensor 'a' does not fit"):
        await server.receive_weights(round=1, version=5)
    return server


async def test_after_a_failed_weight_update_nothing_is_generated():
    server = await after_a_failed_update()
    server.fake.rpc_failure = None
    parked = start(server)
    for call in (server.open_submission_gate(), server.require_health(), server.receive_weights(round=2, version=5)):
        with pytest.raises(EngineDead, match="tensor 'a' does not fit"):
            await call
    await let_run()
    assert not parked.done()
    assert server.fake.queues == {}
    assert (await server.rollout_statistics()).version == 4
    assert "tensor 'a'" in await server.weights_failure()
    await server.reject_parked()
    await parked


async def test_a_request_at_an_open_gate_learns_that_the_weights_are_broken():
    server = await launched()
    server.fake.rpc_failure = FAILURE
    with pytest.raises(WeightUpdateError):
        await server.receive_weights(round=1, version=5)
    with pytest.raises(EngineDead, match="holds half an update: .*tensor 'a' does not fit"):
        await start(server)
    assert (await server.rollout_statistics()).running == 0


async def test_a_relaunched_engine_serves_who_was_parked_once_it_was_sent_weights():
    server = await after_a_failed_update()
    parked, broken = start(server), server.fake
    await server.relaunch()
    assert broken.calls[-1] == "shutdown"
    assert server.fake.calls == ["pause abort True"]
    with pytest.raises(EngineDead, match="started with after a failed update: .*tensor 'a'"):
        await server.resume_generation()
    await server.receive_weights(round=2, version=5)
    assert await server.weights_failure() is None
    await server.resume_generation()
    await let_run()
    server.fake.finish("a", [5])
    output = await parked
    assert (output.token_ids, output.extra_fields["global_steps"]) == ([5], 5)


async def test_a_relaunched_engine_whose_update_fails_again_must_be_relaunched_again():
    server = await after_a_failed_update()
    await server.relaunch()
    server.fake.rpc_failure = RuntimeError("again")
    with pytest.raises(WeightUpdateError, match="again"):
        await server.receive_weights(round=2, version=5)
    with pytest.raises(EngineDead, match=r"must be relaunched .*update 2 .*again"):
        await server.receive_weights(round=3, version=5)


async def test_an_engine_behind_an_open_gate_is_not_paused_by_a_relaunch():
    server = await launched()
    await server.relaunch()
    assert server.fake.calls == []


async def test_an_engine_over_several_nodes_is_not_relaunched():
    server = await after_a_failed_update()
    server.nnodes = 2
    with pytest.raises(EngineDead, match="several nodes is not relaunched; .*tensor 'a'"):
        await server.relaunch()


async def test_an_engine_that_does_not_start_again_is_told_with_what_was_wrong_before(monkeypatch):
    server = await after_a_failed_update()

    async def run_server(args):
        raise RuntimeError("no such model")

    monkeypatch.setattr(server, "run_server", run_server)
    with pytest.raises(EngineDead, match="did not start again: no such model; .*tensor 'a'"):
        await server.relaunch()


async def test_progress_knows_of_every_running_request_what_it_has_and_what_it_may_still_make():
    server = await launched()
    task = start(server, origin=Origin("p", 2), is_resumption=True)
    await let_run()
    server.fake.stream("a", [5, 6])
    await let_run()
    max_tokens = PARAMS["max_tokens"]
    (running,) = (await server.progress()).running
    assert running == RunningRequest("a", "p", num_context=5, num_done=4, num_left=max_tokens - 2)
    server.fake.finish("a", [7])
    await task
    progress = await server.progress()
    assert (progress.running, progress.finished) == ((), {"p": [5]})


class NotingMeter(EngineMeter):
    def __init__(self):
        super().__init__()
        self.noted = []

    def begin(self, *args, stayed, **kwargs):
        self.noted.append(stayed)
        super().begin(*args, stayed=stayed, **kwargs)

    def tokens(self, request_id, num_tokens, now_s, num_cached):
        self.noted.append(num_cached)
        super().tokens(request_id, num_tokens, now_s, num_cached)


async def test_the_meter_is_told_what_was_found_in_a_cache_and_what_stayed_in_the_engine():
    server = await launched(with_mode("keep_kv"))
    server.engine._meter = server._meter = meter = NotingMeter()
    task = start(server)
    await let_run()
    server.fake.queues["a"].put(fake_output([5], num_cached_tokens=2))
    await let_run()
    await server.abort_all_requests()
    again = start(server, "b", is_resumption=True, retained=(await task).extra_fields["retained"])
    await let_run()
    await server.resume_generation()
    await let_run()
    server.fake.finish("a", [7])
    await again
    assert meter.noted == [False, 2, 0, True, 0]  # the mark of the cut has no tokens


async def test_what_a_boundary_waits_for_ends_and_the_rest_is_interrupted_by_the_drain():
    server = await launched()
    ending, other = start(server), start(server, "b")
    await let_run()
    waiting = asyncio.create_task(server.let_end(["a"], 5.0))
    await let_run()
    late = start(server, "c")
    server.fake.finish("a", [5])
    assert await waiting == []
    assert (await ending).stop_reason == "completed"
    await server.abort_all_requests()
    assert (await other).stop_reason == "aborted"
    assert (await server.progress()).history == (1,)
    await server.reject_parked()
    assert (await late).extra_fields["rejected"]
