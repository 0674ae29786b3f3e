"""A start that cannot get its resources says so within its bound."""

import pytest
from omegaconf import OmegaConf

from partial_rollout.errors import ResourcesUnavailable
from partial_rollout.train.resources import missing_resources, needed_resources, require_resources

CONFIG = OmegaConf.create(
    {
        "trainer": {"n_gpus_per_node": 2, "nnodes": 1},
        "transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 8}}},
    }
)


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_names_every_missing_resource() -> None:
    text = missing_resources({"CPU": 17, "GPU": 2}, {"CPU": 4})
    assert text == "CPU: 17 needed, 4 in the cluster; GPU: 2 needed, 0 in the cluster"


def test_gives_up_at_the_bound_with_what_is_missing() -> None:
    clock = _Clock()
    with pytest.raises(ResourcesUnavailable, match="CPU: .* needed, 4 in the cluster"):
        require_resources(CONFIG, 30.0, present=lambda: {"CPU": 4, "GPU": 2}, clock=clock, sleep=clock.sleep)
    assert clock.now == 30.0


def test_a_node_that_joins_in_time_is_enough() -> None:
    clock = _Clock()
    whole = needed_resources(CONFIG)
    require_resources(CONFIG, 30.0, present=lambda: whole if clock.now > 5 else {}, clock=clock, sleep=clock.sleep)
    assert clock.now < 30
