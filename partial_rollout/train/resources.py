"""Says what the cluster lacks, instead of letting Ray wait for ever."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray
from verl.plugin.platform import get_platform

from partial_rollout.errors import ResourcesUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omegaconf import DictConfig

CPUS_PER_DEVICE = 3
"""verl's placement bundle: one CPU per colocated worker, `max_colocate_count` = 3."""
SPARE_CPUS = 1
"""Actors that hold no CPU while running (workers, servers, rewards) still need one to be placed."""
CHECK_INTERVAL_S = 1.0
"""Ray has no event for a node that joins or a job that ends."""
ADVICE = (
    "Raise ray_kwargs.ray_init.num_cpus, add nodes, end other jobs, or lower trainer.n_gpus_per_node, trainer.nnodes "
    "or transfer_queue.backend.SimpleStorage.num_data_storage_units"
)


@dataclass(frozen=True, slots=True)
class Need:
    """Logical resources that a run holds at the same time, beside its task runner."""

    cpus: int
    device: str
    """Name of the device resource, "GPU" or "NPU"."""
    devices_per_node: int
    num_nodes: int

    def missing(self, free: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
        """Readable list of what is missing; empty when all is there.

        Args:
            free: resources of the cluster that nobody holds.
            nodes: all resources of each living node; verl packs `devices_per_node` devices onto each of its nodes.
        """
        num_devices = self.devices_per_node * self.num_nodes
        wanted = {"CPU": self.cpus, self.device: num_devices}
        lacking = [
            f"{name}: {amount:g} needed, {free.get(name, 0):g} free in the cluster"
            for name, amount in wanted.items()
            if free.get(name, 0) < amount
        ]
        fitting = sum(node.get(self.device, 0) >= self.devices_per_node for node in nodes)
        if fitting < self.num_nodes:
            lacking.append(
                f"nodes with {self.devices_per_node} {self.device}: {self.num_nodes} needed, {fitting} in the cluster"
            )
        return "; ".join(lacking)


def needed_resources(config: DictConfig) -> Need:
    """What verl's actors for `config` hold."""
    per_node, num_nodes = config.trainer.n_gpus_per_node, config.trainer.nnodes
    storage_units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    controller = 1
    cpus = controller + storage_units + per_node * num_nodes * CPUS_PER_DEVICE + SPARE_CPUS
    return Need(cpus, get_platform().ray_resource_name(), per_node, num_nodes)


def cluster_state() -> tuple[Mapping[str, float], list[Mapping[str, float]]]:
    """Free resources, and all resources of each living node."""
    return ray.available_resources(), [node["Resources"] for node in ray.nodes() if node["Alive"]]


def require_resources(
    config: DictConfig,
    timeout_s: float,
    *,
    state: Callable[[], tuple[Mapping[str, float], Sequence[Mapping[str, float]]]] = cluster_state,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait at most `timeout_s` for the cluster to have what the run needs.

    Raises:
        ResourcesUnavailable: names each missing resource and the settings that change the need.
    """
    needed, deadline = needed_resources(config), clock() + timeout_s
    while missing := needed.missing(*state()):
        if clock() >= deadline:
            raise ResourcesUnavailable(f"the Ray cluster lacks {missing} (waited {timeout_s:g} s). {ADVICE}")
        sleep(CHECK_INTERVAL_S)
