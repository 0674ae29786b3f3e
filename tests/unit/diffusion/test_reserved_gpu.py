"""What a cluster lacks is named with the keys that ask for it; the trained model has a GPU of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from partial_rollout.diffusion.config import DiffusionConfig
from partial_rollout.diffusion.resources import device_of, require_resources
from partial_rollout.errors import ConfigError


def make_config(**rollout: Any) -> DiffusionConfig:
    return DiffusionConfig.from_mapping(
        {
            "model": {"path": "m"},
            "data": {"prompts": "p"},
            "trainer": {"output_dir": "o", "reward": "a.b"},
            "actor": {"device": rollout.pop("device", "cuda")},
            "rollout": rollout,
        }
    )


@pytest.mark.parametrize(
    ("rollout", "total", "here", "reason"),
    [
        ({"num_servers": 3}, {"CPU": 2, "GPU": 8}, {"GPU": 8}, r"rollout.num_servers=3 needs 3 CPUs, .* has 2 "),
        ({"num_servers": 8}, {"CPU": 9, "GPU": 8}, {"GPU": 8}, r"rollout.num_servers=8 .*'cuda' need 9 GPUs, .* has 8"),
        (
            {"num_servers": 1},
            {"CPU": 9, "GPU": 8},
            {},
            r"actor.device='cuda' is not allowed: Ray has no GPU on the node",
        ),
        ({"num_servers": 2, "device": "cpu"}, {"CPU": 9}, {}, r"gpus_per_server=1 .*'cpu' need 2 GPUs, .* has 0"),
    ],
)
def test_what_is_missing_is_named(
    rollout: dict[str, Any], total: dict[str, float], here: dict[str, float], reason: str
):
    with pytest.raises(ConfigError, match=reason):
        require_resources(make_config(**rollout), total, here)


def test_what_is_there_is_enough():
    require_resources(make_config(num_servers=7), {"CPU": 7, "GPU": 8}, {"GPU": 8})
    require_resources(make_config(num_servers=2, gpus_per_server=0, device="cpu"), {"CPU": 2}, {})


@pytest.mark.parametrize(("gpu", "visible", "index"), [("3", None, 3), ("3", "1, 3", 1), ("GPU-x", "GPU-y,GPU-x", 1)])
def test_the_gpu_that_ray_gives_is_found_among_those_that_are_seen(gpu: str, visible: str | None, index: int):
    assert device_of(gpu, visible) == torch.device("cuda", index)


def test_a_gpu_that_is_not_seen_is_named():
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='0' is .*: Ray gives the job GPU 1"):
        device_of("1", "0")
