"""Step-wise execution computes what whole requests compute, whoever shares the batch."""

from __future__ import annotations

import pytest
import torch

from partial_rollout.diffusion.sde_window import NO_WINDOW, SdeWindow
from partial_rollout.errors import DataError
from tests.omni.support import NUM_STEPS, recomputed, training_model

INTERLEAVED_TOLERANCE = 1e-5
BFLOAT16_TOLERANCE = 0.05


@pytest.mark.parametrize("name", ["plain", "guided"])
def test_alone_it_equals_a_whole_request_bit_for_bit(rig, whole, name):
    [result] = rig.generate(rig.request(name, guided=name == "guided"))
    for field in ("final", "latents", "log_probs", "timesteps", "prompt_embeds"):
        assert torch.equal(getattr(result, field), getattr(whole[name], field)), field
    assert len(result.versions) == len(whole[name].versions) == NUM_STEPS
    assert len(set(result.versions)) == 1
    assert (result.image == whole[name].image).all()


def test_requests_that_join_late_change_nothing_beyond_rounding(rig, whole):
    requests = [rig.request("plain"), rig.request("other", prompt="a rather long description of a green circle")]
    first, second = rig.generate_scripted(*requests, joins={"other": 3})
    for result in (first, second):
        reference = whole[result.request_id]
        assert (result.latents - reference.latents).abs().max() <= INTERLEAVED_TOLERANCE
        assert result.prompt_embeds.shape == reference.prompt_embeds.shape
    again = rig.generate_scripted(*requests, joins={"other": 3})
    assert all(torch.equal(one.latents, two.latents) for one, two in zip((first, second), again, strict=True))


def test_a_batch_of_whole_requests_agrees_too(whole):
    for result in whole["together"]:
        assert (result.latents - whole[result.request_id].latents).abs().max() <= INTERLEAVED_TOLERANCE


@pytest.mark.parametrize("guided", [False, True])
def test_before_an_update_the_recomputed_ratio_is_one(rig, tiny_qwen_image, guided):
    [result] = rig.generate(rig.request("ratio", guided=guided))
    ratio = torch.exp(recomputed(training_model(tiny_qwen_image), result, 4.0 if guided else 1.0) - result.log_probs)
    # Guidance is combined in another order of operations there.
    assert torch.equal(ratio, torch.ones(NUM_STEPS)) or (guided and (ratio - 1).abs().max() < 1e-6)


def test_the_transformers_dtype_need_not_be_the_text_encoders(whole, tiny_qwen_image):
    """The checkpoint's text encoder is in float32, a real one in bfloat16."""
    result, exact = whole["bfloat16"], whole["guided"]
    assert 0 < (result.latents - exact.latents).abs().max() < BFLOAT16_TOLERANCE
    ratio = torch.exp(recomputed(training_model(tiny_qwen_image).to(torch.bfloat16), result, 4.0) - result.log_probs)
    assert (ratio - 1).abs().max() < BFLOAT16_TOLERANCE


def test_the_other_sde_has_its_own_noise_and_agrees_as_well(rig, tiny_qwen_image):
    window = SdeWindow(0, NUM_STEPS - 1)
    [cps] = rig.generate(rig.request("ratio", sde_type="cps", window=window))
    [sde] = rig.generate(rig.request("ratio", window=window))
    assert not torch.equal(cps.latents[1], sde.latents[1])
    model = training_model(tiny_qwen_image)
    assert torch.equal(recomputed(model, cps, sde_type="cps"), cps.log_probs)
    assert (recomputed(model, cps) - cps.log_probs).abs().max() > 1e-3


def test_the_rollouts_own_log_probs_do_not_see_scrambled_weights(rig, tiny_qwen_image):
    """The log-probs depend on the noise alone; a comparison must look at latents and recomputed log-probs."""
    [right] = rig.generate(rig.request("scrambled"))
    try:
        rig.run(rig.update(training_model(tiny_qwen_image, noise=0.05)))
        [wrong] = rig.generate(rig.request("scrambled"))
    finally:
        rig.run(rig.update(training_model(tiny_qwen_image)))
    assert (wrong.log_probs - right.log_probs).abs().max() < 1e-5
    assert (wrong.latents[1] - right.latents[1]).abs().max() > 1e-3
    assert (recomputed(training_model(tiny_qwen_image), wrong) - wrong.log_probs).abs().max() > 1e-3


def test_windows(rig):
    whole, part, none = rig.generate(
        rig.request("window"), rig.request("window", window=SdeWindow(4, 6)), rig.request("window", window=NO_WINDOW)
    )
    assert whole.latents.shape[0] == NUM_STEPS + 1
    assert part.latents.shape[0] == 3
    assert part.log_probs.shape == part.timesteps.shape == (2,)
    assert none.latents is None
    assert none.log_probs is None
    assert len(none.versions) == NUM_STEPS
    assert not torch.equal(part.final, none.final)


def test_one_step_and_two_sizes_and_both_kinds_of_guidance_at_once(rig):
    one, wide, guided, plain = rig.generate(
        rig.request("one", num_steps=1, window=SdeWindow(0, 1)),
        rig.request("wide", height=32),
        rig.request("guided", guided=True),
        rig.request("plain"),
    )
    assert one.latents.shape[0] == 2
    assert torch.isfinite(one.final).all()
    assert wide.image.shape == (32, 64, 3)
    assert guided.negative_prompt_embeds is not None
    assert plain.image.shape == (64, 64, 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"height": 48}, "48x64 is not allowed"),
        ({"true_cfg_scale": 4.0}, "no negative prompt mixes"),
        ({"window": SdeWindow(5, 11)}, "must stop at step 10"),
        ({"num_steps": 51}, "must be 1 to 50"),
    ],
)
def test_what_would_break_a_batch_is_refused(rig, changes, reason):
    with pytest.raises(DataError, match=reason):
        rig.generate(rig.request("refused", **changes))
