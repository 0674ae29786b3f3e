"""The GPU that a diffusion job trains on is nobody else's, as far as Ray is asked."""

from __future__ import annotations

import time

import pytest
import torch

from partial_rollout.diffusion.resources import VISIBLE, reserve_gpu
from partial_rollout.errors import ConfigError, WaitTimeout

START_S = 60.0
PAUSE_S = 0.1
"""Ray tells nobody when its count has changed."""


def gpus_left(ray):
    """What Ray has to give, as soon as that is nothing; its count is a little behind."""
    deadline_s = time.monotonic() + START_S
    while (left := ray.available_resources().get("GPU", 0)) and time.monotonic() < deadline_s:
        time.sleep(PAUSE_S)
    return left


def test_while_the_job_has_its_gpu_nobody_else_gets_it(ray_cluster, monkeypatch):
    monkeypatch.delenv(VISIBLE, raising=False)
    reservation, device = reserve_gpu(START_S)
    try:
        assert device == torch.device("cuda", 0)
        assert gpus_left(ray_cluster) == 0
        with pytest.raises(WaitTimeout, match=r"the job for a GPU to train on \(actor.device='cuda'\)"):
            reserve_gpu(0.1)
    finally:
        ray_cluster.kill(reservation)
    again, device = reserve_gpu(START_S)
    ray_cluster.kill(again)
    assert device == torch.device("cuda", 0)


def test_a_gpu_that_the_job_does_not_see_is_named(ray_cluster, monkeypatch):
    monkeypatch.setenv(VISIBLE, "7")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='7' is .*: Ray gives the job GPU 0"):
        reserve_gpu(START_S)
