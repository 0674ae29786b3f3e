from __future__ import annotations

import dataclasses
import struct

import pytest
import torch

from partial_rollout.diffusion.sample import Sample, SampleOptions, advance
from partial_rollout.diffusion.sde_window import SdeWindow
from partial_rollout.diffusion.snapshot import SampleState, pack, read_header, unpack
from partial_rollout.errors import DataError

CPU = torch.device("cpu")
SIGMAS = torch.linspace(1, 0, 9)


def walk(sample: Sample, latents: torch.Tensor, steps: range) -> torch.Tensor:
    """Denoise with a velocity that depends on the latents."""
    for step in steps:
        velocity = torch.sin(latents)
        latents = advance(
            sample,
            step=step,
            sigmas=SIGMAS,
            timestep=SIGMAS[step] * 1000,
            latents=latents,
            velocity=velocity,
            weight_version=step // 4,
        )
    return latents


WINDOW = SdeWindow(2, 6)


def begin(window: SdeWindow = WINDOW) -> tuple[Sample, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(1, 4, 2, generator=generator)
    return Sample(SampleOptions(window, 0.7, name="r#0"), generator), latents


def state(sample: Sample, latents: torch.Tensor, step: int) -> SampleState:
    embeds = torch.arange(6.0).bfloat16().reshape(1, 3, 2)
    tensors = {"latents": latents, "sigmas": SIGMAS, "timesteps": SIGMAS[:-1] * 1000, "prompt_embeds": embeds}
    return SampleState(sample, step, 16, 32, True, 4.0, tensors)


@pytest.mark.parametrize("step", range(9))
def test_continued_from_a_snapshot_it_is_the_same_walk(step):
    whole, start = begin()
    end = walk(whole, start, range(8))
    interrupted, start = begin()
    saved = unpack(pack(state(interrupted, walk(interrupted, start, range(step)), step)), CPU, "r#1")
    resumed = walk(saved.sample, saved.tensors["latents"], range(saved.step_index, 8))
    assert torch.equal(resumed, end)
    assert saved.sample.versions == whole.versions == [0] * 4 + [1] * 4
    for name in ("latents", "log_probs", "timesteps"):
        assert torch.equal(torch.cat(getattr(saved.sample, name)), torch.cat(getattr(whole, name))), name


def test_everything_else_comes_back():
    sample, latents = begin()
    saved = unpack(pack(state(sample, latents, 0)), CPU, "r#1")
    assert (saved.height, saved.width, saved.num_steps) == (16, 32, 8)
    assert (saved.do_true_cfg, saved.true_cfg_scale) == (True, 4.0)
    assert saved.sample.options == dataclasses.replace(sample.options, name="r#1")
    assert saved.tensors["prompt_embeds"].dtype == torch.bfloat16
    assert saved.sample.latents == []


def test_the_header_is_read_without_the_tensors():
    sample, latents = begin()
    assert read_header(pack(state(sample, latents, 5)))["step_index"] == 5


def test_other_bytes_are_refused():
    data = pack(state(*begin(), 0))
    for wrong in (b"", b"abc", struct.pack("<Q", 4) + b"null", data[8:], data[:20]):
        with pytest.raises(DataError, match="no snapshot"):
            unpack(wrong, CPU, "r#1")
    with pytest.raises(DataError, match="damaged"):
        unpack(data[:-4], CPU, "r#1")
    for other in (1, 3):
        with pytest.raises(DataError, match=f"format {other} is not format 2"):
            unpack(data.replace(b'\\"format\\": 2', f'\\"format\\": {other}'.encode()), CPU, "r#1")


def test_a_generator_of_a_device_that_is_not_here_is_named():
    data = pack(state(*begin(), 0)).replace(b'\\"generator_device\\": \\"cpu\\"', b'\\"generator_device\\": \\"xpu\\"')
    with pytest.raises(DataError, match="xpu generator.*generator_device=cpu"):
        unpack(data, CPU, "r#1")


def test_the_log_begins_with_the_latents_before_the_window():
    sample, start = begin()
    before = walk(sample, start, range(2))
    walk(sample, before, range(2, 8))
    assert len(sample.latents) == len(WINDOW) + 1
    assert torch.equal(sample.latents[0], before)


def test_what_is_outside_the_window_is_not_logged_but_versioned():
    sample, latents = begin(SdeWindow(3, 3))
    walk(sample, latents, range(8))
    assert sample.latents == sample.log_probs == sample.timesteps == []
    assert len(sample.versions) == 8
