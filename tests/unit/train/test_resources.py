"""A start that cannot get its resources says so within its bound."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from partial_rollout.errors import ResourcesUnavailable
from partial_rollout.train.resources import Need, needed_resources, require_resources

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


def test_names_every_missing_resource() -> None:
    need = Need(cpus=17, device="GPU", devices_per_node=2, num_nodes=1)
    assert need.missing({"CPU": 4}, [{"CPU": 4}]) == (
        "CPU: 17 needed, 4 free in the cluster; GPU: 2 needed, 0 free in the cluster; "
        "nodes with 2 GPU: 1 needed, 0 in the cluster"
    )


def test_devices_spread_over_nodes_are_not_enough() -> None:
    need = Need(cpus=1, device="GPU", devices_per_node=8, num_nodes=1)
    assert need.missing({"CPU": 64, "GPU": 8}, [{"GPU": 4}, {"GPU": 4}]) == (
        "nodes with 8 GPU: 1 needed, 0 in the cluster"
    )


def test_gives_up_at_the_bound_with_what_is_missing() -> None:
    clock = _Clock()
    busy = {"CPU": 4.0, "GPU": 2.0}
    with pytest.raises(ResourcesUnavailable, match="CPU: .* needed, 4 free in the cluster"):
        require_resources(CONFIG, 30.0, state=lambda: (busy, [ENOUGH]), clock=clock, sleep=clock.sleep)
    assert clock.now == 30.0


def test_resources_that_come_free_in_time_are_enough() -> None:
    clock = _Clock()
    assert needed_resources(CONFIG).cpus < ENOUGH["CPU"]
    require_resources(
        CONFIG,
        30.0,
        state=lambda: (ENOUGH if clock.now > 5 else {}, [ENOUGH]),
        clock=clock,
        sleep=clock.sleep,
    )
    assert 5 < clock.now < 30
