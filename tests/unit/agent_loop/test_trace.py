"""A trajectory's generate calls add up, whatever its agent loop forwards."""

import asyncio
from types import SimpleNamespace

from partial_rollout.agent_loop.trace import RecordingClient, start_trace
from partial_rollout.types import ContextSpan, VersionSpan


class _Client:
    def __init__(self, *outputs: dict) -> None:
        self._outputs = list(outputs)
        self.tokenizer = "tokenizer"

    async def generate(self) -> SimpleNamespace:
        return SimpleNamespace(extra_fields=self._outputs.pop(0))


async def test_turns_add_up_and_equal_versions_merge() -> None:
    client = RecordingClient(
        _Client(
            {
                "num_interruptions": 1,
                "num_reprefilled_tokens": 10,
                "version_spans": [[3, 5], [4, 2]],
                "context_spans": [[3, "keep_kv", 7]],
            },
            {
                "num_interruptions": 0,
                "num_reprefilled_tokens": 0,
                "version_spans": [[4, 7]],
                "context_spans": [[4, "fresh", 7]],
            },
        )
    )
    trace = start_trace()
    await client.generate()
    await client.generate()
    assert trace.num_interruptions == 1
    assert trace.num_reprefilled_tokens == 10
    assert trace.spans == [VersionSpan(3, 5), VersionSpan(4, 9)]
    assert trace.context_spans == [ContextSpan(3, "keep_kv", 7), ContextSpan(4, "fresh", 7)]


async def test_concurrent_trajectories_do_not_mix() -> None:
    client = RecordingClient(_Client({"version_spans": [[1, 1]]}, {"version_spans": [[2, 2]]}))

    async def trajectory() -> list[VersionSpan]:
        trace = start_trace()
        await asyncio.sleep(0)
        await client.generate()
        return trace.spans

    assert await asyncio.gather(trajectory(), trajectory()) == [[VersionSpan(1, 1)], [VersionSpan(2, 2)]]


def test_other_attributes_are_the_wrapped_clients() -> None:
    assert RecordingClient(_Client()).tokenizer == "tokenizer"
