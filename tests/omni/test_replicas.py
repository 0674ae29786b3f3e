"""Two servers as Ray actors: requests move between them, and a job interrupts both at every weight update."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from partial_rollout.diffusion.actor import FlowGrpoActor
from partial_rollout.diffusion.config import DiffusionConfig
from partial_rollout.diffusion.contract import QWEN_IMAGE, resolve
from partial_rollout.diffusion.job import DiffusionJob
from partial_rollout.diffusion.replicas import Replicas
from partial_rollout.diffusion.sampling import Interrupted
from partial_rollout.diffusion.server import DiffusionServer
from partial_rollout.rollout.admission import Broadcast
from partial_rollout.run.tiny_qwen_image.reward import redness
from tests.omni.support import NUM_STEPS, PATCH, Rig, options, recomputed, training_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from partial_rollout.diffusion.sde_window import SdeWindow

START_S = 120
LONG = 50


class WaitingServer(DiffusionServer):
    """Says when its engine has so many requests."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._num_arrived, self._moved = 0, Broadcast()

    async def wait_for_arrivals(self, number: int) -> None:
        await asyncio.wait_for(self._moved.wait_for(lambda: self._num_arrived >= number), START_S)

    def _arrived(self, *arguments: Any) -> None:
        super()._arrived(*arguments)
        self._num_arrived += 1
        self._moved.notify()


@pytest.fixture(scope="module")
def servers(ray_cluster: Any, tiny_qwen_image: Path) -> Iterator[list[Any]]:
    given = options(tiny_qwen_image, step_execution=True)
    given = dataclasses.replace(given, engine_backend="partial_rollout.diffusion.engine.HoldableEngine")
    actor = ray_cluster.remote(WaitingServer).options(num_cpus=0, max_concurrency=100)
    servers = [actor.remote(given) for _ in range(2)]
    ray_cluster.get([server.statistics.remote() for server in servers], timeout=START_S)
    yield servers
    ray_cluster.get([server.shutdown.remote() for server in servers], timeout=START_S)


def test_a_sample_moves_to_another_server_and_both_take_new_weights(servers, rig: Rig, tiny_qwen_image: Path):
    first, second = servers
    requests = [rig.request(f"move-{number}", num_steps=LONG) for number in range(4)]

    async def moved():
        tasks = [asyncio.ensure_future(to_task(first.generate.remote(request))) for request in requests]
        await first.wait_for_arrivals.remote(len(requests))
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


CPU = torch.device("cpu")
LEAST_STEPS, MOST_STEPS = 4, 16
TRAINED_STEPS = 12
MIX_WINDOW = 4
PREFETCH = 4.0
"""Waves of images in the engines: so many that a job which reacts late still finds one half-way."""


class RecordingActor(FlowGrpoActor):
    """Keeps what it trained on, and the weights of every version."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__(config, PATCH, CPU)
        self.trained: list[Any] = []
        self.windows: list[set[SdeWindow]] = []
        """Windows of each training step."""
        self.models = [copy.deepcopy(self.transformer)]

    def update(self, groups: Any) -> dict[str, float]:
        results = [result for group in groups for result in group.results]
        self.trained += results
        self.windows.append({result.window for result in results})
        metrics = super().update(groups)
        self.models.append(copy.deepcopy(self.transformer))
        return metrics


def job_config(model: Path, algorithm: str, interrupt: str, lora_rank: int) -> DiffusionConfig:
    """A step has as many images as both servers have places for; FlowGRPO's window has every denoise step of each."""
    window = {"flow_grpo": TRAINED_STEPS, "mix_grpo": MIX_WINDOW}[algorithm]
    return DiffusionConfig.from_mapping(
        {
            "model": {"path": str(model), "dtype": "float32", "lora_rank": lora_rank},
            "data": {"prompts": "unused"},
            "trainer": {"output_dir": "unused", "reward": "un.used", "train_batch_size": 2, "timeout_s": 60.0},
            "algorithm": {
                **{"name": algorithm, "sde_window_size": window, "sde_window_last": TRAINED_STEPS, "clip_ratio": 0.1}
            },
            "rollout": {
                **{"interrupt": interrupt, "n": 4, "num_steps": TRAINED_STEPS, "height": 64, "width": 64},
                **{"max_num_seqs": 4, "num_servers": 2, "gpus_per_server": 0, "prefetch_factor": PREFETCH},
            },
            "actor": {"device": "cpu", "gradient_checkpointing": False, "micro_batch_size": 32, "lr": 1e-2},
        }
    )


@pytest.mark.parametrize(
    ("algorithm", "interrupt", "lora_rank"),
    [("flow_grpo", "hold", 4), ("flow_grpo", "snapshot", 0), ("mix_grpo", "snapshot", 0)],
)
def test_a_job_trains_on_what_its_updates_interrupted(
    servers: list[Any], rig: Rig, tiny_qwen_image: Path, algorithm: str, interrupt: str, lora_rank: int
):
    """Each denoise step is by the weights of the version that it is marked with, whichever update came in between.

    None is computed that no image has, and what one step of MixGRPO trains has one window.
    """
    config = job_config(tiny_qwen_image, algorithm, interrupt, lora_rank)
    actor = RecordingActor(config)
    replicas = Replicas(servers, workers_per_server=1, timeout_s=START_S, sample_timeout_s=START_S)
    job = DiffusionJob(
        config,
        adapter=resolve(QWEN_IMAGE, algorithm, step_execution=True),
        replicas=replicas,
        actor=actor,
        tokenizer=rig.tokenizer,
        prompts=["a red square", "a rather long description of a green circle"],
        reward=redness,
    )

    async def computed() -> int:
        return sum(await asyncio.gather(*(server.count_steps.remote() for server in servers)))

    async def interruptions() -> list[int]:
        statistics = await asyncio.gather(*(server.statistics.remote() for server in servers))
        return [each.num_interrupted for each in statistics]

    async def trained():
        await replicas.update(training_model(tiny_qwen_image).state_dict().items, 0, CPU, START_S)
        before, earlier = await computed(), await interruptions()
        metrics = [await job.step() for _ in range(LEAST_STEPS)]
        # The faster the engines, the more whole images wait to be trained before those that an update interrupted.
        while not sum(row["partial_rollout/resumed"] for row in metrics) and len(metrics) < MOST_STEPS:
            metrics.append(await job.step())
        left = [sampled.result for task in job._groups.values() for sampled in (await task).sampled]
        taken_out = [now > then for now, then in zip(await interruptions(), earlier, strict=True)]
        return metrics, left, await computed() - before, taken_out

    metrics, left, num_computed, taken_out = asyncio.run(trained())
    assert taken_out == [interrupt == "snapshot"] * len(servers)
    assert num_computed == TRAINED_STEPS * (len(actor.trained) + len(left))
    assert sum(row["partial_rollout/resumed"] for row in metrics) > 0
    assert (sum(row["partial_rollout/snapshots"] for row in metrics) > 0) == (interrupt == "snapshot")
    spanning = [result for result in actor.trained if len(set(result.versions)) > 1]
    assert spanning
    for result in spanning:
        assert list(result.versions) == sorted(result.versions)
        for version in set(result.versions):
            logged = result.versions[result.window.start : result.window.stop]
            taken = torch.tensor([found == version for found in logged])
            deviations = (recomputed(actor.models[version], result) - result.log_probs)[taken].abs()
            assert (deviations < 1e-5).all(), f"{result.request_id} by version {version}"
    if algorithm == "mix_grpo":
        assert all(len(windows) == 1 for windows in actor.windows)
        assert len(set.union(*actor.windows)) > 1


async def to_task(reference: Any) -> Any:
    return await reference
