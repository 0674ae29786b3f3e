"""Says which resources the Ray cluster lacks; Ray itself would wait for them for ever."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray
from omegaconf import OmegaConf
from ray._private import state as ray_state
from ray._private.state import available_resources_per_node
from verl.plugin.platform import get_platform

from partial_rollout.errors import ResourcesUnavailable
from partial_rollout.settings.derived import devices_of_engine, has_own_devices, num_rollout_devices
from partial_rollout.settings.flag import is_enabled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omegaconf import DictConfig

CPUS_PER_DEVICE, CPUS_PER_ENGINE_DEVICE = 3, 2
"""verl reserves one CPU for each worker that shares a device, and plans for 3 of them (`max_colocate_count`); for 2 on
a device of an engine alone."""
SPARE_CPUS = 1
"""Actors that hold no CPU while they run (workers, servers, rewards) still need a free one to be started."""
POOLS_OF_THEIR_OWN = {"reward.reward_model": "enable_resource_pool", "distillation": "enabled"}
"""Configuration blocks that add a pool of devices, and the key of the block that turns the pool on."""
CHECK_INTERVAL_S = 1.0
"""Free resources are asked for at this interval: Ray has no event for a node that joins or a job that ends."""
TRANSFER_QUEUE = ("TransferQueueController", "transfer_queue")
"""Name and namespace of TransferQueue's controller, literals in TransferQueue: each Ray cluster has one at most."""
ADVICE = (
    "Raise ray_kwargs.ray_init.num_cpus, add nodes, end other jobs, or lower trainer.n_gpus_per_node, trainer.nnodes "
    "or transfer_queue.backend.SimpleStorage.num_data_storage_units; with partial_rollout.placement=separate also "
    "actor_rollout_ref.rollout.n_gpus_per_node or nnodes"
)


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that verl places together: `devices_per_node` on each of `num_nodes` nodes."""

    devices_per_node: int
    num_nodes: int
    cpus_per_device: int = CPUS_PER_DEVICE

    @property
    def num_devices(self) -> int:
        """Devices on all nodes together."""
        return self.devices_per_node * self.num_nodes


@dataclass(frozen=True, slots=True)
class Need:
    """Resources of the Ray cluster that a run holds at the same time.

    A run of one pool on one node with 8 GPUs, which has 3 CPUs for each of them, on two clusters of one node:

    >>> need = Need(own_cpus=2, device="GPU", pools=(Pool(devices_per_node=8, num_nodes=1),))
    >>> need.missing([{"CPU": 32.0, "GPU": 8.0}])
    ''
    >>> need.missing([{"CPU": 32.0, "GPU": 4.0}])
    'GPU: 8 needed, 4 free in the cluster'
    """

    own_cpus: int
    """CPUs outside of the pools."""
    device: str
    """Ray's name of the device: "GPU" or "NPU"."""
    pools: tuple[Pool, ...]

    def missing(self, nodes: Sequence[Mapping[str, float]]) -> str:
        """Say what is missing if `nodes` are the free resources of each node; empty if nothing is."""
        num_devices = sum(pool.num_devices for pool in self.pools)
        num_cpus = sum(pool.num_devices * pool.cpus_per_device for pool in self.pools)
        wanted = {"CPU": self.own_cpus + num_cpus, self.device: num_devices}
        free = {name: sum(node.get(name, 0) for node in nodes) for name in wanted}
        lacking = [
            f"{name}: {amount:g} needed, {free[name]:g} free in the cluster"
            for name, amount in wanted.items()
            if free[name] < amount
        ]
        return "; ".join(lacking or self._unplaced(nodes))

    def _unplaced(self, nodes: Sequence[Mapping[str, float]]) -> list[str]:
        """Nodes that a pool lacks, when the pools with the most devices on a node are placed first."""
        room = [dict(node) for node in nodes]
        for pool in sorted(self.pools, key=lambda pool: -pool.devices_per_node):
            share = {
                self.device: pool.devices_per_node,
                "CPU": pool.devices_per_node * pool.cpus_per_device + SPARE_CPUS,
            }
            for number in range(pool.num_nodes):
                node = next((n for n in room if all(n.get(name, 0) >= amount for name, amount in share.items())), None)
                if node is None:
                    what = " and ".join(f"{amount:g} {name}" for name, amount in share.items())
                    return [f"nodes with {what} free: {pool.num_nodes} needed, {number} in the cluster"]
                for name, amount in share.items():
                    node[name] -= amount
        return []


def needed_resources(config: DictConfig) -> Need:
    """The resources that verl's actors hold in a run of `config`; the task runner itself holds none."""
    storage_units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    controller = 1
    pools = [Pool(config.trainer.n_gpus_per_node, config.trainer.nnodes)]
    for key, switch in POOLS_OF_THEIR_OWN.items():
        block = OmegaConf.select(config, key)
        if block is not None and block.get(switch):
            pools.append(Pool(block.n_gpus_per_node, block.nnodes))
    if is_enabled(config) and has_own_devices(config):  # verl makes a pool for each engine
        devices = devices_of_engine(config)
        pools += [Pool(devices, 1, CPUS_PER_ENGINE_DEVICE)] * (num_rollout_devices(config) // devices)
    return Need(controller + storage_units + SPARE_CPUS, get_platform().ray_resource_name(), tuple(pools))


def free_resources() -> list[Mapping[str, float]]:
    """Free resources of each living node. Ray has no public call for them; verl asks in the same way."""
    return list(available_resources_per_node().values())


def require_resources(
    config: DictConfig,
    timeout_s: float,
    *,
    state: Callable[[], Sequence[Mapping[str, float]]] = free_resources,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the cluster has free what the run needs, at most `timeout_s` seconds.

    Raises:
        ResourcesUnavailable: names each missing resource and the settings that change the need.
    """
    needed = needed_resources(config)
    if missing := _left_after(timeout_s, lambda: needed.missing(state()), clock, sleep):
        raise ResourcesUnavailable(
            f"the Ray cluster lacks {missing} (waited partial_rollout.timeouts.resources_s={timeout_s:g}). {ADVICE}"
        )


def transfer_queue_holder() -> str | None:
    """In words, whose TransferQueue the Ray cluster has; None if it has none."""
    name, namespace = TRANSFER_QUEUE
    try:
        controller = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
    job_id = controller._actor_id.job_id.hex()
    job = next((job for job in ray_state.jobs() if job["JobID"] == job_id), {})
    where = f"process {job.get('DriverPid', '?')} on {job.get('DriverIPAddress', '?')}"
    return f"Ray job {job_id} ({where}: {job.get('Entrypoint', 'command unknown')})"


def require_own_transfer_queue(
    timeout_s: float,
    *,
    holder: Callable[[], str | None] = transfer_queue_holder,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait at most `timeout_s` until no other run has its TransferQueue on this Ray cluster.

    TransferQueue would join the other run's without a word: this run would clear the other one's rows when it restores
    its queue, and end the other one's controller when it ends.

    Raises:
        ResourcesUnavailable: names the run that has it.
    """
    if other := _left_after(timeout_s, holder, clock, sleep):
        raise ResourcesUnavailable(
            f"another run is training on this Ray cluster: {other} (waited {timeout_s:g} s for its end). One Ray "
            "cluster carries one run, because TransferQueue has one name for all: wait for the other run, end it, "
            "or start this one on a Ray cluster of its own (ray_kwargs.ray_init.address, RAY_ADDRESS)"
        )


def _left_after(
    timeout_s: float,
    obstacle: Callable[[], str | None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> str | None:
    """Wait at most `timeout_s` until `obstacle` names nothing; what it still names then."""
    deadline = clock() + timeout_s
    while (found := obstacle()) and clock() < deadline:
        sleep(CHECK_INTERVAL_S)
    return found
