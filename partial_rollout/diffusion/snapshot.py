"""An interrupted sample as bytes: safetensors with a JSON header, because reading them runs nobody's code.

A snapshot has everything that later steps depend on: latents, schedule, generator, embeddings, guidance, window and the
trajectory so far. A sample that goes on from its snapshot with the same weights, on the same kind of device, ends bit
for bit as if it had not been interrupted.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from partial_rollout.diffusion.sample import Sample, SampleOptions
from partial_rollout.diffusion.sde_window import SdeWindow
from partial_rollout.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORMAT = 2
HEADER_BYTES = 8
EMBEDS = ("prompt_embeds", "negative_prompt_embeds")
LISTS = ("latents", "log_probs", "timesteps")
PREFIX = {name: f"trajectory_{name}" for name in LISTS}


@dataclasses.dataclass(frozen=True, slots=True)
class SampleState:
    """A sample between two denoise steps."""

    sample: Sample
    step_index: int
    """Denoise steps taken so far."""
    height: int
    width: int
    do_true_cfg: bool
    true_cfg_scale: float
    tensors: Mapping[str, torch.Tensor]
    """latents [1, T, C] fp32; sigmas [num_steps + 1]; timesteps [num_steps]; prompt_embeds [1, L, D];
    negative_prompt_embeds [1, L, D], with CFG only; guidance [1], for distilled models only."""

    @property
    def num_steps(self) -> int:
        """Denoise steps of the whole sample."""
        return int(self.tensors["timesteps"].shape[0])


def pack(state: SampleState) -> bytes:
    """The sample as bytes; tensors are copied to the CPU."""
    sample, options = state.sample, state.sample.options
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    tensors["generator"] = sample.generator.get_state().cpu()
    tensors |= {PREFIX[name]: _stacked(getattr(sample, name)) for name in LISTS if getattr(sample, name)}
    header = {
        "format": FORMAT,
        "generator_device": sample.generator.device.type,
        "window": [options.window.start, options.window.stop],
        "noise_level": options.noise_level,
        "sde_type": options.sde_type,
        "versions": sample.versions,
        "step_index": state.step_index,
        "height": state.height,
        "width": state.width,
        "do_true_cfg": state.do_true_cfg,
        "true_cfg_scale": state.true_cfg_scale,
    }
    return save(tensors, metadata={"header": json.dumps(header)})


def unpack(data: bytes, device: torch.device, name: str) -> SampleState:
    """The sample, with its tensors on `device` and its generator on the kind of device that it had.

    `name` is the name of the request that goes on, because each attempt has a name of its own.

    Raises:
        DataError: `data` is no snapshot, has another format, or needs a kind of device that is not here.
    """
    header, tensors = read_header(data), _load(data)
    generator = _generator(header["generator_device"], tensors.pop("generator"))
    options = SampleOptions(SdeWindow(*header["window"]), header["noise_level"], header["sde_type"], None, name)
    sample = Sample(options, generator, versions=list(header["versions"]))
    for name in LISTS:
        stacked = tensors.pop(PREFIX[name], None)
        if stacked is not None:
            setattr(sample, name, list(stacked.to(device).split(1)))
    return SampleState(
        sample=sample,
        step_index=header["step_index"],
        height=header["height"],
        width=header["width"],
        do_true_cfg=header["do_true_cfg"],
        true_cfg_scale=header["true_cfg_scale"],
        tensors={name: tensor.to(device) for name, tensor in tensors.items()},
    )


def read_header(data: bytes) -> dict[str, Any]:
    """The header of a snapshot: all but its tensors.

    Raises:
        DataError: these bytes are no snapshot, or a snapshot of another format.
    """
    try:
        length = int.from_bytes(data[:HEADER_BYTES], "little")
        header = json.loads(json.loads(data[HEADER_BYTES : HEADER_BYTES + length])["__metadata__"]["header"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{len(data)} bytes are no snapshot of a sample: {error!r}", "bad_snapshot") from error
    if header.get("format") != FORMAT:
        raise DataError(f"a snapshot of format {header.get('format')} is not format {FORMAT}", "bad_snapshot")
    return header


def _load(data: bytes) -> dict[str, torch.Tensor]:
    try:
        return load(data)
    except SafetensorError as error:
        raise DataError(f"{len(data)} bytes are a damaged snapshot: {error}", "bad_snapshot") from error


def _generator(device: str, state: torch.Tensor) -> torch.Generator:
    """A generator with this state, which has a meaning only on the kind of device that it was made on."""
    try:
        generator = torch.Generator(device=device)
        generator.set_state(state)
    except RuntimeError as error:
        raise DataError(
            f"the snapshot's noise comes from a {device} generator, which cannot be restored here ({error}); "
            "samples that move between kinds of devices need generator_device=cpu",
            "bad_snapshot",
        ) from error
    return generator


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().cpu() for tensor in tensors])
