"""All requests of a training step share one window, whenever they join and however they are interrupted."""

from __future__ import annotations

import asyncio

import torch

from partial_rollout.diffusion.contract import QWEN_IMAGE, resolve
from partial_rollout.diffusion.sampling import Interrupted
from partial_rollout.diffusion.sde_window import WindowPlan
from tests.omni.support import NUM_STEPS, training_model

PLAN = WindowPlan(size=2, first=0, last=NUM_STEPS)
RUN_SEED = 0
"""Draws windows of which the interruption divides one and lies before the other."""


def test_late_and_interrupted_requests_of_a_step_are_trained_on_its_window(rig, tiny_qwen_image):
    """Two steps at once, with windows that neither share; an interruption and new weights half-way."""
    adapter = resolve(QWEN_IMAGE, "mix_grpo", step_execution=True)

    def drawn(step, seed):
        return adapter.window(PLAN, run_seed=RUN_SEED, global_step=step, request_seed=seed)

    wanted = [drawn(step, 0) for step in (0, 1)]
    assert wanted[0] != wanted[1]
    requests = {
        f"step-{step}-{seed}": rig.request(f"step-{step}-{seed}", window=drawn(step, seed), seed=seed)
        for seed in (0, 1)
        for step in (0, 1)
    }

    async def interrupted():
        tasks = await rig.begin(*requests.values(), joins={"step-0-1": 2, "step-1-1": 3}, hold_after=5)
        await rig.server.release("test")
        await rig.stopped()
        await rig.server.drain()
        outcomes = await asyncio.gather(*tasks)
        assert [outcome.step_index for outcome in outcomes] == [5, 5, 3, 2]
        assert all(isinstance(outcome, Interrupted) for outcome in outcomes)
        await rig.update(training_model(tiny_qwen_image, noise=0.05))
        await rig.server.resume()
        resumed = [one.resumed_from(two.snapshot) for one, two in zip(requests.values(), outcomes, strict=True)]
        return await asyncio.gather(*(rig.server.generate(request) for request in resumed))

    try:
        results = rig.run(interrupted())
    finally:
        rig.run(rig.update(training_model(tiny_qwen_image)))
    for result in results:
        window = wanted[int(result.request_id.split("-")[1])]
        assert result.window == window
        assert len(set(result.versions)) == 2
        assert result.latents.shape[0] == len(window) + 1
        assert torch.allclose(result.timesteps, result.sigmas[window.start : window.stop] * 1000)
