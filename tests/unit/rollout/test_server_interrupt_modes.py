"""What a server keeps of interrupted requests in each interrupt mode, and what of their KV is found again."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("vllm")


from partial_rollout.core.engine_meter import EngineMeter
from partial_rollout.core.interrupt import Context
from partial_rollout.errors import DrainTimeout, EngineDead, EngineError
from partial_rollout.rollout import gated_engine
from partial_rollout.rollout.gated_engine import Interruption
from partial_rollout.settings.block import PartialRolloutConfig, TailConfig, TimeoutConfig
from tests.fake_engine import FakeServer
from tests.unit.rollout.servers import cut, launched, let_run, start, with_mode, without_relaunches

LLAMA: dict[str, object] = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"), 4)
LLAMA["model_type"] = "llama"


async def test_a_kept_request_hands_over_its_tokens_and_goes_on_where_it_is():
    server = await launched(with_mode("keep_kv"))
    first = await cut(server, 5, 6)
    assert (first.token_ids, first.stop_reason) == ([5, 6], "aborted")
    statistics = await server.rollout_statistics()
    assert (statistics.gate.in_flight, statistics.kept) == (0, 1)
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
    assert (await server.rollout_statistics()).num_reprefilled_tokens == 0
    assert server.fake.calls == ["add a", "pause keep False", "resume"]
    assert (await server.rollout_statistics()).kept == 0


async def test_what_the_front_end_takes_in_late_still_belongs_to_the_segment_before():
    server = await launched(with_mode("keep_kv"))
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
    server = await launched(with_mode("keep_kv"))
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
    server = await launched(with_mode("keep_kv"))
    first = await cut(server, 5)
    waits = start(server, "b", is_resumption=True, retained=first.extra_fields["retained"])
    await let_run()
    await server.reject_parked()
    assert (await waits).extra_fields["rejected"]
    await server.resume_generation()
    assert server.fake.calls[2:] == ["abort a", "resume"]


async def test_an_engine_that_dies_with_kept_requests_is_named():
    server = await launched(without_relaunches("keep_kv"))
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
    await server.receive_weights(update_number=1, version=5)
    waits = start(server, "b", is_resumption=True, retained=first.extra_fields["retained"])
    await let_run()
    await server.resume_generation()
    await let_run()
    server.fake.finish("b", [6])
    assert (await waits).extra_fields["context"] == Context(5, "abort")


async def test_draining_twice_keeps_what_is_kept():
    server = await launched(with_mode("keep_kv"))
    await cut(server, 5)
    assert (await server.abort_all_requests())["aborted_count"] == 0
    assert (await server.rollout_statistics()).kept == 1


async def test_a_drain_that_nobody_takes_tokens_in_for_is_bounded():
    server = await launched(without_relaunches("keep_kv", timeouts=TimeoutConfig(drain_s=1.0)))
    server.fake.engine_core.outputs_queue.put_nowait("a message that stays")
    with pytest.raises(DrainTimeout):
        await server.abort_all_requests()
    server.fake.errored = True
    with pytest.raises(EngineDead):
        await server.abort_all_requests()


async def test_only_a_mode_that_retains_nothing_forgets_the_prefix_cache():
    calls = {}
    for name in ("abort", "keep_kv", "reuse_kv", "offload_kv"):
        tail = TailConfig(interrupt_mode=name, offload_gib=1 if name == "offload_kv" else None)
        server = await launched(PartialRolloutConfig(tail=tail))
        await server.abort_all_requests()
        await server.receive_weights(update_number=1, version=5)
        calls[name] = [call for call in server.fake.calls if "mm" not in call and "encoder" not in call]
    update = "rpc receive_weights"
    assert calls == {
        "abort": ["pause abort True", update, "reset prefix cache"],
        "keep_kv": ["pause keep False", update],
        "reuse_kv": ["pause abort False", update],
        "offload_kv": ["pause abort False", update, "reset prefix cache, not the connector's"],
    }


async def test_salts_part_openings_and_follow_a_request_through_them():
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
        await server.receive_weights(update_number=version, version=version)
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
        await server.receive_weights(update_number=version, version=version)
        task = start(server, str(version))
        await let_run()
        server.fake.finish(str(version), [7])
        await task
    assert server.fake.prompts["3"]["cache_salt"] != server.fake.prompts["4"]["cache_salt"]


async def test_nothing_is_salted_where_nothing_is_retained():
    server = await launched(with_mode("abort"))
    assert (await cut(server, 5)).extra_fields["retained"] is None
    assert "cache_salt" not in server.fake.prompts["a"]


async def test_memory_that_is_released_is_not_forgotten_by_the_connector():
    server = await launched(PartialRolloutConfig(tail=TailConfig(interrupt_mode="offload_kv", offload_gib=4)))
    await server.engine.sleep(level=2)
    await server.engine.wake_up(tags=["kv_cache"])
    assert server.fake.calls == ["reset prefix cache, not the connector's", "rpc sleep", "rpc wake_up"]


async def test_an_engine_that_slept_by_itself_wakes_up_by_itself():
    server = await launched(with_mode("abort"))
    await server.engine.wake_up(tags=["kv_cache"])
    assert server.fake.calls == ["wake up ['kv_cache']"]


async def test_memory_that_somebody_still_uses_is_not_released():
    server = await launched(PartialRolloutConfig(tail=TailConfig(interrupt_mode="offload_kv", offload_gib=4)))
    server.fake.forgets = False
    with pytest.raises(EngineError, match="cannot release its memory"):
        await server.engine.sleep(level=2)
    assert "rpc sleep" not in server.fake.calls


def test_the_modes_settings_reach_the_engine():
    given = {}
    Interruption(PartialRolloutConfig()).engine_arguments(given, {})
    assert given == {"stream_interval": 32}
    given = {}
    Interruption(with_mode("keep_kv")).engine_arguments(given, {})
    assert given == {"stream_interval": 1}
    offload = Interruption(PartialRolloutConfig(tail=TailConfig(interrupt_mode="offload_kv", offload_gib=4)))
    given = {}
    offload.engine_arguments(given, {})
    connector = given.pop("kv_transfer_config")
    assert given == {"stream_interval": 32}
    assert (connector["kv_connector"], connector["kv_role"]) == ("OffloadingConnector", "kv_both")
    assert connector["kv_connector_extra_config"] == {"cpu_bytes_to_use": 4 * 1024**3, "offload_prompt_only": False}


@pytest.mark.parametrize(
    ("model", "block", "copied"),
    [
        (LLAMA, {}, 64),
        (LLAMA, {"block_size": 32}, 64),
        (LLAMA, {"block_size": 128}, None),
        (LLAMA, {"block_size": 48}, None),
        (LLAMA, {"decode_context_parallel_size": 8}, None),
        (LLAMA | {"layer_types": ["full_attention", "linear_attention"]}, {}, None),
        ({"model_type": "deepseek_v3"}, {}, None),
    ],
    ids=[
        "plain",
        "blocks of 32",
        "blocks that are larger",
        "no multiple",
        "blocks of 8 ranks",
        "a layer without KV",
        "another attention",
    ],
)
def test_kv_is_copied_to_host_memory_in_pieces_that_vllm_takes(model, block, copied):
    given = dict(block)
    offload = Interruption(PartialRolloutConfig(tail=TailConfig(interrupt_mode="offload_kv", offload_gib=4)))
    offload.engine_arguments(given, model)
    assert given["kv_transfer_config"]["kv_connector_extra_config"].get("block_size") == copied


async def test_host_memory_has_no_name_once_the_engine_is_up(monkeypatch, tmp_path):
    monkeypatch.setattr(gated_engine, "SHARED_MEMORY", tmp_path)
    server = FakeServer(PartialRolloutConfig(tail=TailConfig(interrupt_mode="offload_kv", offload_gib=4)))
    given = {}
    server._interruption.engine_arguments(given, {})
    own, other = (tmp_path / f"vllm_offload_{name}.mmap" for name in (given["kv_transfer_config"]["engine_id"], "b"))
    for launch in (server.launch_server, server.relaunch):
        own.touch()
        other.touch()
        await launch()
        assert (own.exists(), other.exists()) == (False, True)


async def test_the_time_between_two_segments_is_not_part_of_a_decode_step():
    server = await launched(with_mode("keep_kv"))
    server.engine._meter = server._meter = meter = NotingMeter()
    task = start(server)
    await let_run()
    server.fake.stream("a", [5])
    await let_run()
    await server.abort_all_requests()
    again = start(server, "b", is_resumption=True, retained=(await task).extra_fields["retained"])
    await let_run()
    await server.resume_generation()
    await let_run()
    server.fake.finish("a", [7])
    await again
    assert meter.noted == ["begin a", "1 of a", "0 of a", "end a", "begin b", "1 of b", "end b"]


class NotingMeter(EngineMeter):
    def __init__(self):
        super().__init__()
        self.noted = []

    def begin(self, request_id):
        self.noted.append(f"begin {request_id}")
        super().begin(request_id)

    def tokens(self, request_id, num_tokens, now_s):
        self.noted.append(f"{num_tokens} of {request_id}")
        super().tokens(request_id, num_tokens, now_s)

    def end(self, request_id):
        self.noted.append(f"end {request_id}")
        super().end(request_id)
