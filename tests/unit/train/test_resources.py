"""A start that cannot get its resources says so within its bound."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from partial_rollout.errors import ResourcesUnavailable
from partial_rollout.train.resources import (
    Need,
    Pool,
    needed_resources,
    require_own_transfer_queue,
    require_resources,
)

CONFIG = OmegaConf.create(
    {
        "trainer": {"n_gpus_per_node": 2, "nnodes": 1},
        "transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 8}}},
    }
)
ENOUGH = {"CPU": 64.0, "GPU": 2.0}


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _need(*pools: Pool) -> Need:
    return Need(own_cpus=10, device="GPU", pools=pools)


def test_each_engine_on_devices_of_its_own_has_a_pool() -> None:
    rollout = {"nnodes": 1, "n_gpus_per_node": 4, "tensor_model_parallel_size": 2}
    own = {"partial_rollout": {"placement": "separate"}, "actor_rollout_ref": {"rollout": rollout}}
    flag = {"async_training": {"partial_rollout": True}}
    need = needed_resources(OmegaConf.merge(CONFIG, own, flag))
    assert need.pools == (Pool(2, 1), *[Pool(2, 1, cpus_per_device=2)] * 2)
    assert need.missing([{"CPU": 100.0, "GPU": 5.0}]) == "GPU: 6 needed, 5 free in the cluster"
    assert need.missing([{"CPU": 23.0, "GPU": 6.0}]) == "CPU: 24 needed, 23 free in the cluster"
    without_the_flag = needed_resources(OmegaConf.merge(CONFIG, own))
    assert without_the_flag.pools == (Pool(2, 1),), "verl's engines are on the trainer's devices"


def test_names_every_missing_resource() -> None:
    assert _need(Pool(2, 1)).missing([{"CPU": 4}]) == (
        "CPU: 16 needed, 4 free in the cluster; GPU: 2 needed, 0 free in the cluster"
    )


@pytest.mark.parametrize(
    ("pools", "nodes", "message"),
    [
        ([Pool(8, 1)], [{"CPU": 64, "GPU": 4}] * 2, "nodes with 8 GPU and 25 CPU free: 1 needed, 0 in the cluster"),
        ([Pool(8, 2)], [{"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 7}, {"GPU": 1}], "2 needed, 1 in the cluster"),
        ([Pool(8, 1)], [{"CPU": 16, "GPU": 8}, {"CPU": 64}], "nodes with 8 GPU and 25 CPU free: 1 needed, 0 in"),
        ([Pool(2, 1), Pool(8, 1)], [{"CPU": 64, "GPU": 9}, {"CPU": 64, "GPU": 1}], "nodes with 2 GPU and 7 CPU"),
        ([Pool(4, 2)], [{"CPU": 64, "GPU": 8}], ""),
        ([Pool(2, 1), Pool(8, 1)], [{"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 2}], ""),
    ],
)
def test_a_share_must_fit_on_one_node(pools: list[Pool], nodes: list[dict[str, float]], message: str) -> None:
    missing = _need(*pools).missing(nodes)
    assert message in missing
    assert bool(missing) == bool(message)


def test_pools_of_reward_model_and_teacher_count() -> None:
    further = {
        "reward": {"reward_model": {"enable_resource_pool": True, "n_gpus_per_node": 1, "nnodes": 1}},
        "distillation": {"enabled": False, "n_gpus_per_node": 4, "nnodes": 1},
    }
    assert needed_resources(CONFIG).pools == (Pool(2, 1),)
    assert needed_resources(OmegaConf.merge(CONFIG, further)).pools == (Pool(2, 1), Pool(1, 1))


def test_gives_up_at_the_bound_with_what_is_missing() -> None:
    clock = _Clock()
    busy = {"CPU": 4.0, "GPU": 2.0}
    with pytest.raises(ResourcesUnavailable, match="CPU: .* needed, 4 free in the cluster"):
        require_resources(CONFIG, 30.0, state=lambda: [busy], clock=clock, sleep=clock.sleep)
    assert clock.now == 30.0


def test_resources_that_come_free_in_time_are_enough() -> None:
    clock = _Clock()
    require_resources(
        CONFIG,
        30.0,
        state=lambda: [ENOUGH if clock.now > 5 else {}],
        clock=clock,
        sleep=clock.sleep,
    )
    assert 5 < clock.now < 30


def test_a_second_run_on_a_ray_cluster_is_refused_by_the_name_of_the_first() -> None:
    clock = _Clock()
    with pytest.raises(ResourcesUnavailable, match=r"Ray job 07 \(process 3 on n\).*carries one run"):
        require_own_transfer_queue(30.0, holder=lambda: "Ray job 07 (process 3 on n)", clock=clock, sleep=clock.sleep)
    assert clock.now == 30.0


def test_a_run_starts_when_the_one_before_it_has_ended() -> None:
    clock = _Clock()
    require_own_transfer_queue(
        30.0, holder=lambda: "Ray job 07" if clock.now < 5 else None, clock=clock, sleep=clock.sleep
    )
    assert clock.now == 5
