"""The image server on a GPU: its engine gives its memory back while requests are interrupted, and they go on the same.

In the environment of requirements/omni-gpu.txt.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from partial_rollout.errors import EngineError

pytest.importorskip("vllm_omni", reason="vllm-omni is in an environment of its own: requirements/omni-gpu.txt")

CYCLES = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The tiny model."""
    from partial_rollout.run.tiny_qwen_image.make_checkpoint import make_checkpoint

    folder = tmp_path_factory.mktemp("qwen-image")
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def rig(checkpoint):
    """A step-wise server whose engine can sleep."""
    from tests.omni.support import Rig

    rig = Rig(checkpoint, step_execution=True, sleep_mode=True)
    yield rig
    rig.close()


def same(one, other):
    return [torch.equal(getattr(one, name), getattr(other, name)) for name in ("final", "latents", "log_probs")]


@pytest.mark.parametrize("guided", [False, True])
def test_a_snapshot_goes_on_after_the_engine_has_slept(rig, guided):
    request = rig.request("asleep", guided=guided)
    [whole] = rig.generate(request)

    async def interrupted():
        [task] = await rig.stop_after(request, cycles=CYCLES)
        await rig.server.drain()
        outcome = await task
        await rig.server.sleep()
        with pytest.raises(EngineError, match="sleeps"):
            await rig.server.receive_weights(1, 1.0)
        await rig.server.wake()
        await rig.server.resume()
        return outcome.step_index, await rig.server.generate(request.resumed_from(outcome.snapshot))

    step, resumed = rig.run(interrupted())
    assert step == CYCLES
    assert same(resumed, whole) == [True] * 3


def test_a_snapshot_goes_on_in_one_batch_with_new_requests(rig):
    request, other = rig.request("beside"), rig.request("new", seed=8)
    [whole], [alone] = rig.generate(request), rig.generate(other)

    async def interrupted():
        [task] = await rig.stop_after(request, cycles=CYCLES)
        await rig.server.drain()
        outcome = await task
        await rig.server.resume()
        # The two requests are in the engine before it takes the next step.
        tasks = await rig.begin(request.resumed_from(outcome.snapshot), other)
        await rig.server.release("test")
        return await asyncio.gather(*tasks)

    resumed, new = rig.run(interrupted())
    for image, reference in ((resumed, whole), (new, alone)):
        assert (image.log_probs - reference.log_probs).abs().max() < 1e-3


def test_a_held_request_goes_on_from_where_it_was(rig):
    request = rig.request("held")
    [whole] = rig.generate(request)

    async def held():
        [task] = await rig.stop_after(request, cycles=CYCLES)
        await rig.server.hold("update")
        await rig.server.release("update")
        return await task

    assert same(rig.run(held()), whole) == [True] * 3


def test_new_weights_reach_an_engine_that_has_slept(rig, checkpoint):
    from tests.omni.support import recomputed, training_model

    moved = training_model(checkpoint, noise=0.05)
    [before] = rig.generate(rig.request("weights"))

    async def updated():
        await rig.server.drain()
        await rig.server.sleep()
        await rig.server.wake()
        await rig.update(moved)
        await rig.server.resume()

    try:
        rig.run(updated())
        [after] = rig.generate(rig.request("weights"))
    finally:
        rig.run(rig.update(training_model(checkpoint)))
    assert not torch.equal(after.latents, before.latents)
    assert (recomputed(moved, after) - after.log_probs.cpu()).abs().max() < 1e-3
    assert (recomputed(moved, before) - before.log_probs.cpu()).abs().max() > 1e-3
