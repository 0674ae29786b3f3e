"""Servers around a fake engine, and what tests do with them."""

from __future__ import annotations

import asyncio
from typing import Any

from partial_rollout.settings.block import PartialRolloutConfig, TailConfig, WeightsConfig
from tests.fake_engine import FakeServer

PARAMS = {"max_tokens": 50}


async def launched(settings: PartialRolloutConfig | None = None) -> FakeServer:
    server = FakeServer(settings)
    await server.launch_server()
    return server


async def let_run() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def start(server: FakeServer, request_id: str = "a", **options) -> asyncio.Task:
    return asyncio.create_task(server.generate([1, 2, 3], dict(PARAMS), request_id, **options))


def with_mode(name: str) -> PartialRolloutConfig:
    return PartialRolloutConfig(tail=TailConfig(interrupt_mode=name))


def without_relaunches(name: str = "abort", **blocks: Any) -> PartialRolloutConfig:
    return PartialRolloutConfig(tail=TailConfig(interrupt_mode=name), weights=WeightsConfig(relaunches=0), **blocks)


async def cut(server: FakeServer, *tokens: int, request_id: str = "a", **options):
    """Generate, be interrupted after `tokens`, and return the segment."""
    task = start(server, request_id, **options)
    await let_run()
    if tokens:
        server.fake.stream(request_id, list(tokens))
    await server.abort_all_requests()
    return await task
