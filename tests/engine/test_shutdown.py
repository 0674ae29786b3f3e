"""The end of a server leaves nothing behind."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest

pytestmark = pytest.mark.engine

EXIT_S = 60.0


async def test_shutdown_ends_every_process_of_the_engine(engine_cluster, tmp_path):
    from partial_rollout.errors import PartialRolloutError
    from partial_rollout.rollout.client import ResumingLLMServerClient
    from tests.engine import support

    support.make_model(tmp_path, seed=2)
    config = support.make_config(tmp_path)
    replica = await support.launch(config, replica_rank=2)
    pid = await replica.server_handle.__ray_call__.remote(lambda _: os.getpid())
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert len(processes) >= 3, "server, engine core and worker"
    client = ResumingLLMServerClient(config, support.make_router(replica))
    await replica.abort_all_requests()
    parked = asyncio.create_task(client.generate("p", prompt_ids=[5, 6], sampling_params={"max_tokens": 5}))
    await support.until(replica, lambda statistics: statistics.gate.parked == 1)
    await replica.shutdown()
    _, alive = psutil.wait_procs(processes, timeout=EXIT_S)
    assert alive == []
    with pytest.raises(PartialRolloutError):
        await parked
