"""Says what the cluster lacks, instead of letting Ray wait for ever."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import ray
from verl.plugin.platform import get_platform

from partial_rollout.errors import ResourcesUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from omegaconf import DictConfig

CPUS_PER_DEVICE = 3
"""verl's placement bundle: one CPU per colocated worker, `max_colocate_count` = 3."""
SPARE_CPUS = 1
"""Actors that hold no CPU while running (workers, servers, rewards) still need one to be placed."""
CHECK_INTERVAL_S = 1.0
"""Ray has no event for a node that joins."""


def needed_resources(config: DictConfig) -> dict[str, float]:
    """Logical resources held at the same time by a run."""
    devices = config.trainer.n_gpus_per_node * config.trainer.nnodes
    storage_units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    task_runner, controller = 1, 1
    cpus = task_runner + controller + storage_units + devices * CPUS_PER_DEVICE + SPARE_CPUS
    return {"CPU": cpus, get_platform().ray_resource_name(): devices}


def missing_resources(needed: Mapping[str, float], present: Mapping[str, float]) -> str:
    """Readable list of what is missing; empty when all is there."""
    lacking = [
        f"{name}: {amount:g} needed, {present.get(name, 0):g} in the cluster"
        for name, amount in needed.items()
        if present.get(name, 0) < amount
    ]
    return "; ".join(lacking)


def require_resources(
    config: DictConfig,
    timeout_s: float,
    present: Callable[[], Mapping[str, float]] = ray.cluster_resources,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait at most `timeout_s` for the cluster to have what the run needs.

    Raises:
        ResourcesUnavailable: names each missing resource and the settings that change the need.
    """
    needed, deadline = needed_resources(config), clock() + timeout_s
    while missing := missing_resources(needed, present()):
        if clock() >= deadline:
            raise ResourcesUnavailable(
                f"the Ray cluster lacks {missing} (waited {timeout_s:g} s). Raise ray_kwargs.ray_init.num_cpus, add "
                "nodes, or lower trainer.n_gpus_per_node, trainer.nnodes or "
                "transfer_queue.backend.SimpleStorage.num_data_storage_units"
            )
        sleep(CHECK_INTERVAL_S)
