"""Interrupted between any two denoise steps and resumed, a request ends as if it had not been."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from partial_rollout.diffusion.sampling import Interrupted
from partial_rollout.diffusion.server import PACK
from partial_rollout.errors import (
    DrainTimeout,
    EngineDead,
    EngineError,
    IllegalTransition,
    WaitTimeout,
    WeightUpdateError,
)
from partial_rollout.weights.protocol.engine_weights import EngineWeights
from tests.omni.support import NUM_STEPS, adapted_part, first_difference, recomputed, training_model

STEPS = [1, 4, NUM_STEPS - 1]


def assert_equal(result, reference):
    for field in ("final", "latents", "log_probs", "timesteps"):
        assert torch.equal(getattr(result, field), getattr(reference, field)), field
    assert (result.image == reference.image).all()


@pytest.mark.parametrize("step", STEPS)
def test_held_in_place_and_released_it_is_bit_exact(rig, step):
    async def held():
        [task] = await rig.stop_after(rig.request("held"), cycles=step)
        await rig.server.hold()
        assert not task.done()
        await rig.server.release()
        return await task

    [reference] = rig.generate(rig.request("held"))
    before = rig.count_steps()
    result = rig.run(held())
    assert_equal(result, reference)
    assert rig.count_steps() - before == NUM_STEPS


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("guided", [False, True])
def test_from_a_snapshot_it_is_bit_exact(rig, step, guided):
    request = rig.request("snapshot", guided=guided)

    async def interrupted():
        [task] = await rig.stop_after(request, cycles=step)
        names = await rig.server.drain()
        outcome = await task
        parked = asyncio.ensure_future(rig.server.generate(request.resumed_from(outcome.snapshot)))
        await asyncio.sleep(0)
        assert rig.server.statistics().gate.parked == 1
        await rig.server.resume()
        return names, outcome, await parked

    [reference] = rig.generate(request)
    before = rig.count_steps()
    names, outcome, result = rig.run(interrupted())
    # No denoise step is computed twice, in whichever part.
    assert rig.count_steps() - before == NUM_STEPS
    assert isinstance(outcome, Interrupted)
    assert outcome.step_index == step
    assert [name.partition("#")[0] for name in names] == ["snapshot"]
    assert_equal(result, reference)


def test_what_was_packed_for_a_drain_that_never_learnt_of_it_is_packed_again(rig):
    """The deadline of a drain may fall when the workers have packed and the server does not know yet."""
    request, step, call = rig.request("again"), 4, rig.server._call

    async def lost(method, *arguments, **options):
        answer = await call(method, *arguments, **options)
        if method == PACK:
            raise WaitTimeout("lost")
        return answer

    async def interrupted():
        [task] = await rig.stop_after(request, cycles=step)
        rig.server._call = lost
        with pytest.raises(DrainTimeout):
            await rig.server.drain()
        rig.server._call = call
        with pytest.raises(IllegalTransition, match="gate draining"):
            await rig.server.resume()
        await rig.server.drain()
        outcome = await task
        await rig.server.resume()
        return outcome.step_index, await rig.server.generate(request.resumed_from(outcome.snapshot))

    [reference] = rig.generate(request)
    before = rig.count_steps()
    found, result = rig.run(interrupted())
    assert found == step
    assert rig.count_steps() - before == NUM_STEPS
    assert_equal(result, reference)


def test_started_anew_the_steps_before_are_counted_as_well(rig):
    request, step = rig.request("anew"), 4

    async def regenerated():
        [task] = await rig.stop_after(request, cycles=step)
        await rig.server.drain()
        await task
        await rig.server.resume()
        return await rig.server.generate(request)

    before = rig.count_steps()
    rig.run(regenerated())
    assert rig.count_steps() - before == step + NUM_STEPS


def test_interrupted_twice_and_with_company_it_is_as_without(rig):
    """Two requests of unlike prompts and ages: what is resumed is padded anew, and nobody else's noise is used."""
    requests = [rig.request("a"), rig.request("b", prompt="a much longer prompt than the other one")]

    async def once(requests, cycles):
        tasks = await rig.stop_after(*requests, cycles=cycles)
        await rig.server.drain()
        outcomes = await asyncio.gather(*tasks)
        await rig.server.resume()
        return [request.resumed_from(outcome.snapshot) for request, outcome in zip(requests, outcomes, strict=True)]

    references = rig.generate_scripted(*requests)
    resumed = rig.run(once(rig.run(once(requests, 3)), 4))
    for result, reference in zip(rig.generate_scripted(*resumed), references, strict=True):
        assert_equal(result, reference)


def test_a_request_that_had_not_begun_comes_back_without_a_snapshot(rig):
    async def drained():
        tasks = await rig.begin(rig.request("early"))
        await rig.server.drain()
        await rig.server.release("test")
        await rig.server.resume()
        return await tasks[0]

    assert rig.run(drained()) == Interrupted(None, 0, rig.server.statistics().gate.openings - 1)


@pytest.mark.parametrize("in_place", [True, False])
def test_after_an_update_the_first_new_latents_are_the_first_after_it(rig, tiny_qwen_image, in_place):
    step, request = 4, rig.request("updated")

    async def updated():
        [task] = await rig.stop_after(request, cycles=step)
        if in_place:
            await rig.server.hold()
            version = await rig.update(training_model(tiny_qwen_image, noise=0.05))
            await rig.server.release()
            return version, await task
        await rig.server.drain()
        outcome = await task
        version = await rig.update(training_model(tiny_qwen_image, noise=0.05))
        await rig.server.resume()
        return version, await rig.server.generate(request.resumed_from(outcome.snapshot))

    [reference] = rig.generate(request)
    before = reference.versions[0]
    try:
        version, result = rig.run(updated())
    finally:
        rig.run(rig.update(training_model(tiny_qwen_image)))
    assert version == before + 1
    assert result.versions == (before,) * step + (version,) * (NUM_STEPS - step)
    # latents[0] are those before the first step.
    assert first_difference(result.latents, reference.latents) == step + 1


def test_an_abandoned_request_leaves_nothing_behind_and_its_id_can_be_used_at_once(rig):
    async def abandoned():
        [task] = await rig.stop_after(rig.request("again"), cycles=3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await rig.server.release()
        tasks = await rig.begin(rig.request("again"))
        await rig.server.release("test")
        return await tasks[0]

    [reference] = rig.generate(rig.request("again"))
    assert_equal(rig.run(abandoned()), reference)
    assert rig.server.statistics().gate.in_flight == 0


def test_on_a_cpu_the_engine_answers_that_it_cannot_sleep_and_goes_on(rig, monkeypatch):
    """The engine was started without sleep mode, with which none starts on a CPU."""
    monkeypatch.setattr(rig.server, "options", dataclasses.replace(rig.server.options, sleep_mode=True))

    async def tried():
        await rig.server.drain()
        for call in (rig.server.sleep, rig.server.wake):
            with pytest.raises(EngineError, match="cumem allocator is not available"):
                await call()
        rig.server._asleep = False
        await rig.server.resume()

    rig.run(tried())
    assert len(rig.generate(rig.request("awake"))) == 1


def test_a_snapshot_fits_its_own_request_only(rig):
    async def drained():
        [task] = await rig.stop_after(rig.request("fits"), cycles=2)
        await rig.server.drain()
        outcome = await task
        await rig.server.resume()
        return outcome.snapshot

    snapshot = rig.run(drained())
    with pytest.raises(Exception, match="its snapshot has"):
        rig.generate(rig.request("fits", height=32).resumed_from(snapshot))
    with pytest.raises(Exception, match="damaged snapshot|no snapshot"):
        rig.generate(rig.request("fits").resumed_from(snapshot[: len(snapshot) // 3]))


def test_what_a_part_of_the_weights_leaves_out_stays_and_what_is_not_the_models_is_refused(tiny_qwen_image, rig):
    base, moved = training_model(tiny_qwen_image), training_model(tiny_qwen_image, noise=0.05)
    rig.run(rig.update(base))
    rig.run(rig.update(moved, leave_out="proj_out.weight", is_part=True))
    try:
        [image] = rig.generate(rig.request("part"))
        both = moved.state_dict() | {"proj_out.weight": base.state_dict()["proj_out.weight"]}
        moved.load_state_dict(both)
        assert (recomputed(moved, image) - image.log_probs).abs().max() < 1e-4
        with pytest.raises(WeightUpdateError, match=r"1 of 1 parameters are not the model's: transformer.proj_in.bias"):
            rig.run(rig.send([("proj_in.bias", torch.zeros(4))], is_part=True))
    finally:
        rig.server._weights = EngineWeights()
        rig.run(rig.update(training_model(tiny_qwen_image)))


def test_a_part_of_the_weights_rests_on_what_the_engine_has_loaded(tiny_qwen_image, whole):
    model = training_model(tiny_qwen_image)
    model.load_state_dict(model.state_dict() | adapted_part(tiny_qwen_image))
    deviations = [(recomputed(model, whole[name]) - whole[name].log_probs).abs().max() for name in ("part", "plain")]
    assert deviations[0] < 1e-4 < deviations[1]


def test_an_update_without_weights_is_refused(tiny_qwen_image, rig):
    try:
        with pytest.raises(WeightUpdateError, match="the update has no weights"):
            rig.run(rig.send([], is_part=True))
    finally:
        rig.server._weights = EngineWeights()
        rig.run(rig.update(training_model(tiny_qwen_image)))


def test_after_half_an_update_the_engine_refuses(tiny_qwen_image, rig):
    transformer = training_model(tiny_qwen_image)
    with pytest.raises(WeightUpdateError, match=r"1 of \d+ parameters were not sent: transformer.proj_out.bias"):
        rig.run(rig.update(transformer, leave_out="proj_out.bias"))
    with pytest.raises(EngineDead, match="half an update"):
        rig.generate(rig.request("late"))
    rig.server._weights = EngineWeights()
