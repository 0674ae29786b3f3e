"""Two servers as Ray actors: a request that one of them began ends in the other as if it had not moved."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from partial_rollout.core.sampling import Interrupted
from partial_rollout.diffusion.replicas import Replicas
from partial_rollout.diffusion.server import DiffusionServer
from tests.omni.support import NUM_STEPS, Rig, options, training_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START_S = 120
LONG = 50


@pytest.fixture(scope="module")
def servers(ray_cluster: Any, tiny_qwen_image: Path) -> Iterator[list[Any]]:
    given = options(tiny_qwen_image, step_execution=True)
    given = dataclasses.replace(given, engine_backend="partial_rollout.diffusion.engine.HoldableEngine")
    actor = ray_cluster.remote(DiffusionServer).options(num_cpus=0, max_concurrency=100)
    servers = [actor.remote(given) for _ in range(2)]
    ray_cluster.get([server.statistics.remote() for server in servers], timeout=START_S)
    yield servers
    ray_cluster.get([server.shutdown.remote() for server in servers], timeout=START_S)


def test_a_sample_moves_to_another_server_and_both_take_new_weights(servers, rig: Rig, tiny_qwen_image: Path):
    first, second = servers
    requests = [rig.request(f"move-{number}", num_steps=LONG) for number in range(4)]

    async def moved():
        tasks = [asyncio.ensure_future(to_task(first.generate.remote(request))) for request in requests]
        while (await first.statistics.remote()).gate.in_flight < len(requests):
            pass
        names = await first.drain.remote()
        outcomes = await asyncio.gather(*tasks)
        assert all(isinstance(outcome, Interrupted) for outcome in outcomes)
        there = [second.generate.remote(r.resumed_from(o.snapshot)) for r, o in zip(requests, outcomes, strict=True)]
        results = await asyncio.gather(*there)
        replicas = Replicas(servers, workers_per_server=1, timeout_s=START_S, sample_timeout_s=START_S)
        await replicas.update(
            training_model(tiny_qwen_image, noise=0.05).state_dict().items, 1, torch.device("cpu"), 60
        )
        await replicas.resume()
        new = await asyncio.gather(*(replicas.sample(rig.request("new")) for _ in range(2)))
        return names, results, new

    references = rig.generate(*requests)
    names, results, new = asyncio.run(moved())
    assert len(names) == len(requests)
    for result, reference in zip(results, references, strict=True):
        # Who shared the batch, and when, is not the same in both: rounding differs, noise does not.
        assert torch.allclose(result.latents, reference.latents, atol=1e-4)
    assert [item.result.versions for item in new] == [(1,) * NUM_STEPS] * 2
    assert torch.equal(new[0].result.latents, new[1].result.latents)


async def to_task(reference: Any) -> Any:
    return await reference
