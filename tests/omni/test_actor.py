"""The training model: what it learns from, and which weights it sends."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from partial_rollout.diffusion.actor import ADAPTER_FILE, FlowGrpoActor
from partial_rollout.diffusion.config import DiffusionConfig
from partial_rollout.diffusion.policy import log_probs, steps_of
from partial_rollout.diffusion.result import Group, SampleResult
from partial_rollout.diffusion.sde_window import SdeWindow
from partial_rollout.errors import DataError
from tests.omni.support import NOISE_LEVEL, PATCH, training_model

WAIT_S = 120.0
SIGMAS = torch.tensor([1.0, 0.7, 0.4, 0.0])


def make_actor(path, **model):
    blocks = {
        "model": {"path": str(path), "dtype": "float32", **model},
        "data": {"prompts": "p"},
        "trainer": {"output_dir": "o", "reward": "a.b"},
        "algorithm": {"sde_window_last": 2, "clip_ratio": 0.2},
        "actor": {"device": "cpu", "gradient_checkpointing": False, "micro_batch_size": 3, "lr": 1e-3},
        "rollout": {"num_steps": 3},
    }
    return FlowGrpoActor(DiffusionConfig.from_mapping(blocks), PATCH, torch.device("cpu"))


def walk(transformer, seed):
    """A trajectory of two SDE steps that the transformer itself takes, with prompts of unlike lengths."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    result = SampleResult(
        request_id=str(seed),
        image=np.zeros((64, 64, 3), dtype=np.uint8),
        final=draw(1, 64, 16),
        window=SdeWindow(0, 2),
        latents=draw(3, 64, 16),
        log_probs=torch.zeros(2),
        timesteps=SIGMAS[:2] * 1000,
        sigmas=SIGMAS,
        versions=(0, 0, 0),
        prompt_embeds=draw(1, 5 + seed, 32),
        negative_prompt_embeds=None,
    )
    with torch.no_grad():
        known = log_probs(transformer, steps_of([result], patch=PATCH, noise_level=NOISE_LEVEL, sde_type="sde"))
    result.log_probs.copy_(known)
    return result


@pytest.mark.parametrize("model", [{}, {"lora_rank": 4}])
def test_an_update_makes_better_images_likelier(tiny_qwen_image, model):
    actor = make_actor(tiny_qwen_image, **model)
    results = tuple(walk(actor.transformer, seed) for seed in range(2))
    batch = steps_of(results, patch=PATCH, noise_level=NOISE_LEVEL, sde_type="sde")
    with torch.no_grad():
        before = log_probs(actor.transformer, batch)
    first = actor.update([Group("p", results, (0.0, 1.0))])
    for _ in range(3):
        actor.update([Group("p", results, (0.0, 1.0))])
    with torch.no_grad():
        gain = (log_probs(actor.transformer, batch) - before).reshape(2, 2).mean(dim=1)
    assert gain[1] > gain[0]
    assert first["actor/rollout_ratio_deviation"] < 1e-4
    assert first["actor/grad_norm"] > 0


def test_adapters_are_sent_merged_under_the_checkpoints_names(tiny_qwen_image):
    actor, original = make_actor(tiny_qwen_image, lora_rank=4), training_model(tiny_qwen_image).state_dict()
    untouched = {name: tensor.clone() for name, tensor in actor.weights()}
    # Weights of adapted layers and no others: the engine has the rest from the same files, and it does not change.
    assert untouched.keys() == {name for name in original if ".attn." in name and ".norm_" not in name}
    assert all(torch.equal(untouched[name], original[name]) for name in untouched)
    train(actor)
    sent = {name: tensor.clone() for name, tensor in actor.weights()}
    changed = {name for name in sent if not torch.equal(sent[name], original[name])}
    assert changed
    assert all(name.endswith(".weight") for name in changed)
    assert all(torch.allclose(tensor, sent[name], atol=1e-6) for name, tensor in actor.weights())


def train(actor, num_steps=2):
    """At least 2 steps: an adapter's second matrix starts at 0, so the first update moves that one only."""
    results = tuple(walk(actor.transformer, seed) for seed in range(2))
    for _ in range(num_steps):
        actor.update([Group("p", results, (0.0, 1.0))])
    return results


def test_any_number_of_threads_read_the_same_weights(tiny_qwen_image):
    """One is half-way while others begin and end, as the threads of the servers' channels are."""
    actor = make_actor(tiny_qwen_image, lora_rank=4)
    train(actor)
    expected = {name: tensor.clone() for name, tensor in actor.weights()}
    half_way, go_on = threading.Event(), threading.Event()

    def slowly():
        found = {}
        for number, (name, tensor) in enumerate(actor.weights()):
            found[name] = tensor.clone()
            if number == 5:
                half_way.set()
                assert go_on.wait(WAIT_S)
        return found

    with ThreadPoolExecutor(4) as pool:
        slow = pool.submit(slowly)
        assert half_way.wait(WAIT_S)
        quick = [pool.submit(lambda: dict(actor.weights())) for _ in range(3)]
        read = [future.result(WAIT_S) for future in quick]
        go_on.set()
        read.append(slow.result(WAIT_S))
    for found in read:
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_reading_leaves_a_bf16_base_as_it_was_and_rounds_once(tiny_qwen_image):
    actor = make_actor(tiny_qwen_image, lora_rank=4, dtype="bfloat16")
    base = {name: item.clone() for name, item in actor.transformer.state_dict().items() if "lora_" not in name}
    results = tuple(walk(actor.transformer, seed) for seed in range(2))
    for _ in range(20):
        actor.update([Group("p", results, (0.0, 1.0))])
        sent = dict(actor.weights())
    state = actor.transformer.state_dict()
    assert [name for name in base if not torch.equal(state[name], base[name])] == []
    name = "transformer_blocks.0.attn.to_q"
    down, up = (state[f"{name}.lora_{side}.default.weight"].float() for side in "AB")
    scale = actor._config.model.lora_alpha / actor._config.model.lora_rank
    merged = base[f"{name}.base_layer.weight"].float() + scale * up @ down
    assert not torch.equal(merged.bfloat16(), base[f"{name}.base_layer.weight"])
    assert torch.equal(sent[f"{name}.weight"], merged.bfloat16())


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(tiny_qwen_image, tmp_path, lora_rank):
    """Weights and the optimizer's state are those of a training that was not stopped; other settings are in force."""

    def trained():
        torch.manual_seed(1)  # adapters begin with random values
        actor = make_actor(tiny_qwen_image, lora_rank=lora_rank)
        train(actor)
        return actor

    whole, stopped = trained(), trained()
    stopped.save_state(tmp_path)
    again = make_actor(tiny_qwen_image, lora_rank=lora_rank)
    again.load_state(tmp_path)
    sampled = walk(training_model(tiny_qwen_image, noise=0.01), 0), walk(training_model(tiny_qwen_image), 1)
    for actor in (whole, again):
        for _ in range(2):
            actor.update([Group("p", sampled, (0.0, 1.0))])
    expected, found = dict(whole.weights()), dict(again.weights())
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    slower = make_actor(tiny_qwen_image, lora_rank=lora_rank)
    slower._config = dataclasses.replace(slower._config, actor=dataclasses.replace(slower._config.actor, lr=1e-6))
    slower.load_state(tmp_path)
    assert {group["lr"] for group in slower._optimizer.param_groups} == {1e-6}


def test_a_checkpoint_of_another_model_is_refused(tiny_qwen_image, tmp_path):
    make_actor(tiny_qwen_image, lora_rank=4).save_state(tmp_path)
    with pytest.raises(DataError, match=r"lora_A.* has shape \(4, \d+\), here \(8, \d+\)"):
        make_actor(tiny_qwen_image, lora_rank=8).load_state(tmp_path)
    (tmp_path / "state.pt").write_bytes((tmp_path / "state.pt").read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        make_actor(tiny_qwen_image, lora_rank=4).check_state(tmp_path)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_what_was_trained_is_saved_and_loads_again(tiny_qwen_image, tmp_path, lora_rank):
    actor = make_actor(tiny_qwen_image, lora_rank=lora_rank)
    results = train(actor)
    actor.save(tmp_path / "transformer")
    assert list((tmp_path / "transformer").glob("*.safetensors"))
    if lora_rank:
        loaded = training_model(tiny_qwen_image)
        loaded.load_lora_adapter(str(tmp_path / "transformer"), prefix=None, weight_name=ADAPTER_FILE)
    else:
        loaded = QwenImageTransformer2DModel.from_pretrained(tmp_path / "transformer")
    batch = steps_of(results, patch=PATCH, noise_level=NOISE_LEVEL, sde_type="sde")
    with torch.no_grad():
        assert torch.equal(log_probs(loaded, batch), log_probs(actor.transformer, batch))
